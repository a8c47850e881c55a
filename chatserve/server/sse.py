"""Server-sent events with exact bytes: framing, heartbeats, disconnects and readers that do not read.

Headers leave at once, before the first token exists. Three tasks per stream: the work, a watch for the client's
disconnect (a queued request sends nothing for seconds, so waiting for a failed send would be too late), and a
pulse that sends comments while nothing else is sent and notices a stalled reader. Knows nothing of models.
"""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios
from collections.abc import Awaitable, Callable
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from chatserve.server.body import wait_for_disconnect

HEARTBEAT = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
]

TRANSPORT_KEY = "chatserve.transport"
"""Where `chatserve.server.http_protocol` leaves the connection's transport in the ASGI scope."""


BODY_KEY = "chatserve.body"
"""Where it leaves a `BodyWriter` for the response, if the connection has one."""


class BodyWriter(Protocol):
    """Pieces of one response's body, straight to its connection: what ASGI's ``send`` does, without its detours."""

    def is_ready(self) -> bool:
        """Whether `write` may be called: the response has started and goes on, and its reader keeps up."""
        ...

    def write(self, data: bytes) -> None:
        """Hand over a piece, which must not be empty (that would end the body). Never waits."""
        ...


def event(data: bytes) -> bytes:
    """One frame."""
    return b"data: " + data + b"\n\n"


class EventWriter:
    """The sending half of one stream; `write` waits while the client's buffer is full, so memory is bounded.

    Attributes:
        is_ready: whether `write_now` may be called just now: there is a short way, and the reader keeps up.
        last_sent: loop time of the last byte handed over.
        blocked_since: loop time since which a write waits for the reader, if one does.
    """

    __slots__ = ("_send", "_time", "_write_body", "blocked_since", "is_ready", "last_sent")

    def __init__(self, send: Send, body: BodyWriter | None = None) -> None:
        """
        Args:
            body: a shorter way to the connection than ``send``, once the response has started.
        """
        self._send = send
        self.is_ready: Callable[[], bool] = bool if body is None else body.is_ready
        self._write_body = (lambda _: None) if body is None else body.write
        self._time = asyncio.get_running_loop().time
        self.last_sent = self._time()
        self.blocked_since: float | None = None

    def write_now(self, data: bytes) -> None:
        """Send whole frames, at least one, without waiting; only while `is_ready` says so."""
        self._write_body(data)
        self.last_sent = self._time()

    async def write(self, data: bytes) -> None:
        """Send whole frames."""
        self.blocked_since = self._time()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self.blocked_since = None
        self.last_sent = self._time()


class EventStreamResponse(Response):
    """Runs ``produce(writer)`` until it returns, the client leaves, or the client stops reading."""

    def __init__(
        self,
        produce: Callable[[EventWriter], Awaitable[None]],
        *,
        release: Callable[[], None],
        heartbeat_interval: float,
        send_timeout: float,
    ) -> None:
        """
        Args:
            produce: writes every frame, its own errors included.
            release: called exactly once at the end, whatever the end was; gives back what the stream held.
            heartbeat_interval: seconds without a frame after which a comment is sent.
            send_timeout: seconds without progress after which the connection is dropped.
        """
        super().__init__()
        self._produce = produce
        self._release = release
        self._heartbeat_interval = heartbeat_interval
        self._send_timeout = send_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tasks: list[asyncio.Task[None]] = []
        try:
            await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
            transport: asyncio.WriteTransport | None = scope.get(TRANSPORT_KEY)
            writer = EventWriter(send, scope.get(BODY_KEY))
            work = asyncio.create_task(self._work(writer))
            gone = asyncio.create_task(wait_for_disconnect(receive))
            pulse = asyncio.create_task(self._pulse(writer, transport))
            tasks = [work, gone, pulse]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            elif pulse.done() and transport is not None:
                transport.abort()
        finally:
            self._release()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self, writer: EventWriter) -> None:
        await self._produce(writer)

    async def _pulse(self, writer: EventWriter, transport: asyncio.WriteTransport | None) -> None:
        """Return when the reader has stalled; until then keep an idle stream alive."""
        time = asyncio.get_running_loop().time
        progress_at, seen_size = 0.0, 0
        while True:
            if writer.blocked_since is None:
                idle = time() - writer.last_sent
                if idle < self._heartbeat_interval:
                    await asyncio.sleep(self._heartbeat_interval - idle)
                    continue
                try:
                    async with asyncio.timeout(self._send_timeout):
                        await writer.write(HEARTBEAT)
                except TimeoutError:
                    return
                continue
            size = unread_bytes(transport) if transport is not None else 0
            if progress_at < writer.blocked_since or size < seen_size:
                progress_at = time()
            elif time() - progress_at >= self._send_timeout:
                return
            seen_size = size
            await asyncio.sleep(min(1.0, self._send_timeout / 4))


def unread_bytes(transport: asyncio.WriteTransport) -> int:
    """Bytes handed to a connection that its peer has not acknowledged: in our buffer and in the kernel's.

    The kernel's matter: it takes new bytes only once a third of its buffer is free, so with a slow reader our own
    buffer may stand still for a long time although the reader reads.
    """
    size = transport.get_write_buffer_size()
    raw = transport.get_extra_info("socket")
    try:
        (queued,) = struct.unpack("i", fcntl.ioctl(raw.fileno(), termios.TIOCOUTQ, bytes(4)))
    except (OSError, ValueError):  # closed, or a system without the request
        return size
    return size + int(queued)
