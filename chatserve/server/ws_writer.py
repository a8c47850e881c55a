"""The one task that writes to a WebSocket.

Control frames (acks, errors, pongs) go first and in order; then each watched answer's news, merged since the last
write. A reader that does not read costs bounded memory and delays nobody: when too much is pending, or a single write
makes no progress for too long, the writer gives up with `SlowConsumerError`. Knows watches and frames; knows no
commands. `ws_connection` owns one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

from chatserve.server import ws_protocol as wire
from chatserve.server.ws_generation import LiveGeneration, Watch

MAX_PENDING_BYTES = 2**20


class TextFrames(Protocol):
    """A connection that takes text frames at once."""

    def is_ready(self) -> bool:
        """Whether `write_text` may be called: the connection is open, and its reader keeps up."""
        ...

    def write_text(self, payload: bytes) -> None:
        """Send one frame, UTF-8. Never waits."""
        ...


class SlowConsumerError(Exception):
    """The peer does not read what it asked for."""


class Writer:
    """Everything that is going to be sent on one socket.

    Args:
        send_text: sends one text frame; may wait for the peer to read.
        send_timeout: seconds one frame may wait.
        max_pending_bytes: UTF-8 bytes that may be waiting, over all answers and control frames.
        frames: a shorter way for an answer's text, taken while there is no other news and the connection takes it.
    """

    def __init__(
        self,
        send_text: Callable[[str], Awaitable[None]],
        *,
        send_timeout: float,
        max_pending_bytes: int = MAX_PENDING_BYTES,
        frames: TextFrames | None = None,
    ) -> None:
        self._send_text = send_text
        self._frames = frames
        self._parked = False
        self._time = asyncio.get_running_loop().time
        self._send_timeout = send_timeout
        self._max_pending_bytes = max_pending_bytes
        self._control: deque[str] = deque()
        self._control_bytes = 0
        self._watches: list[Watch] = []
        self._held: dict[Watch, asyncio.TimerHandle] = {}  # those whose text waits for its time
        self._stalled: asyncio.Timeout | None = None
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def pending_bytes(self) -> int:
        """UTF-8 bytes waiting to be sent."""
        return self._control_bytes + sum(watch.pending_bytes for watch in self._watches)

    def send(self, message: wire.ServerMessage) -> None:
        """Queue a control message."""
        frame = wire.encode(message)
        self._control.append(frame)
        self._control_bytes += len(frame)
        self._news()

    def watch(self, generation: LiveGeneration) -> None:
        """Send a generation's news from now on; once per socket."""
        if all(watch.generation is not generation for watch in self._watches):
            self._watches.append(generation.watch(self._news_of))
            self._news()

    async def flushed(self) -> None:
        """Wait until nothing is waiting to be sent."""
        await self._idle.wait()

    async def run(self) -> None:
        """Write until cancelled.

        Raises:
            SlowConsumerError: see the class.
        """
        loop = asyncio.get_running_loop()
        while True:
            self._parked = True
            await self._wake.wait()
            self._parked = False
            self._wake.clear()
            await self._write_control()
            for watch in tuple(self._watches):
                delay = watch.due(loop.time())
                if delay == 0.0:
                    for message in watch.take(loop.time()):
                        await self._write(wire.encode(message))
                    await self._write_control()
                elif delay is not None:
                    self._hold(watch, delay)
            self._watches = [watch for watch in self._watches if not watch.done]
            if not self._wake.is_set() and not self._held:
                self._idle.set()

    def close(self) -> None:
        """Stop watching everything. Idempotent."""
        for watch in self._watches:
            watch.stop()
        for timer in self._held.values():
            timer.cancel()
        self._watches, self._held = [], {}

    def _news_of(self, watch: Watch) -> None:
        """Send text from here, now or when it is due; leave all else to `run`, which costs several times more."""
        frames = self._frames
        is_free = self._parked and not self._wake.is_set()
        if frames is None or not is_free or not watch.has_text_alone or not frames.is_ready():
            self._news()
            return
        now = self._time()
        delay = watch.due(now)
        if delay == 0.0:
            frames.write_text(wire.encode_bytes(watch.take_text(now)))
        elif delay is not None:
            self._hold(watch, delay)

    def _hold(self, watch: Watch, delay: float) -> None:
        """Keep text back for ``delay`` seconds."""
        self._idle.clear()
        if watch not in self._held:
            self._held[watch] = asyncio.get_running_loop().call_later(delay, self._release, watch)

    def _release(self, watch: Watch) -> None:
        """Text that was held is due, if `run` has not sent it meanwhile."""
        del self._held[watch]
        if not watch.done:
            self._news_of(watch)
        if self._parked and not self._wake.is_set() and not self._held:
            self._idle.set()

    def _news(self) -> None:
        self._idle.clear()
        self._wake.set()
        # A write that is under way while news arrives is waiting for the peer: only then does pending mean slow.
        stalled = self._stalled
        if stalled is not None and not stalled.expired() and self.pending_bytes > self._max_pending_bytes:
            stalled.reschedule(asyncio.get_running_loop().time())

    async def _write_control(self) -> None:
        while self._control:
            frame = self._control.popleft()
            await self._write(frame)
            self._control_bytes -= len(frame)

    async def _write(self, frame: str) -> None:
        try:
            async with asyncio.timeout(self._send_timeout) as self._stalled:
                await self._send_text(frame)
        except TimeoutError:
            raise SlowConsumerError(
                f"{self.pending_bytes} bytes were waiting and nothing was read; read faster or reconnect"
            ) from None
        finally:
            self._stalled = None
