"""Ctrl-C as something that is asked for: an exception where the program waits for it, and nothing elsewhere.

Python raises `KeyboardInterrupt` wherever the program happens to be, so a second Ctrl-C would hit what the first one
set off: closing a connection, writing a line. Here one press ends at most what was declared interruptible. Knows
signals; does not know what is interrupted. `chatserve.cli.chat` uses it.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupts:
    """Owns SIGINT while `installed`."""

    def __init__(self) -> None:
        self._allowed = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Take the signal over, and give it back at the end. Main thread only."""
        before = signal.signal(signal.SIGINT, self._handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Inside, the first Ctrl-C raises `KeyboardInterrupt`; what handles it is not disturbed by another."""
        self._allowed = True
        try:
            yield
        finally:
            self._allowed = False

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._allowed:
            self._allowed = False
            raise KeyboardInterrupt
