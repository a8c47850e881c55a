"""Nothing overtakes what a stream has not written yet."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from chatserve.server.completion import _merge
from chatserve.server.generation import Generation
from chatserve.server.output_processor import Event, TextDelta


class Slow:
    """Stands in for a `Generation`: counts calls of `next`, during which events may go past the consumer."""

    def __init__(self, texts: str) -> None:
        self._texts = list(texts)
        self.num_calls = 0

    async def next(self) -> list[Event]:
        self.num_calls += 1
        await asyncio.sleep(0.001)
        return [TextDelta(0, self._texts.pop(0), [1], [])] if self._texts else []


@pytest.mark.asyncio
async def test_no_generation_is_awaited_while_its_events_wait_to_be_written() -> None:
    """Somebody waiting in `next` lets later events go straight to the connection, before those that are in hand."""
    slow = [Slow("abc"), Slow("xyz")]
    seen: dict[int, str] = {0: "", 1: ""}
    async for position, events in _merge(cast(list[Generation], slow)):
        before = slow[position].num_calls
        await asyncio.sleep(0.005)  # a reader that is behind
        assert slow[position].num_calls == before
        seen[position] += "".join(event.text for event in events if isinstance(event, TextDelta))
    assert seen == {0: "abc", 1: "xyz"}
