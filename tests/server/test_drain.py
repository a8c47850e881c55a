"""SIGTERM to a real process: running streams end well or say why, new work is refused, the exit code is 0."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.server.live import HI, Reply, parse_reply
from tests.waiting import PATIENCE

CANARY = "canary-7f3a"


@dataclass
class Process:
    """A running server process."""

    child: asyncio.subprocess.Process
    port: int

    async def send(self, method: str, path: str, content: object = None) -> Reply:
        """One request on its own connection, read to the end."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        body = json.dumps(content).encode() if content is not None else b""
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        writer.write(head.encode() + b"\r\n" + body)
        try:
            return parse_reply(await asyncio.wait_for(reader.read(), PATIENCE))
        finally:
            writer.close()

    async def chat(self, **fields: object) -> Reply:
        messages = [*HI, {"role": "assistant", "content": CANARY}, *HI]
        return await self.send("POST", "/v1/chat/completions", {"messages": messages, **fields})

    async def line(self) -> str:
        """The next line that it prints."""
        assert self.child.stdout is not None
        return (await asyncio.wait_for(self.child.stdout.readline(), PATIENCE)).decode().strip()

    async def hold(self, count: int) -> None:
        """Wait until so many answers are in their middle, where they stay."""
        for _ in range(count):
            assert await self.line() == "holding"

    async def drain(self) -> None:
        """Send SIGTERM and wait until it is known to be obeyed."""
        self.child.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE):
            while (await self.send("GET", "/readyz")).json != {"status": "draining"}:
                pass

    async def end(self) -> str:
        """Wait for the exit, which must be clean; its log."""
        _, log = await asyncio.wait_for(self.child.communicate(), PATIENCE)
        assert self.child.returncode == 0, log.decode()
        assert b"Traceback" not in log, log.decode()
        assert CANARY not in log.decode()
        return log.decode()


@asynccontextmanager
async def process(folder: Path, *, drain_timeout: float) -> AsyncIterator[Process]:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.server.draining_server", str(folder), str(drain_timeout),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        server = Process(child, 0)
        server.port = int((await server.line()).rsplit(":", 1)[1])
        yield server
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


@pytest.mark.asyncio
async def test_running_streams_finish_and_new_work_is_refused(tiny_folder: Path) -> None:
    """Tokens keep flowing after SIGTERM; new requests get 503 with Retry-After; then the process exits with 0."""
    async with process(tiny_folder, drain_timeout=3600) as server:
        running = [asyncio.create_task(server.chat(stream=bool(i % 2))) for i in range(20)]
        await server.hold(20)
        await server.drain()
        refused = await server.chat()
        assert (refused.status, refused.error["code"]) == (503, "draining")
        assert refused.headers["retry-after"]
        assert (await server.send("GET", "/livez")).status == 200
        server.child.send_signal(signal.SIGUSR1)
        for index, reply in enumerate(await asyncio.gather(*running)):
            if index % 2:
                assert reply.events[-1] == "[DONE]"
                text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in reply.chunks)
            else:
                text = reply.json["choices"][0]["message"]["content"]
            assert text == "x" * 40
        await server.end()


@pytest.mark.asyncio
@pytest.mark.parametrize("signals", [1, 2])
async def test_past_the_limit_every_stream_gets_an_explicit_error(tiny_folder: Path, signals: int) -> None:
    """At the drain's end, or at once on a second signal: an error event and a close for streams, 503 for the rest;
    none is cut in silence.
    """
    async with process(tiny_folder, drain_timeout=0.5 if signals == 1 else 3600) as server:
        running = [asyncio.create_task(server.chat(stream=bool(i % 2))) for i in range(10)]
        await server.hold(10)
        if signals == 2:
            await server.drain()  # two at once may arrive as one
        server.child.send_signal(signal.SIGTERM)
        for index, reply in enumerate(await asyncio.gather(*running)):
            if index % 2:
                assert json.loads(reply.events[-1])["error"]["code"] == "draining"
                assert "[DONE]" not in reply.events
            else:
                assert (reply.status, reply.error["code"]) == (503, "draining")
        log = await server.end()
        assert "drain_timeout" in log


@pytest.mark.asyncio
async def test_idle_server_exits_at_once(tiny_folder: Path) -> None:
    """With nothing running, SIGTERM and SIGINT alike end the process without any wait, idle keep-alive connections or
    not: everything it could wait for takes longer than this test waits.
    """
    for sig in (signal.SIGTERM, signal.SIGINT):
        async with process(tiny_folder, drain_timeout=3600) as server:
            server.child.send_signal(signal.SIGUSR1)
            assert (await server.chat()).status == 200
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await reader.readuntil(b"}")
            server.child.send_signal(sig)
            await server.end()
            assert await reader.read() == b""
            writer.close()
