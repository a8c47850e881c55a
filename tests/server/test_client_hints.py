"""What clients say in headers beside the request, and what they are told about fields that had no effect."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes import FakeEngineClient, say
from tests.server.live import HI, LiveServer, live_server

CHAT = "/v1/chat/completions"


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_does_not_wait_longer_than_its_client(tiny_folder: Path, stream: bool) -> None:
    """The client's read timeout ends a request that is still queued, in words that make it try again later."""
    engine = FakeEngineClient(say("Hi", start_delay=3600))
    async with live_server(tiny_folder, engine) as live:
        body = {"messages": HI, "stream": stream}
        reply = await live.post(CHAT, body, x_stainless_read_timeout="0.2")
        if not stream:
            assert reply.status == 429
            assert reply.headers["retry-after-ms"] == "1000"
        error = reply.chunks[-1]["error"] if stream else reply.error
        assert error["code"] == "queue_timeout"
        assert engine.submissions[0].aborted
        assert live.context.metrics.rejections["queue_timeout"] == 1


@pytest.mark.asyncio
async def test_patience_is_for_the_queue_only(tiny_folder: Path) -> None:
    """What has started runs to its end, also where its tokens wait until another prompt's are collected."""
    engine = FakeEngineClient(say("a slow answer", delay=0.25))
    async with live_server(tiny_folder, engine) as live:
        body = {"prompt": ["one", "two", "three"], "max_tokens": 10}
        reply = await live.post("/v1/completions", body, x_stainless_read_timeout="2.0")
        assert [choice["text"] for choice in reply.json["choices"]] == ["a slow ans"] * 3


@pytest.mark.asyncio
async def test_patience_that_makes_no_sense_is_none(tiny_folder: Path) -> None:
    """Odd values of the header are no reason to refuse or to hurry."""
    engine = FakeEngineClient(say("Hi", start_delay=0.05))
    async with live_server(tiny_folder, engine) as live:
        for value in ("0", "-1", "nan", "inf", "1e9", "soon", "", "9" * 400):
            reply = await live.post(CHAT, {"messages": HI}, x_stainless_read_timeout=value)
            assert reply.status == 200, value


@pytest.mark.asyncio
async def test_retries_are_counted(live: LiveServer) -> None:
    """The metric tells how much of the traffic is second attempts."""
    for value in ("0", "1", "2", "x", None):
        hints = {} if value is None else {"x_stainless_retry_count": value}
        await live.post(CHAT, {"messages": HI}, **hints)
    metrics = (await live.get("/metrics")).body.decode()
    (line,) = [line for line in metrics.splitlines() if line.startswith("chatserve:client_retries_total")]
    assert float(line.split()[-1]) == 2


@pytest.mark.asyncio
async def test_ignored_fields_are_told_in_a_header(live: LiveServer) -> None:
    """Unknown fields change nothing, but the client hears of it; its own text cannot break the header."""
    reply = await live.chat(frobnicate=1, stream=True)
    assert reply.headers["warning"] == '299 chatserve "not known here and ignored: frobnicate"'
    reply = await live.chat(**{'a"\r\nset-cookie: x': 1, "zz": 2})
    assert reply.headers["warning"] == '299 chatserve "not known here and ignored: zz, 1 more"'
    assert "set-cookie" not in reply.headers
    reply = await live.chat(**{f"field{i:02}": 1 for i in range(50)})
    assert reply.headers["warning"].endswith('field07, 42 more"')
    assert "warning" not in (await live.chat()).headers
    assert "warning" in (await live.post("/tokenize", {"prompt": "x", "frobnicate": 1})).headers
