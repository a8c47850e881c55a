"""uvicorn's HTTP/1.1 protocol with the guards it lacks: deadlines and limits for receiving a request.

A client has ``receive_timeout`` seconds for headers and body together, may send a bounded head, and gets exactly
one answer per request even when what follows is garbage. Also leaves the transport in the ASGI scope, so that a
stream can drop a reader that does not read. Knows bytes, no routes; `chatserve.server.run` installs it.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from chatserve.errors import ChatserveError, InvalidRequestError, RequestTimeoutError
from chatserve.server.errors import encode_error, status_of
from chatserve.server.sse import TRANSPORT_KEY

MAX_URL_BYTES = 16 * 1024
MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 128
MAX_DISCARDED_BYTES = 8 * 1024 * 1024
"""Of a refused body, how much is read and thrown away so that the client gets to see the refusal."""


class _HeadTooLargeError(Exception):
    """Raised inside a parser callback; the parser wraps it."""


class GuardedHttpProtocol(HttpToolsProtocol):
    """One connection.

    Attributes:
        receive_timeout: seconds from a request's first byte (or the connection) to its last.
    """

    receive_timeout: ClassVar[float] = 20.0

    _deadline: asyncio.TimerHandle | None = None
    _in_head = True
    _head_bytes = 0
    _discarded = 0
    _refused = False
    _head_status = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._deadline is None and (self.cycle is None or self.cycle.response_complete):
            self._start_deadline()
        was_in_head = self._in_head
        super().data_received(data)
        if was_in_head and self._in_head and not self._refused:
            # The parser keeps an unfinished header to itself, so its bytes are counted here.
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._head_status = 431
                self.send_400_response("")

    def handle_websocket_upgrade(self) -> None:
        self._stop_deadline()
        super().handle_websocket_upgrade()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[TRANSPORT_KEY] = self.transport  # type: ignore[literal-required]
        self._in_head, self._head_bytes, self._discarded = True, 0, 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MAX_URL_BYTES:
            self._head_status = 414
            raise _HeadTooLargeError

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > MAX_HEAD_BYTES or len(self.headers) > MAX_HEADERS:
            self._head_status = 431
            raise _HeadTooLargeError

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self.cycle.response_complete:
            self._discarded += len(body)
            if self._discarded > MAX_DISCARDED_BYTES:
                self.transport.abort()
            return
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._stop_deadline()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what the parser could not take, or close where an answer is on its way already."""
        status = self._head_status or 400
        if status == 400:
            self._refuse(InvalidRequestError("This is not a valid HTTP request.", code="invalid_http"), status)
        else:
            text = "The URL is too long." if status == 414 else "The request headers are too large or too many."
            self._refuse(InvalidRequestError(text, code="headers_too_large"), status)

    def _refuse(self, error: ChatserveError, status: int) -> None:
        self._refused = True
        self._stop_deadline()
        cycle = self.cycle
        busy = cycle is not None and not cycle.response_complete
        if busy:
            cycle.disconnected = True
            cycle.message_event.set()
        if busy and (cycle.response_started or not cycle.more_body):
            self.transport.abort()
            return
        response = Response(encode_error(error), status, {"connection": "close"}, media_type="application/json")
        head = [STATUS_LINE[status], *(b"%s: %s\r\n" % pair for pair in response.raw_headers), b"\r\n"]
        self.transport.write(b"".join(head) + bytes(response.body))
        self.transport.close()

    def _start_deadline(self) -> None:
        self._stop_deadline()
        self._deadline = self.loop.call_later(self.receive_timeout, self._too_late)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_late(self) -> None:
        self._deadline = None
        if not self.transport.is_closing():
            error = RequestTimeoutError(f"The request did not arrive within {self.receive_timeout:g} seconds.")
            self._refuse(error, status_of(error))


def guarded_protocol(receive_timeout: float) -> type[GuardedHttpProtocol]:
    """The protocol class for one server's configuration."""
    members: dict[str, Any] = {"receive_timeout": receive_timeout}
    return type("ConfiguredHttpProtocol", (GuardedHttpProtocol,), members)
