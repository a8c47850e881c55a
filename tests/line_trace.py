"""What a call costs in Python lines: the same on every machine, unlike seconds."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType


def lines_run(function: Callable[[], object]) -> list[tuple[str, int]]:
    """File and number of every Python line that a call runs, in order, callees included.

    No garbage is collected meanwhile: finalizers, and callbacks such as Hypothesis registers, would run in between.
    """
    lines: list[tuple[str, int]] = []

    def trace(frame: FrameType, event: str, _: object) -> object:
        if event == "line":
            lines.append((frame.f_code.co_filename, frame.f_lineno))
        return trace

    before, collecting = sys.gettrace(), gc.isenabled()
    gc.disable()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
        if collecting:
            gc.enable()
    return lines
