"""How long tests wait for what has to happen by itself.

Success returns at once, so patience costs nothing but where something hangs; what must not take long is compared with
what would take far longer, or counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from chatserve.engine.supervisor import Limits

PATIENCE = 30.0
"""Seconds: more than a busy machine needs, less than a test may take."""

UNHURRIED = Limits(suspect_after=3600.0, dead_after=3600.0, step_deadline=3600.0)
"""No engine is suspected, and none replaced, because the machine was busy."""


async def eventually(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Wait for something that has to happen by itself."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - the condition belongs to what is tested
            await asyncio.sleep(0.005)
