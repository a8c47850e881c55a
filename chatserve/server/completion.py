"""Runs one HTTP completion, streamed or whole, over one or several generations.

Both completion endpoints come here with their generations started. Owns what happens between the first engine
event and the last byte: order of chunks, errors before and after the first byte, and the abort when the client
leaves. Knows no request fields.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from typing import TypeVar

import msgspec
import structlog
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from chatserve.config import ServerConfig
from chatserve.errors import ChatserveError
from chatserve.server.body import ClientGoneError, wait_for_disconnect
from chatserve.server.encode import ChunkEncoder
from chatserve.server.errors import encode_error, internal_error
from chatserve.server.generation import Generation
from chatserve.server.middleware import request_info
from chatserve.server.output_processor import ChoiceDone, Event, TextDelta, TokenLogprob
from chatserve.server.sse import DONE, EventStreamResponse, EventWriter, event

T = TypeVar("T")


class Outcome(msgspec.Struct, frozen=True):
    """One finished choice of a whole response."""

    text: str
    logprobs: list[TokenLogprob]
    finish_reason: str
    stop_reason: str | int | None


async def unless_client_leaves(request: Request, work: Awaitable[T]) -> T:
    """The result of ``work``, which is cancelled when the client hangs up; then `ClientGoneError`."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(gone, task, return_exceptions=True)


async def collect(request: Request, generations: Sequence[Generation]) -> list[Outcome]:
    """Run to the end; outcomes in order of prompt, then choice. On any error nothing goes on running."""
    try:
        return await unless_client_leaves(request, _collect(generations))
    finally:
        cancel_all(generations)
        _leave_counts(request, generations)


async def _collect(generations: Sequence[Generation]) -> list[Outcome]:
    outcomes: list[Outcome] = []
    for generation in generations:  # the others go on meanwhile; their tokens wait in their streams
        logprobs: list[list[TokenLogprob]] = [[] for _ in range(generation.request.sampling.n)]
        ends: list[ChoiceDone] = []
        while events := await generation.next():
            for item in events:
                if isinstance(item, TextDelta):
                    logprobs[item.choice] += item.logprobs
                elif isinstance(item, ChoiceDone):
                    ends.append(item)
        for end in sorted(ends, key=lambda end: end.choice):
            text = generation.choice_text(end.choice)
            outcomes.append(Outcome(text, logprobs[end.choice], end.finish_reason, end.stop_reason))
    return outcomes


def stream(
    request: Request, generations: Sequence[Generation], encoder: ChunkEncoder, config: ServerConfig
) -> Response:
    """A streamed response over started generations; choice ``c`` of generation ``g`` is number ``g * n + c``."""
    num_choices = generations[0].request.sampling.n

    def deliver_to(writer: EventWriter, first: int, generation: Generation) -> None:
        def deliver(events: list[Event]) -> bool:
            if not writer.is_ready():
                return False
            if len(events) == 1 and encoder.is_plain and type(event := events[0]) is TextDelta:  # nearly always
                writer.write_now(encoder.text(first + event.choice, event.text))
            elif frames := _frames(encoder, first, generation, events):
                writer.write_now(frames)
            return True

        generation.deliver_to(deliver)

    async def produce(writer: EventWriter) -> None:
        for position, generation in enumerate(generations):
            deliver_to(writer, position * num_choices, generation)
        try:
            async with aclosing(_merge(generations)) as merged:
                async for position, events in merged:
                    if frames := _frames(encoder, position * num_choices, generations[position], events):
                        await writer.write(frames)
            usages = [generation.usage for generation in generations]
            await writer.write((encoder.final_usage(usages) if encoder.include_usage else b"") + DONE)
        except ChatserveError as error:
            await writer.write(event(encode_error(error)))
        except Exception:
            info = request_info(request.scope)
            structlog.get_logger("chatserve.request").exception("stream_failed", request_id=info.request_id)
            await writer.write(event(encode_error(internal_error())))

    def release() -> None:
        cancel_all(generations)
        _leave_counts(request, generations)

    return EventStreamResponse(
        produce,
        release=release,
        heartbeat_interval=config.heartbeat_interval,
        send_timeout=config.send_timeout,
    )


def _frames(encoder: ChunkEncoder, first: int, generation: Generation, events: Sequence[Event]) -> bytes:
    """Events of one generation whose choice 0 is number ``first`` of the response."""
    frames: list[bytes] = []
    usage = generation.usage
    num_ahead = sum(map(_num_tokens, events)) if encoder.continuous_usage else 0
    for item in events:
        if encoder.continuous_usage:
            num_ahead -= _num_tokens(item)
            usage = replace(generation.usage, completion_tokens=generation.usage.completion_tokens - num_ahead)
        if isinstance(item, TextDelta):
            frames.append(encoder.delta(first + item.choice, item, usage))
        elif isinstance(item, ChoiceDone):
            frames.append(encoder.done(first + item.choice, item, usage))
        elif encoder.is_chat:
            frames += [encoder.role(first + choice, usage) for choice in range(generation.request.sampling.n)]
    return b"".join(frames)


def _num_tokens(item: Event) -> int:
    """Generated tokens that an event stands for."""
    if isinstance(item, TextDelta):
        return len(item.token_ids)
    return int(isinstance(item, ChoiceDone) and item.stop_token is not None)


def cancel_all(generations: Sequence[Generation]) -> None:
    """End whatever still runs."""
    for generation in generations:
        generation.cancel()


async def _merge(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, list[Event]], None]:
    """Events of all generations as they come, with the generation's position; the first error ends it."""
    if len(generations) == 1:
        while events := await generations[0].next():
            yield 0, events
        return
    waiting = {asyncio.ensure_future(generation.next()): i for i, generation in enumerate(generations)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda task: waiting[task]):
                position = waiting.pop(task)
                if events := task.result():
                    # Only then the next: while somebody waits in `next`, what comes goes straight to the connection,
                    # past what is yielded here and may have to wait for a slow reader.
                    yield position, events
                    waiting[asyncio.ensure_future(generations[position].next())] = position
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def _leave_counts(request: Request, generations: Sequence[Generation]) -> None:
    usages = [generation.usage for generation in generations]
    request_info(request.scope).tokens = (
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.cached_tokens for usage in usages),
        sum(usage.completion_tokens for usage in usages),
    )
