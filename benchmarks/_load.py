"""Runs a workload against one server and sums up what came back.

`run_load` is the loop (closed with a number of workers, open with start times), `Summary` the arithmetic on its
replies. Rates are over tokens that the server counted itself; nothing is estimated from text.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import uvloop

from benchmarks._stream_client import Endpoint, Reply, Target, chat_request, completion_request, exchange, parse_reply
from benchmarks._workload import Conversation, text_of


class LoadError(RuntimeError):
    """Requests failed, or the server did other work than it was asked for."""


@dataclass(frozen=True)
class Outcome:
    """Replies in order of sending, and what sending cost this process.

    Attributes:
        began: `time.perf_counter` when the first request was due.
        client_cpu: seconds of CPU that this process used from the first request to the last byte.
    """

    replies: list[Reply]
    began: float
    client_cpu: float


def run_load(
    target: Target,
    conversations: Sequence[Conversation],
    *,
    concurrency: int | None = None,
    starts: Sequence[float] | None = None,
    endpoint: Endpoint = "completions",
) -> Outcome:
    """Send everything and wait for the end.

    Args:
        concurrency: closed loop: so many conversations at once; ``None`` for all.
        starts: open loop: when each conversation begins, in seconds from now, whatever the server does. Later turns
            follow their own answers, as people do.

    Raises:
        LoadError: any request failed or was answered with another number of tokens than was asked for.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        outcome = runner.run(_run(target, conversations, concurrency, starts, endpoint))
    failed = [reply for reply in outcome.replies if reply.error is not None]
    if failed:
        raise LoadError(f"{len(failed)} of {len(outcome.replies)} requests failed; the first: {failed[0].error}")
    wanted = sum(len(c.users) * c.max_tokens for c in conversations)
    got = sum(reply.completion_tokens for reply in outcome.replies)
    if got != wanted:
        raise LoadError(f"the server says it made {got} tokens where {wanted} were asked for")
    return outcome


async def _run(
    target: Target,
    conversations: Sequence[Conversation],
    concurrency: int | None,
    starts: Sequence[float] | None,
    endpoint: Endpoint,
) -> Outcome:
    talks = [_Talk(target, conversation, endpoint) for conversation in conversations]
    cpu, began = time.process_time(), time.perf_counter()
    if starts is not None:
        await asyncio.gather(*(talk.run(began + start) for talk, start in zip(talks, starts, strict=True)))
    elif concurrency is None:
        await asyncio.gather(*(talk.run() for talk in talks))
    else:
        waiting = iter(talks)

        async def work() -> None:
            for talk in waiting:
                await talk.run()

        await asyncio.gather(*(work() for _ in range(concurrency)))
    client_cpu = time.process_time() - cpu
    return Outcome([reply for talk in talks for reply in talk.replies()], began, client_cpu)


