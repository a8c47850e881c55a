"""Streamed completions over plain sockets: what is sent, and what came when.

Cheap on purpose, because client and server share the machine: while a load runs, a reply costs one callback per
socket read, which keeps the bytes and the time. Everything else (chunked framing, events, JSON) is worked out when
the reply is complete. Knows HTTP/1.1, server-sent events and OpenAI's shapes; not what is asked, nor how often.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Endpoint = Literal["completions", "chat"]
Read = tuple[float, bytes]

ANSWER_SECONDS = 600.0
"""After this an answer counts as lost."""


@dataclass(frozen=True)
class Target:
    """A server and how to speak to it.

    Attributes:
        extra: fields of the body that this server needs beside OpenAI's.
    """

    host: str
    port: int
    model: str
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class Reply:
    """One request's life, in seconds of `time.perf_counter`.

    Attributes:
        due: when the load wanted it sent; waiting for a late client counts as the server's time.
        times: arrival of every event that brought output.
        closed: end of the response.
        prompt_tokens, completion_tokens: the server's own counts (``usage``).
        cached_tokens: prompt tokens that the server says it reused; ``None`` if it does not say.
        error: why there are no such counts.
    """

    due: float
    closed: float
    times: list[float]
    text: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None
    error: str | None = None
    tenant: str = ""
    turn: int = 0

    @property
    def ttft(self) -> float:
        """Seconds until output began."""
        return self.times[0] - self.due

    @property
    def mean_itl(self) -> float:
        """Seconds per token after the first; 0 for a single token."""
        if self.completion_tokens < 2:
            return 0.0
        return (self.times[-1] - self.times[0]) / (self.completion_tokens - 1)


def completion_request(target: Target, prompt: Sequence[int], max_tokens: int, api_key: str | None = None) -> bytes:
    """``POST /v1/completions`` with token ids: greedy, streamed, exactly ``max_tokens`` tokens."""
    body = {"model": target.model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0}
    return _post(target, "/v1/completions", body, api_key)


def chat_request(target: Target, messages: list[dict[str, str]], max_tokens: int, api_key: str | None = None) -> bytes:
    """``POST /v1/chat/completions``, otherwise the same."""
    body = {"model": target.model, "messages": messages, "max_tokens": max_tokens, "temperature": 0}
    return _post(target, "/v1/chat/completions", body, api_key)


def _post(target: Target, path: str, body: dict[str, Any], api_key: str | None) -> bytes:
    stream = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    payload = json.dumps(body | stream | target.extra, separators=(",", ":")).encode()
    authorization = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {target.host}:{target.port}\r\nContent-Type: application/json\r\n"
        f"{authorization}Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + payload


class _Exchange(asyncio.Protocol):
    """One connection: writes the request at once, keeps what comes back until the server closes."""

    def __init__(self, payload: bytes, done: asyncio.Future[None]) -> None:
        self.reads: list[Read] = []
        self.sent = 0.0
        self.closed = 0.0
        self._payload = payload
        self._done = done

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.sent = time.perf_counter()
        transport.write(self._payload)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self.reads.append((time.perf_counter(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = time.perf_counter()
        if not self._done.done():
            self._done.set_result(None)


async def exchange(target: Target, payload: bytes, due: float | None = None) -> tuple[float, float, list[Read]]:
    """Send, wait for the server to close: (due, closed, reads). Without ``due`` time begins with the sending.

    Raises:
        TimeoutError: the answer was not complete in `ANSWER_SECONDS`.
        OSError: nobody listens.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    transport, protocol = await loop.create_connection(lambda: _Exchange(payload, done), target.host, target.port)
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            await done
    finally:
        transport.abort()
    return protocol.sent if due is None else due, protocol.closed, protocol.reads


def parse_reply(due: float, closed: float, reads: Sequence[Read]) -> Reply:
    """The raw exchange as a `Reply`; whatever is wrong with it is in ``error``."""
    reply = Reply(due, closed, [])
    status, body = _split_head(reads)
    if status != 200:
        content = b"".join(data for _, data in body)[:500].decode(errors="replace")
        reply.error = f"HTTP status {status}: {content}" if status else "the server closed without an answer"
        return reply
    is_complete = False
    text: list[str] = []
    for when, data in events_of(body):
        if data == b"[DONE]":
            is_complete = True
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            reply.error = str(chunk["error"])
            return reply
        if usage := chunk.get("usage"):
            _note_usage(reply, usage)
        for choice in chunk.get("choices") or ():
            piece = _text_of(choice)
            if piece or (choice.get("finish_reason") is None and "text" in choice):
                reply.times.append(when)
                text.append(piece)
    reply.text = "".join(text)
    if not is_complete:
        reply.error = "the stream ended before [DONE]"
    elif not reply.completion_tokens or not reply.times:
        reply.error = "the stream told no usage or brought no output"
    return reply


def _note_usage(reply: Reply, usage: dict[str, Any]) -> None:
    reply.prompt_tokens = int(usage["prompt_tokens"])
    reply.completion_tokens = int(usage["completion_tokens"])
    details = usage.get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens")
    reply.cached_tokens = None if cached is None else int(cached)


def _text_of(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return choice["text"] or ""
    return (choice.get("delta") or {}).get("content") or ""


def _split_head(reads: Sequence[Read]) -> tuple[int, list[Read]]:
    """Status (0 for none) and the body's reads, chunked framing removed."""
    head = bytearray()
    for index, (when, data) in enumerate(reads):
        head += data
        end = head.find(b"\r\n\r\n")
        if end < 0:
            continue
        lines = bytes(head[:end]).lower().split(b"\r\n")
        rest = [(when, bytes(head[end + 4 :])), *reads[index + 1 :]]
        status = int(lines[0].split()[1])
        is_chunked = any(line.startswith(b"transfer-encoding:") and b"chunked" in line for line in lines)
        return status, list(_dechunk(rest)) if is_chunked else rest
    return 0, []


def _dechunk(reads: Sequence[Read]) -> Iterator[Read]:
    """Chunked transfer coding (RFC 9112, 7.1) undone, arrival times kept."""
    pending = bytearray()
    missing = 0  # bytes of the current chunk that have not come, its CRLF included
    for when, data in reads:
        pending += data
        content = bytearray()
        while pending:
            if missing:
                piece = pending[:missing]
                content += piece[: max(0, missing - 2)]
                del pending[: len(piece)]
                missing -= len(piece)
                continue
            end = pending.find(b"\r\n")
            if end < 0:
                break
            size = int(pending[:end].split(b";")[0], 16)
            del pending[: end + 2]
            if size == 0:
                yield when, bytes(content)
                return
            missing = size + 2
        if content:
            yield when, bytes(content)


def events_of(body: Sequence[Read]) -> Iterator[tuple[float, bytes]]:
    """Data of each server-sent event, with the arrival of its last byte. Comments are skipped."""
    pending = bytearray()
    for when, data in body:
        pending += data.replace(b"\r", b"")  # JSON has no raw CR: what there is ends lines
        while (end := pending.find(b"\n\n")) >= 0:
            frame = bytes(pending[:end])
            del pending[: end + 2]
            lines = [line[5:].strip() for line in frame.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield when, b"\n".join(lines)
