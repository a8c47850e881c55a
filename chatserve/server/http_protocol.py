"""uvicorn's HTTP/1.1 protocol with the guards it lacks: deadlines and limits for receiving a request.

A client has ``receive_timeout`` seconds for headers and body together, may send a bounded head, and gets exactly
one answer per request even when what follows is garbage. Also leaves two things in the ASGI scope: the transport, so
that a stream can drop a reader that does not read, and a short way to the response's body. Knows bytes, no routes;
`chatserve.server.run` installs it.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Any, ClassVar

from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from chatserve.errors import ChatserveError, InvalidRequestError, RequestTimeoutError
from chatserve.server.errors import encode_error, status_of
from chatserve.server.sse import BODY_KEY, TRANSPORT_KEY

MAX_URL_BYTES = 16 * 1024
MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 128
MAX_DISCARDED_BYTES = 16 * 1024 * 1024
LINGER_SECONDS = 2.0
"""How much of what follows a refusal, and for how long, is read and thrown away: closing a socket with unread bytes
resets the connection, and the client might never see the refusal.
"""


class _StopParsingError(Exception):
    """Raised inside a parser callback, which wraps it and ends in `send_400_response`."""


class ChunkedBody:
    """`sse.BodyWriter` of one response without a length: does what uvicorn's ``send`` does with a piece of it."""

    __slots__ = ("_cycle", "_flow", "_write")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._write = cycle.transport.write

    def is_ready(self) -> bool:
        cycle = self._cycle
        if self._flow.write_paused or cycle.disconnected or cycle.response_complete:
            return False
        return cycle.chunked_encoding is True  # decided when the response starts

    def write(self, data: bytes) -> None:
        self._write(b"%x\r\n%b\r\n" % (len(data), data))


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
    _deaf = False
    _head_status = 0
    _body_complete = True
    _close_after_response = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            self._discard(len(data))
            return
        if self._deadline is None and not self._busy:
            self._start_deadline()
        was_in_head = self._in_head
        super().data_received(data)
        if was_in_head and self._in_head and not self._deaf:
            # The parser keeps an unfinished header to itself, so its bytes are counted here.
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._head_status = 431
                self.send_400_response("")

    def handle_websocket_upgrade(self) -> None:
        self._stop_deadline()
        super().handle_websocket_upgrade()

    def on_message_begin(self) -> None:
        if self._busy:
            # Pipelining: the answer under way is the connection's last, and nothing hides the client's leaving.
            self.cycle.keep_alive = False
            self._deaf = True
            raise _StopParsingError
        super().on_message_begin()
        self.scope[TRANSPORT_KEY] = self.transport  # type: ignore[literal-required]
        self._in_head, self._head_bytes, self._discarded = True, 0, 0
        self._body_complete = False

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MAX_URL_BYTES:
            self._head_status = 414
            raise _StopParsingError

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > MAX_HEAD_BYTES or len(self.headers) > MAX_HEADERS:
            self._head_status = 431
            raise _StopParsingError

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._in_head = False
        if self.parser.should_upgrade():
            return
        self.scope[BODY_KEY] = ChunkedBody(self.cycle)  # type: ignore[literal-required]
        if not self.cycle.keep_alive:
            # uvicorn would close with the response's last byte, whatever is still unread.
            self.cycle.keep_alive = True
            self._close_after_response = True

    def on_body(self, body: bytes) -> None:
        if self.cycle.response_complete:
            self._discard(len(body))
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._body_complete = True
        self._stop_deadline()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._close_after_response:
            self._close()

    def send_400_response(self, msg: str) -> None:
        """Refuse what the parser could not take, or close where an answer is on its way already."""
        if self._deaf:
            return
        status = self._head_status or 400
        if status == 400:
            self._refuse(InvalidRequestError("This is not a valid HTTP request.", code="invalid_http"), status)
        else:
            text = "The URL is too long." if status == 414 else "The request headers are too large or too many."
            self._refuse(InvalidRequestError(text, code="headers_too_large"), status)

    @property
    def _busy(self) -> bool:
        """Whether a request has arrived that is not answered to the end."""
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, error: ChatserveError, status: int) -> None:
        self._deaf = True
        self._stop_deadline()
        if self._busy:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started or not self.cycle.more_body:
                self.transport.abort()
                return
        elif not self._in_head and not self._body_complete:  # answered already, while its body was on its way
            self.transport.abort()
            return
        headers = {"connection": "close", "x-request-id": secrets.token_hex(16)}
        response = Response(encode_error(error), status, headers, media_type="application/json")
        head = [STATUS_LINE[status], *(b"%s: %s\r\n" % pair for pair in response.raw_headers), b"\r\n"]
        self.transport.write(b"".join(head) + bytes(response.body))
        self._close()

    def _close(self) -> None:
        """Close once everything was sent, and once everything was received if more is on its way."""
        if self._body_complete or self.transport.is_closing():
            self.transport.close()
            return
        self._deaf = True
        self._unset_keepalive_if_required()
        self._stop_deadline()
        self._deadline = self.loop.call_later(LINGER_SECONDS, self.transport.abort)
        self.transport.write_eof()

    def _discard(self, num_bytes: int) -> None:
        self._discarded += num_bytes
        if self._discarded > MAX_DISCARDED_BYTES:
            self.transport.abort()

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
