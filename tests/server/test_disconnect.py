"""A client that leaves, at any moment and in any mode, ends its request in the engine at once and nothing else."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import socket
import struct
from pathlib import Path

import msgspec
import pytest

from chatserve.config import ServerConfig
from tests.fakes import FakeEngineClient, Script, say
from tests.server.live import HI, LiveServer, live_server
from tests.waiting import PATIENCE, eventually


def request_bytes(path: str = "/v1/chat/completions", **fields: object) -> bytes:
    """A complete request."""
    content = {"messages": HI, **fields} if "chat" in path else {"prompt": ["a", "b"], **fields}
    body = json.dumps(content).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


def hang_up(writer: asyncio.StreamWriter, how: str) -> None:
    """Close with FIN or with RST."""
    if how == "rst":
        raw = writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort() if how == "rst" else writer.close()


async def until_aborted(live: LiveServer) -> None:
    """Wait until the first request has been aborted."""
    await asyncio.wait_for(live.engine.submissions[0].aborted_event.wait(), PATIENCE)


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["fin", "rst"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["queued", "prefilling", "streaming"])
async def test_hanging_up_aborts(live: LiveServer, how: str, stream: bool, phase: str) -> None:
    """Queued, prefilling or streaming, streamed or whole, FIN or RST: aborted long before its next token or its end,
    which are further away than this test waits.
    """
    tokens, delay = [120] * 900, {"queued": {"start_delay": 3600.0}, "prefilling": {"delay": 3600.0}}.get(phase, {})
    engine = live.engine
    engine.script = Script(tokens[:5] if phase == "streaming" else tokens, hang=True, **delay)
    _, writer = await live.connect()
    writer.write(request_bytes(stream=stream))
    await eventually(lambda: len(engine.submissions) == 1)
    await eventually(
        lambda: (
            (engine.num_running, engine.submissions[0].num_sent)
            == {"queued": (0, 0), "prefilling": (1, 0), "streaming": (1, 5)}[phase]
        )
    )
    hang_up(writer, how)
    await until_aborted(live)
    assert live.context.service.num_running == 0


@pytest.mark.asyncio
async def test_random_moments_leave_nothing_running(live: LiveServer) -> None:
    """Over both endpoints and modes, at random moments: every request is aborted or was finished, and the server
    goes on.
    """
    rng = random.Random(7)
    live.engine.script = lambda submission, _: Script([120] * 30, delay=0.001, hang=submission.request_id % 5 == 0)

    async def one() -> None:
        _, writer = await live.connect()
        path = rng.choice(["/v1/chat/completions", "/v1/completions"])
        data = request_bytes(path, stream=rng.random() < 0.5, n=rng.choice([1, 2]), max_tokens=30)
        if rng.random() < 0.2:
            data = data[: rng.randrange(len(data))]
        writer.write(data)
        await asyncio.sleep(rng.random() * 0.06)
        hang_up(writer, rng.choice(["fin", "rst"]))

    for _ in range(10):
        await asyncio.gather(*(one() for _ in range(20)))
    await eventually(lambda: live.context.service.num_running == 0)
    assert all(s.aborted or s.ended for s in live.engine.submissions)
    assert any(s.aborted for s in live.engine.submissions)
    live.engine.script = say("still here")
    assert (await live.chat()).json["choices"][0]["message"]["content"] == "still here"


@pytest.mark.asyncio
async def test_reader_that_does_not_read_is_dropped(tiny_folder: Path) -> None:
    """A stalled reader holds bounded memory and is cut after ``send_timeout``; its request is aborted."""
    engine = FakeEngineClient(Script([120] * 1000 * 1000, delay=0.0))
    config = ServerConfig(port=0, send_timeout=0.4, heartbeat_interval=0.1)
    async with live_server(tiny_folder, engine, server=config) as live:
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(raw, ("127.0.0.1", live.port))
        await loop.sock_sendall(raw, request_bytes(stream=True, logprobs=True, top_logprobs=20, n=4))
        await eventually(lambda: len(engine.submissions) == 1)
        assert (await live.get("/livez")).status == 200
        await until_aborted(live)
        raw.close()


@pytest.mark.asyncio
async def test_slow_reader_that_reads_is_kept(tiny_folder: Path) -> None:
    """Reading slowly is progress: the stream waits for its reader, loses nothing, and keeps nobody else waiting.

    Others are answered while nothing is read. Reading takes three times as long as none may take.
    """
    engine = FakeEngineClient(Script([120] * 250))
    config = ServerConfig(port=0, send_timeout=3.0, heartbeat_interval=0.1)
    async with live_server(tiny_folder, engine, server=config) as live:
        engine.info = msgspec.structs.replace(engine.info, max_model_len=10_000, max_tokens_in_pool=10_000)
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
        raw.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(raw, ("127.0.0.1", live.port))
        await loop.sock_sendall(raw, request_bytes(stream=True, logprobs=True, top_logprobs=20, n=4))
        received = bytearray()
        for number in itertools.count():
            piece = await asyncio.wait_for(loop.sock_recv(raw, 8192), PATIENCE)
            received += piece
            if number % 7 == 0:
                assert (await live.get("/livez")).status == 200
            await asyncio.sleep(0.06)
            if not piece or b"data: [DONE]" in received[-200:]:
                break
        assert len(received) > 1_000_000
        assert received.count(b'"finish_reason":"stop"') == 4
        assert not engine.submissions[0].aborted
        raw.close()


@pytest.mark.asyncio
async def test_pipelined_second_request_does_not_hide_a_disconnect(live: LiveServer) -> None:
    """A client that pipelines and leaves is noticed like any other, and gets at most one answer at a time."""
    live.engine.script = Script([120], hang=True)
    _, writer = await live.connect()
    writer.write(request_bytes(stream=True) + b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await eventually(lambda: len(live.engine.submissions) == 1 and live.engine.submissions[0].num_sent == 1)
    hang_up(writer, "fin")
    await until_aborted(live)
