"""Messages over a Unix stream socket: a 4-byte length, then msgpack.

Knows framing and buffers; does not know what the messages mean. `SocketChannel` is the engine's synchronous end,
`AsyncChannel` the API process's end on an event loop. Bytes are only ever decoded into typed structs, never into
code: a frame that does not decode is counted and dropped by the engine, and ends the connection on the API side,
where a lost frame could hide the end of a stream.
"""

from __future__ import annotations

import asyncio
import logging
import select
import socket
import struct
from collections.abc import Callable
from typing import Generic, TypeVar, cast

import msgspec

logger = logging.getLogger(__name__)

Message = TypeVar("Message")

MAX_FRAME_BYTES = 64 * 1024 * 1024
"""Longest payload; many times the longest prompt that a request body can carry."""

MAX_BACKLOG_BYTES = 4 * 1024 * 1024
"""Unsent output beyond which the engine makes no further tokens until the API process reads again."""

_LENGTH = struct.Struct("<I")
_READ_BYTES = 256 * 1024


class ChannelClosedError(ConnectionError):
    """The other process has closed its end or is dead."""


class FrameTooLargeError(ValueError):
    """A length prefix over the limit: the stream cannot be trusted any further."""


def encode_frame(message: msgspec.Struct) -> bytes:
    """One message as the bytes that go on the wire.

    Raises:
        FrameTooLargeError: the payload is longer than `MAX_FRAME_BYTES`.
    """
    payload = msgspec.msgpack.encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        raise FrameTooLargeError(f"a message of {len(payload)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Cuts a byte stream into payloads, however the bytes arrive. Holds at most one incomplete frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Payloads that ``data`` completes, in order.

        Raises:
            FrameTooLargeError: the next frame announces more than `MAX_FRAME_BYTES`.
        """
        self._buffer += data
        payloads: list[bytes] = []
        position = 0
        with memoryview(self._buffer) as view:
            while len(view) - position >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(view, position)
                if length > MAX_FRAME_BYTES:
                    raise FrameTooLargeError(f"a frame announces {length} bytes; the limit is {MAX_FRAME_BYTES}")
                end = position + _LENGTH.size + length
                if end > len(view):
                    break
                payloads.append(bytes(view[position + _LENGTH.size : end]))
                position = end
        del self._buffer[:position]
        return payloads


class SocketChannel(Generic[Message]):
    """The engine's end: never blocks while there is work, blocks in poll(2) while there is none.

    Output that the peer does not read is kept in memory up to `MAX_BACKLOG_BYTES`; from there on the channel is
    `congested`, and `receive` waits for the peer to read (input is still taken, so aborts arrive).

    Attributes:
        malformed: frames dropped because they did not decode.
    """

    def __init__(self, sock: socket.socket, decoder: msgspec.msgpack.Decoder[Message]) -> None:
        sock.setblocking(False)
        self.malformed = 0
        self._socket = sock
        self._decoder = decoder
        self._reader = FrameReader()
        self._unsent = bytearray()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    @property
    def congested(self) -> bool:
        """Whether the peer has fallen so far behind that making more output would be waste."""
        return len(self._unsent) > MAX_BACKLOG_BYTES

    def receive(self, *, wait: bool) -> list[Message]:
        """Every message that has arrived, in order.

        Args:
            wait: block until there is at least one.

        Raises:
            ChannelClosedError: end of file; the API process is gone.
            FrameTooLargeError: the stream is out of step.
        """
        self._flush()
        messages = self._read()
        while not messages and (wait or self.congested):
            self._poll.modify(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            self._poll.poll()
            self._flush()
            messages = self._read()
        return messages

    def send(self, message: msgspec.Struct) -> None:
        """Queue one message and write as much as the socket takes. Never blocks."""
        self._unsent += encode_frame(message)
        self._flush()

    def flush_for(self, seconds: float) -> None:
        """Write out what is queued, for at most so long: last words of a process that is about to exit."""
        if self._unsent:
            self._socket.settimeout(seconds)
            self._socket.sendall(self._unsent)

    def _read(self) -> list[Message]:
        messages: list[Message] = []
        while True:
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                return messages
            except OSError as error:
                raise ChannelClosedError(str(error)) from error
            if not data:
                raise ChannelClosedError("end of file")
            for payload in self._reader.feed(data):
                try:
                    messages.append(self._decoder.decode(payload))
                except msgspec.DecodeError:
                    self.malformed += 1
            if len(data) < _READ_BYTES:
                return messages

    def _flush(self) -> None:
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent)
            except BlockingIOError:
                return
            except OSError as error:
                raise ChannelClosedError(str(error)) from error
            del self._unsent[:sent]


class AsyncChannel(asyncio.Protocol, Generic[Message]):
    """The API process's end, as a protocol of a running event loop.

    Callbacks run on the loop and must not block. ``on_lost`` is called exactly once: end of file, a broken
    socket, a frame that does not decode, or `close`.
    """

    def __init__(
        self,
        decoder: msgspec.msgpack.Decoder[Message],
        on_message: Callable[[Message], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._decoder = decoder
        self._on_message = on_message
        self._on_lost = on_lost
        self._reader = FrameReader()
        self._transport: asyncio.WriteTransport | None = None

    async def attach(self, sock: socket.socket) -> None:
        """Take over a connected socket."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=sock)

    @property
    def backlog(self) -> int:
        """Bytes that the engine has not taken yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def send(self, message: msgspec.Struct) -> None:
        """Queue one message; silently nothing once the connection is lost (``on_lost`` has said so)."""
        if self._transport is not None:
            self._transport.write(encode_frame(message))

    def close(self) -> None:
        """Drop the connection now, without flushing. Idempotent."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast and no check: uvloop's transports are not subclasses of asyncio's.
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._reader.feed(data):
                self._on_message(self._decoder.decode(payload))
        except Exception:
            logger.exception("a message that makes no sense ends the connection")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_lost()
