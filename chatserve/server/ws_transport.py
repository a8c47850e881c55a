"""uvicorn's WebSocket protocol, with the one thing ASGI cannot say: end this connection now.

ASGI's close waits for the peer to read what was sent before, and so does closing a transport; a peer that never reads
would keep its socket for ever. This adds an entry to the scope's extensions that queues a close frame and aborts the
transport shortly after. Also keeps invalid UTF-8 from being logged with a traceback. `server.run` hands this class to
uvicorn; `websocket` uses the extension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

EXTENSION = "chatserve.fail"
ABORT_SECONDS = 5.0
"""How long a peer has to read the close frame before its connection is cut."""

GOODBYE_SECONDS = 0.25
"""Between the end of the last answer and the close that ends the server's part."""


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """One per connection."""

    async def run_asgi(self) -> None:
        """Run the application with `EXTENSION` in its scope."""
        extensions = cast(dict[str, Any], self.scope["extensions"])
        extensions[EXTENSION] = {"fail": self.fail}
        await super().run_asgi()
        # A graceful close waits for a reader; bound that wait.
        self.loop.call_later(self.close_timeout + ABORT_SECONDS, self._abort)

    def fail(self, code: int, reason: str) -> None:
        """Close with ``code``; what cannot be written within `ABORT_SECONDS` never is."""
        if self.close_sent or self.disconnected or not self.handshake_complete:
            return
        self.conn.send_close(code, reason)
        self.close_sent = True
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.transport.close()
        self.loop.call_later(ABORT_SECONDS, self._abort)

    def shutdown(self) -> None:
        """The server is going: close with 1012, but let the ends of answers, which came a moment ago, leave first."""
        self.loop.call_later(GOODBYE_SECONDS if self.handshake_complete else 0, self._shut_down)

    def _shut_down(self) -> None:
        if not self.disconnected and not self.transport.is_closing():
            super().shutdown()

    def send_receive_event_to_app(self) -> None:
        """Close with 1007, and without a stack trace in the log, where a text is not UTF-8."""
        if self.curr_msg_data_type == "text" and not self.close_sent:
            try:
                b"".join(self.frames).decode()
            except UnicodeDecodeError:
                self.conn.send_close(1007, "invalid UTF-8")
                self.handle_parser_exception()
                return
        super().send_receive_event_to_app()

    def keepalive_timeout(self) -> None:
        """No pong in time: close, and cut the connection if even that is not read."""
        super().keepalive_timeout()
        self.loop.call_later(ABORT_SECONDS, self._abort)

    def _abort(self) -> None:
        if not self.disconnected:
            self.transport.abort()


def fail_function(scope: Any) -> Callable[[int, str], None] | None:
    """The `fail` of the connection behind an ASGI scope, where this protocol serves it."""
    extension = scope.get("extensions", {}).get(EXTENSION)
    return None if extension is None else cast(Callable[[int, str], None], extension["fail"])
