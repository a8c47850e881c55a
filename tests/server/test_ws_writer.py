"""What one socket is sent of an answer, and by which way: text keeps its distance and wakes nobody."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator

import pytest
import uvloop

from chatserve.server import ws_protocol as wire
from chatserve.server.ws_generation import FLUSH_INTERVAL, LiveGeneration, Watch
from chatserve.server.ws_writer import Writer


class Frames:
    """Takes text at once while it is open."""

    def __init__(self) -> None:
        self.open = True
        self.sent: list[tuple[float, dict[str, object]]] = []

    def is_ready(self) -> bool:
        return self.open

    def write_text(self, payload: bytes) -> None:
        self.sent.append((asyncio.get_running_loop().time(), json.loads(payload)))


class Socket:
    """A writer at work, and what went which way."""

    def __init__(self) -> None:
        self.frames = Frames()
        self.slow: list[dict[str, object]] = []
        self.live = LiveGeneration("g", "c", "m", "t")
        self.writer = Writer(self._send, send_timeout=5.0, frames=self.frames)

    async def _send(self, text: str) -> None:
        self.slow.append(json.loads(text))

    async def say(self, words: list[str], pause: float) -> None:
        for word in words:
            self.live.append(word, [1])
            await asyncio.sleep(pause)


@contextlib.asynccontextmanager
async def socket() -> AsyncIterator[Socket]:
    """A socket that watches a started answer."""
    one = Socket()
    running = asyncio.create_task(one.writer.run())
    one.live.set_started(wire.Started("g", 3, 0, 0, 1))
    one.writer.watch(one.live)
    await one.writer.flushed()
    one.slow.clear()
    try:
        yield one
    finally:
        running.cancel()
        one.writer.close()


@pytest.mark.asyncio
async def test_text_keeps_its_distance_and_takes_the_short_way() -> None:
    """Faster than the interval it is merged, nothing is lost, and the task that writes everything else sleeps."""
    async with socket() as one:
        words = [f"word{i} " for i in range(60)]
        await one.say(words, 0.003)
        await one.writer.flushed()
        assert one.slow == []
        texts = [str(message["text"]) for _, message in one.frames.sent]
        assert "".join(texts) == "".join(words)
        assert 2 < len(texts) < 40
        times = [time for time, _ in one.frames.sent]
        assert all(b - a > FLUSH_INTERVAL * 0.9 for a, b in itertools.pairwise(times))


@pytest.mark.asyncio
async def test_the_end_waits_for_nothing() -> None:
    """Text that is held goes with the end, by the long way, once."""
    async with socket() as one:
        one.live.append("first ", [1])
        one.live.append("held", [1])
        one.live.finish(wire.Failed("g", one.live.end, wire.ErrorBody("server_error", "x", "gone")))
        await one.writer.flushed()
        await asyncio.sleep(2 * FLUSH_INTERVAL)
        assert [message["text"] for _, message in one.frames.sent] == ["first "]
        assert [message["type"] for message in one.slow] == ["gen.delta", "gen.failed"]


@pytest.mark.asyncio
async def test_a_reader_that_falls_behind_gets_its_text_by_the_long_way() -> None:
    """Where the connection takes nothing at once, held text is not lost."""
    async with socket() as one:
        one.live.append("first ", [1])
        one.live.append("held", [1])
        one.frames.open = False
        await asyncio.sleep(3 * FLUSH_INTERVAL)
        await one.writer.flushed()
        assert [message["text"] for message in one.slow] == ["held"]


@pytest.mark.asyncio
async def test_nothing_is_written_after_the_close() -> None:
    """A timer of a closed socket does nothing."""
    async with socket() as one:
        one.live.append("first ", [1])
        one.live.append("held", [1])
        one.writer.close()
        await asyncio.sleep(2 * FLUSH_INTERVAL)
        assert len(one.frames.sent) == 1


@pytest.mark.asyncio
async def test_flushed_waits_for_whatever_is_held() -> None:
    """Of two answers one is held by the task, the other from its own append; the later one counts."""
    async with socket() as one:
        other = LiveGeneration("h", "c", "m", "t")
        other.set_started(wire.Started("h", 3, 0, 0, 1))
        one.writer.watch(other)
        await one.writer.flushed()
        other.append("b1", [1])
        await asyncio.sleep(FLUSH_INTERVAL / 2)
        one.live.append("a1", [1])
        one.writer.send(wire.Pong(1, 2, "p"))
        one.live.append("a2", [1])  # the task is awake, and holds this
        await asyncio.sleep(FLUSH_INTERVAL / 16)
        other.append("b2", [1])
        await one.writer.flushed()
        assert one.writer.pending_bytes == 0
        sent = [message for _, message in one.frames.sent] + one.slow
        assert {"a1", "a2", "b1", "b2"} == {message["text"] for message in sent if message["type"] == "gen.delta"}


def test_held_text_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the loop that serves, whose clock is coarser than the interval's parts: no timer that fires too early."""
    calls = 0
    release = Writer._release

    def counted(writer: Writer, watch: Watch) -> None:
        nonlocal calls
        calls += 1
        release(writer, watch)

    monkeypatch.setattr(Writer, "_release", counted)

    async def run() -> int:
        async with socket() as one:
            await one.say(["word "] * 60, 0.003)
            await one.writer.flushed()
            return len(one.frames.sent)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        deltas = runner.run(run())
    assert 0 < calls <= deltas
