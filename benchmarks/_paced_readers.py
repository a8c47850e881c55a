"""The readers of `benchmarks.streaming`, in a process of their own, so that only the server's CPU time is counted.

Opens all streams, waits until each has delivered, then reads the server's CPU clock and counts tokens for a while.
Run: ``python -m benchmarks._paced_readers PORT PID sse|ws STREAMS SECONDS ROUNDS``; prints JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec
import uvloop
from websockets.asyncio.client import connect

WARM_UP_TOKENS = 24
MAX_TOKENS = 8000
SAMPLING: dict[str, Any] = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "temperature": 0}


class SseReader(asyncio.Protocol):
    """One stream over HTTP: sends its request, then counts events.

    Attributes:
        tokens: events that ended so far; the server sends one per token, which `most_tokens_per_event` checks.
        kept: everything received, where it is to be looked at afterwards.
    """

    def __init__(self, number: int, *, keep: bool) -> None:
        self.tokens = 0
        self.kept = bytearray() if keep else None
        self._number = number
        self._open_line = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        messages = [{"role": "user", "content": f"Stream {self._number}."}]
        body = json.dumps({"messages": messages, "stream": True, **SAMPLING}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
        cast(asyncio.WriteTransport, transport).write(head.encode() + b"content-type: application/json\r\n\r\n" + body)

    def data_received(self, data: bytes) -> None:
        self.tokens += data.count(b"\n\n") + (self._open_line and data.startswith(b"\n"))
        self._open_line = data.endswith(b"\n") and not data.endswith(b"\n\n")
        if self.kept is not None:
            self.kept += data


class _Frame(msgspec.Struct):
    type: str
    n: int = 0


class WsReader:
    """One conversation over WebSocket: counts the tokens of its deltas."""

    def __init__(self, number: int) -> None:
        self.tokens = 0
        self._number = number

    async def run(self, port: int) -> None:
        """Until cancelled."""
        send = {"type": "chat.send", "id": f"s{self._number}", "content": f"Stream {self._number}.", "params": SAMPLING}
        decode = msgspec.json.Decoder(_Frame).decode
        async with connect(
            f"ws://localhost:{port}/v1/ws", subprotocols=cast(Any, ["chatserve.v1"]), compression=None
        ) as socket:
            await socket.send(json.dumps({"type": "hello", "id": f"h{self._number}"}))
            await socket.send(json.dumps(send))
            async for text in socket:
                frame = decode(text)
                if frame.type == "error":
                    raise RuntimeError(f"the server refused: {text!r}")
                self.tokens += frame.n


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, all threads, from its CPU clock (see clock_getcpuclockid(3))."""
    return time.clock_gettime(~pid << 3 | 2)


async def watch(readers: Sequence[SseReader | WsReader], pid: int, seconds: float, rounds: int) -> dict[str, Any]:
    """CPU microseconds of the server per token, per round, once every stream runs."""
    deadline = time.monotonic() + 30.0
    while min(reader.tokens for reader in readers) < WARM_UP_TOKENS:
        if time.monotonic() > deadline:
            raise RuntimeError("the streams do not run")
        await asyncio.sleep(0.05)
    per_token: list[float] = []
    total = 0
    began = time.perf_counter()
    for _ in range(rounds):
        tokens, cpu = sum(reader.tokens for reader in readers), cpu_seconds(pid)
        await asyncio.sleep(seconds)
        count = sum(reader.tokens for reader in readers) - tokens
        if not count:
            raise RuntimeError("the streams have stopped; they need a longer MAX_TOKENS or fewer rounds")
        per_token.append((cpu_seconds(pid) - cpu) / count * 1e6)
        total += count
    return {"us_per_token": per_token, "tokens_per_s": total / (time.perf_counter() - began)}


def most_tokens_per_event(received: bytes) -> int:
    """The most words that one event of a stream carried (each token is a word)."""
    most = 0
    for event in received.split(b"data: ")[2:-1]:  # after the role's event; the last may be incomplete
        content = json.loads(event.partition(b"\n\n")[0])["choices"][0]["delta"].get("content", "")
        most = max(most, content.count(" "))
    return most


async def read_sse(port: int, pid: int, streams: int, seconds: float, rounds: int) -> dict[str, Any]:
    """All streams over HTTP."""
    loop = asyncio.get_running_loop()
    readers = [SseReader(number, keep=number == 0) for number in range(streams)]
    transports = [
        (await loop.create_connection(cast("Callable[[], SseReader]", lambda r=reader: r), "localhost", port))[0]
        for reader in readers
    ]
    result = await watch(readers, pid, seconds, rounds)
    for transport in transports:
        transport.abort()
    assert readers[0].kept is not None
    return result | {"most_tokens_per_event": most_tokens_per_event(bytes(readers[0].kept))}


async def read_ws(port: int, pid: int, streams: int, seconds: float, rounds: int) -> dict[str, Any]:
    """All streams over WebSocket, one socket each."""
    readers = [WsReader(number) for number in range(streams)]
    tasks = [asyncio.create_task(reader.run(port)) for reader in readers]
    watching = asyncio.create_task(watch(readers, pid, seconds, rounds))
    done, _ = await asyncio.wait([watching, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    if watching not in done:
        watching.cancel()
        done.pop().result()
        raise RuntimeError("a stream has ended early")
    await asyncio.gather(*tasks, return_exceptions=True)
    return watching.result()


def main() -> None:
    # Readers are on other machines in real life: here they must not interrupt the server's writing as they wake up.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    port, pid, transport, streams, seconds, rounds = sys.argv[1:7]
    read = read_sse if transport == "sse" else read_ws
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(read(int(port), int(pid), int(streams), float(seconds), int(rounds)))))


if __name__ == "__main__":
    main()