class _Talk:
    """One conversation in progress. Requests of known content are encoded before the clock starts."""

    def __init__(self, target: Target, conversation: Conversation, endpoint: Endpoint) -> None:
        self._target = target
        self._conversation = conversation
        self._is_chat = endpoint == "chat"
        self._messages: list[dict[str, str]] = []
        self._raw: list[tuple[float, float, list[tuple[float, bytes]]]] = []
        turns = range(0 if self._is_chat else len(conversation.users))
        self._payloads = [
            completion_request(target, conversation.prompt(turn), conversation.max_tokens, conversation.tenant.api_key)
            for turn in turns
        ]

    async def run(self, due: float | None = None) -> None:
        """Every turn; the first when it is due, the others after their pauses."""
        for turn in range(len(self._conversation.users)):
            if turn:
                due = time.perf_counter() + self._conversation.pauses[turn - 1]
            if due is not None and (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            # A pause that ends late is the client's own; only an open loop's start can be missed.
            self._raw.append(await exchange(self._target, self._payload(turn), due if turn == 0 else None))

    def replies(self) -> list[Reply]:
        replies = [parse_reply(*raw) for raw in self._raw]
        for turn, reply in enumerate(replies):
            reply.tenant, reply.turn = self._conversation.tenant.name, turn
        return replies

    def _payload(self, turn: int) -> bytes:
        if not self._is_chat:
            return self._payloads[turn]
        if turn:
            self._messages.append({"role": "assistant", "content": parse_reply(*self._raw[-1]).text})
        self._messages.append({"role": "user", "content": text_of(self._conversation.users[turn])})
        tenant = self._conversation.tenant
        return chat_request(self._target, self._messages, self._conversation.max_tokens, tenant.api_key)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p95, p99 and mean; empty for no values."""
    if not values:
        return {}
    p50, p95, p99 = np.percentile(values, (50, 95, 99)).tolist()
    return {"p50": p50, "p95": p95, "p99": p99, "mean": float(np.mean(values))}


class Summary:
    """Rates and latencies of one outcome, in seconds and tokens per second."""

    def __init__(self, outcome: Outcome) -> None:
        self.replies = outcome.replies
        self.client_cpu = outcome.client_cpu
        self.seconds = max(reply.times[-1] for reply in self.replies) - outcome.began

    @property
    def output_tokens(self) -> int:
        return sum(reply.completion_tokens for reply in self.replies)

    @property
    def end_to_end(self) -> float:
        """Output tokens per second from the first request to the last token."""
        return self.output_tokens / self.seconds

    @property
    def tokens_per_event(self) -> float:
        """1 where every token came in an event of its own; above 1 where several did, or a token brought no text."""
        return self.output_tokens / sum(len(reply.times) for reply in self.replies)

    @property
    def decode_only(self) -> float:
        """Output tokens per second while all requests decode: from the last first token to the first last token.

        Raises:
            LoadError: there was no such time (an open loop, or more requests than slots).
        """
        begin = max(reply.times[0] for reply in self.replies)
        end = min(reply.times[-1] for reply in self.replies)
        if end <= begin:
            raise LoadError("at no time did all requests decode")
        return self.tokens_between(begin, end) / (end - begin)

    def tokens_between(self, begin: float, end: float) -> float:
        """Tokens that arrived after ``begin`` and up to ``end``."""
        return sum(
            sum(begin < when <= end for when in reply.times) * reply.completion_tokens / len(reply.times)
            for reply in self.replies
        )

    @property
    def ttfts(self) -> list[float]:
        return [reply.ttft for reply in self.replies]

    @property
    def itls(self) -> list[float]:
        """Every gap between two events of one request."""
        return [b - a for reply in self.replies for a, b in zip(reply.times, reply.times[1:], strict=False)]

    def goodput(self, ttft: float, itl: float) -> dict[str, float]:
        """Requests whose first token came within ``ttft`` seconds and whose mean gap was within ``itl``."""
        good = [reply for reply in self.replies if reply.ttft <= ttft and reply.mean_itl <= itl]
        return {
            "share": len(good) / len(self.replies),
            "requests_per_second": len(good) / self.seconds,
            "tokens_per_second": sum(reply.completion_tokens for reply in good) / self.seconds,
        }

    def as_dict(self) -> dict[str, Any]:
        """Everything but goodput, ready for JSON."""
        cached = [reply.cached_tokens for reply in self.replies if reply.cached_tokens is not None]
        prompt_tokens = sum(reply.prompt_tokens for reply in self.replies)
        return {
            "requests": len(self.replies),
            "seconds": self.seconds,
            "prompt_tokens": prompt_tokens,
            "cached_tokens": sum(cached) if cached else None,
            "output_tokens": self.output_tokens,
            "output_tokens_per_second": self.end_to_end,
            "total_tokens_per_second": (self.output_tokens + prompt_tokens) / self.seconds,
            "ttft_s": percentiles(self.ttfts),
            "itl_s": percentiles(self.itls),
            "tokens_per_event": self.tokens_per_event,
            "client_cpu_us_per_token": self.client_cpu / self.output_tokens * 1e6,
        }
