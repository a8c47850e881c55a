"""uvicorn's WebSocket protocol, with what ASGI cannot say: end this connection now, and write without a detour.

ASGI's close waits for the peer to read what was sent before, and so does closing a transport; a peer that never reads
would keep its socket for ever. So the scope's extensions get an entry that queues a close frame and aborts the
transport shortly after; and one that puts a text frame on the connection at once where nothing must be waited for,
because ASGI's ``send`` costs several times what sending does. Also keeps invalid UTF-8 from being logged with a
traceback. `server.run` hands this class to uvicorn; `websocket` and `ws_connection` use the extensions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.protocol import State

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
        extensions[EXTENSION] = {"fail": self.fail, "frames": self}
        await super().run_asgi()
        # A graceful close waits for a reader; bound that wait.
        self.loop.call_later(self.close_timeout + ABORT_SECONDS, self._abort)

    def is_ready(self) -> bool:
        """Whether `write_text` may be called: the connection is open, and its reader keeps up."""
        return self.writable.is_set() and self.conn.state is State.OPEN and not (self.close_sent or self.disconnected)

    def write_text(self, payload: bytes) -> None:
        """Send one text frame (RFC 6455, section 5.2), UTF-8, without waiting; only while `is_ready` says so."""
        size = len(payload)
        if size < 126:
            head = b"\x81%c" % size
        elif size < 2**16:
            head = b"\x81\x7e" + size.to_bytes(2, "big")
        else:
            head = b"\x81\x7f" + size.to_bytes(8, "big")
        self.transport.write(head + payload)

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


def text_frames(scope: Any) -> WebSocketProtocol | None:
    """The short way to the connection behind an ASGI scope, where this protocol serves it."""
    extension = scope.get("extensions", {}).get(EXTENSION)
    return None if extension is None else cast(WebSocketProtocol, extension["frames"])


def fail_function(scope: Any) -> Callable[[int, str], None] | None:
    """The `fail` of the connection behind an ASGI scope, where this protocol serves it."""
    extension = scope.get("extensions", {}).get(EXTENSION)
    return None if extension is None else cast(Callable[[int, str], None], extension["fail"])
