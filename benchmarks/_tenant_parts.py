"""What the parts of the tenants benchmark share: their type, their percentiles, and runs that take turns."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

Result = dict[str, Any]


def p99(values: list[float]) -> float:
    """99th percentile, the greatest value of fewer than a hundred."""
    return float(np.percentile(values, 99, method="higher"))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def take_turns(*runs: Iterator[None], turn_seconds: float = 0.5) -> list[float]:
    """Advance the runs in turns until all have ended; seconds that each took after its first advance, the set-up.

    A machine's speed drifts by a factor of two within a minute. Runs that are to be compared therefore share every
    half second, and the order within a round alternates.
    """
    seconds = [0.0] * len(runs)
    left = list(range(len(runs)))
    for run in runs:
        next(run)
    while left:
        for i in list(left):
            began = time.perf_counter()
            while True:
                if next(runs[i], "ended") == "ended":
                    left.remove(i)
                    break
                if time.perf_counter() - began >= turn_seconds:
                    break
            seconds[i] += time.perf_counter() - began
        left.reverse()
    return seconds
