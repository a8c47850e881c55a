"""When one answer's tokens came: the numbers a client is shown at its end.

Knows a monotonic clock and nothing else; `ws_hub` keeps one per answer.
"""

from __future__ import annotations

import time

from chatserve.server.ws_protocol import Timings


class Stopwatch:
    """Runs from the moment a request is accepted."""

    def __init__(self) -> None:
        self._accepted = time.monotonic()
        self._started: float | None = None
        self._first: float | None = None
        self._last = 0.0
        self._num_tokens = 0
        self._gaps: list[float] = []  # seconds per token, one entry per arrival

    @property
    def queue_ms(self) -> int | None:
        """Milliseconds from acceptance to the engine's start."""
        return None if self._started is None else _ms(self._started - self._accepted)

    def started(self) -> None:
        """The engine has begun."""
        self._started = time.monotonic()

    def tokens(self, count: int) -> None:
        """``count`` tokens arrived together."""
        now = time.monotonic()
        if self._first is None:
            self._first = now
        elif count:
            self._gaps.append((now - self._last) / count)
        self._num_tokens += count
        self._last = now

    def timings(self) -> Timings:
        """What is known by now."""
        timings = Timings(total=_ms(time.monotonic() - self._accepted), queue=self.queue_ms)
        if self._first is not None:
            timings.ttft = _ms(self._first - self._accepted)
            if self._started is not None:
                timings.prefill = _ms(self._first - self._started)
            if self._gaps:
                gaps = sorted(self._gaps)
                timings.itl_p50 = round(1000 * gaps[len(gaps) // 2], 3)
                timings.itl_p95 = round(1000 * gaps[min(len(gaps) - 1, len(gaps) * 95 // 100)], 3)
            if self._last > self._first:
                timings.tok_s = round((self._num_tokens - 1) / (self._last - self._first), 1)
        return timings


def _ms(seconds: float) -> int:
    return round(1000 * seconds)
