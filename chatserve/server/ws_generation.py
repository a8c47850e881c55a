"""One answer on its way, and who is watching it.

A `LiveGeneration` is the log of one answer: its text so far, its start, its end. A `Watch` is one socket's place in
that log: what it has been shown, as an offset. Nothing is queued per socket, so a slow socket costs no memory beyond
the log itself, merging deltas is free, and any number of sockets may look. Knows the wire messages; knows neither
sockets nor the engine. `ws_hub` writes the log, `ws_writer` reads it through watches.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable

from chatserve.server import ws_protocol as wire

FLUSH_INTERVAL = 0.016
"""Seconds between two deltas of one answer on one socket; the first and the last are never held."""

_CLOCK_TICK = 0.0005
"""Less than this is not waited for: uvloop's clock counts milliseconds, and rounding may leave a bit of one."""


class LiveGeneration:
    """The log of one answer; written once, read by any number of watches.

    Attributes:
        gen, conv, msg: ids on the wire; ``msg`` is the assistant message it becomes.
        tenant: its owner.
        end: length of the text in Unicode code points.
        num_bytes: length of the text in UTF-8.
        num_tokens: tokens behind the text.
        seq: number of the last append, from 0.
        last_append: its text.
        token_ids: ids behind the text, as they came.
        terminal: `Done` or `Failed`, set once; nothing is appended after it.
    """

    def __init__(self, gen: str, conv: str, msg: str, tenant: str) -> None:
        self.gen = gen
        self.conv = conv
        self.msg = msg
        self.tenant = tenant
        self.end = 0
        self.num_bytes = 0
        self.num_tokens = 0
        self.seq = -1
        self.last_append = ""
        self.token_ids: list[int] = []
        self.queued: wire.Queued | None = None
        self.started: wire.Started | None = None
        self.terminal: wire.Done | wire.Failed | None = None
        self._text = io.StringIO(newline="")  # seeks by code point
        self._final: str | None = None
        self._watches: list[Watch] = []

    @property
    def num_watches(self) -> int:
        """Sockets that are looking."""
        return len(self._watches)

    def text(self, start: int = 0) -> str:
        """The text from code point ``start``."""
        if self._final is not None:
            return self._final[start:]
        self._text.seek(start)
        return self._text.read()

    def text_sha256(self) -> str:
        """Hex digest of the whole text in UTF-8."""
        return hashlib.sha256(self.text().encode()).hexdigest()

    def append(self, text: str, token_ids: list[int]) -> None:
        """Add text (or tokens that have no text of their own) and wake the watches."""
        if self.terminal is not None:
            raise RuntimeError(f"{self.gen} has ended")
        self._text.seek(self.end)
        self._text.write(text)
        self.end += len(text)
        self.num_bytes += len(text.encode())
        self.num_tokens += len(token_ids)
        self.token_ids += token_ids
        self.seq += 1
        self.last_append = text
        self._wake()

    def set_queued(self, queued: wire.Queued) -> None:
        """Note the place in the queue; only the latest is ever sent."""
        self.queued = queued
        self._wake()

    def set_started(self, started: wire.Started) -> None:
        """Note that the engine has begun."""
        self.started = started
        self._wake()

    def finish(self, terminal: wire.Done | wire.Failed) -> None:
        """End the log. Once."""
        if self.terminal is not None:
            raise RuntimeError(f"{self.gen} has ended already")
        self.terminal = terminal
        # Ended logs are kept for a while, for late readers: as small as they can be.
        self._final = self.text()
        self._text.close()
        self.token_ids = []
        self._wake()

    def watch(self, wake: Callable[[Watch], None]) -> Watch:
        """A new reader, from the beginning of the log; ``wake`` is called with it on news."""
        watch = Watch(self, wake)
        self._watches.append(watch)
        return watch

    def _unwatch(self, watch: Watch) -> None:
        if watch in self._watches:
            self._watches.remove(watch)

    def _wake(self) -> None:
        for watch in self._watches:
            watch.wake(watch)


class Watch:
    """One socket's place in one log."""

    def __init__(self, generation: LiveGeneration, wake: Callable[[Watch], None]) -> None:
        self.generation = generation
        self.wake = wake
        self.done = False
        self._offset = 0
        self._shown_bytes = 0
        self._shown_tokens = 0
        self._shown_started = False
        self._shown_queued: wire.Queued | None = None
        self._not_before = 0.0

    @property
    def pending_bytes(self) -> int:
        """UTF-8 bytes of text that this socket has not been given yet."""
        return self.generation.num_bytes - self._shown_bytes

    def due(self, now: float) -> float | None:
        """Seconds until there is something to send (0: now); ``None`` while there is no news."""
        log = self.generation
        if log.terminal is not None or (log.started is not None and not self._shown_started):
            return 0.0
        if log.started is None and log.queued is not self._shown_queued:
            return 0.0
        if log.end == self._offset:
            return None
        delay = self._not_before - now
        return delay if delay > _CLOCK_TICK else 0.0

    def take(self, now: float) -> list[wire.ServerMessage]:
        """Everything new, merged, in order. After the terminal message ``done`` is true and the watch is over."""
        log = self.generation
        messages: list[wire.ServerMessage] = []
        if log.started is None and log.queued is not None and log.queued is not self._shown_queued:
            self._shown_queued = log.queued
            messages.append(log.queued)
        if log.started is not None and not self._shown_started:
            self._shown_started = True
            messages.append(log.started)
        if log.end > self._offset:
            messages.append(self._take_text(log.text(self._offset), now))
        if log.terminal is not None:
            messages.append(log.terminal)
            self.done = True
            self.stop()
        return messages

    @property
    def has_text_alone(self) -> bool:
        """Whether whatever is new is text."""
        return self._shown_started and self.generation.terminal is None

    def take_text(self, now: float) -> wire.Delta:
        """The new text, of which there must be some."""
        log = self.generation
        is_one_append = self._offset == log.end - len(log.last_append)
        return self._take_text(log.last_append if is_one_append else log.text(self._offset), now)

    def _take_text(self, text: str, now: float) -> wire.Delta:
        log = self.generation
        delta = wire.Delta(log.gen, log.seq, self._offset, log.end, text, log.num_tokens - self._shown_tokens)
        self._offset = log.end
        self._shown_bytes = log.num_bytes
        self._shown_tokens = log.num_tokens
        self._not_before = now + FLUSH_INTERVAL
        return delta

    def stop(self) -> None:
        """Stop watching. Idempotent."""
        self.generation._unwatch(self)
