"""One `Generation` per accepted request, whatever the transport: the consumer's end of it.

Knows the engine's stream, the clock and how a request ends; text is made in `chatserve.server.output_processor`, and
`chatserve.server.generation_service` makes these and is told when they end. Knows nothing of HTTP, SSE or WebSocket.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from chatserve.engine.client import Delta, EngineStream
from chatserve.engine.protocol import Finished, Started
from chatserve.errors import (
    ChatserveError,
    ContextLengthError,
    GenerationFailedError,
    QueueFullError,
)
from chatserve.sampling_params import SamplingParams
from chatserve.scope import Scope
from chatserve.server.auth import Principal
from chatserve.server.output_processor import (
    ChoiceDone,
    Event,
    OutputProcessor,
    PromptStarted,
    TextDelta,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from chatserve.tenancy.registry import Admission
from chatserve.text.stop_strings import StopAutomaton

if TYPE_CHECKING:
    from chatserve.server.generation_service import GenerationService

__all__ = [
    "ChoiceDone",
    "Event",
    "Generation",
    "GenerationRequest",
    "PromptStarted",
    "TextDelta",
    "Timings",
    "TokenLogprob",
    "TopLogprob",
    "Usage",
]


class GenerationRequest(msgspec.Struct, kw_only=True):
    """One prompt and how to continue it.

    Attributes:
        prompt_ids: int32 token ids.
        principal: who asks, and is limited and charged.
        stop: texts that end the output, shared by all its choices; cut unless ``include_stop_str_in_output``.
        scopes: cache scopes the caller may see, its own last.
        patience: seconds it may wait for its start; ``None`` for as long as it takes.
        continues_prompt: the output goes on from the prompt's text (a completion), and is no answer of its own
            (a chat) whose ids a later turn may quote.
        priority: lower runs first, within the tenant's class.
        flex: content with one class below the tenant's.
        prompt_field, max_tokens_field: what refusals name, as its client calls it.
    """

    prompt_ids: bytes
    sampling: SamplingParams
    scopes: tuple[Scope, ...]
    principal: Principal = Principal()
    stop: StopAutomaton | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    priority: int = 0
    flex: bool = False
    patience: float | None = None
    continues_prompt: bool = False
    prompt_field: str | None = "prompt"
    max_tokens_field: str = "max_tokens"


class Timings(msgspec.Struct):
    """Moments of a request's life, monotonic seconds; ``None`` while they have not come."""

    arrived: float
    started: float | None = None
    first_token: float | None = None
    finished: float | None = None


class Generation:
    """One accepted request. A single consumer calls `next`; `cancel` may be called from anywhere on the loop.

    Attributes:
        timings: when it arrived, started, got its first token and ended.
        admission: its claim on its tenant's limits.
    """

    # With slots an object is one piece of memory. Between two steps others use the caches, and then each further piece
    # that a token touches costs more than the instructions that use it.
    __slots__ = (
        "_closed",
        "_consumer",
        "_deliver",
        "_failure",
        "_fault",
        "_output",
        "_pending",
        "_queue_deadline",
        "_service",
        "_stream",
        "admission",
        "request",
        "timings",
    )

    def __init__(
        self,
        service: GenerationService,
        request: GenerationRequest,
        output: OutputProcessor,
        stream: EngineStream,
        admission: Admission,
        timings: Timings,
    ) -> None:
        self.request = request
        self.admission = admission
        self.timings = timings
        self._service = service
        self._stream = stream
        self._output = output
        self._failure: ChatserveError | None = None
        self._fault: Exception | None = None
        self._pending: list[Event] = []
        self._deliver: Callable[[list[Event]], bool] | None = None
        self._closed = False
        self._consumer: asyncio.Task[object] | None = None
        self._queue_deadline: asyncio.TimerHandle | None = None
        if request.patience is not None:
            loop = asyncio.get_running_loop()
            self._queue_deadline = loop.call_later(request.patience, self._waited_too_long)

    @property
    def usage(self) -> Usage:
        """Counts so far; final once the last `ChoiceDone` was returned."""
        return self._output.usage

    async def next(self) -> list[Event]:
        """Wait for news; empty once every choice is done or the generation was cancelled.

        Text that came before a failure is returned first; the failure is raised by the call after it.

        Raises:
            ChatserveError: the generation failed (`GenerationFailedError`, `EngineUnavailableError`,
                `DrainingError` …).
        """
        while True:
            if self._pending:
                events, self._pending = self._pending, []
                return events
            if self._fault is not None:
                fault, self._fault = self._fault, None
                raise fault
            if self._failure is not None:
                raise self._failure
            if self._closed:
                return []
            news = await self._wait()
            if news:
                self._pending += self._process(news)
            elif not (self._closed or self._pending or self._fault):  # the engine has ended it without saying how
                self.fail(GenerationFailedError("The engine lost this request. Send it again."))

    def deliver_to(self, deliver: Callable[[list[Event]], bool]) -> None:
        """Give events to ``deliver`` the moment they come, so that most of them need no task switch.

        It is called on the loop, only while the consumer waits in `next`, and must not block; it returns whether it
        took them. What it does not take, and whatever ends the generation, is for `next`, in order; so is an exception
        of its own.
        """
        self._deliver = deliver

    def cancel(self) -> None:
        """End it now, in the engine too. Idempotent; a waiting `next` returns an empty list."""
        self._pending = []
        if not self._closed:
            self._close("abort")

    def fail(self, error: ChatserveError) -> None:
        """End it now with an error that the consumer gets to see. Without effect once it has ended."""
        if not self._closed:
            self._failure = error
            self._close("error")

    def choice_token_ids(self, choice: int) -> bytes:
        """int32 ids of a choice so far, without the token that ended it."""
        return self._output.token_ids(choice).tobytes()

    def choice_text(self, choice: int) -> str:
        """Text of a choice that was made so far, whether or not a consumer has it yet."""
        return self._output.text(choice)

    async def _wait(self) -> Sequence[Started | Delta | Finished]:
        task = self._consumer = asyncio.current_task()
        try:
            return await self._stream.next(None if self._deliver is None else self._take)
        except asyncio.CancelledError:
            # `_close` wakes the consumer by cancelling it, as `asyncio.timeout` does; any other cancellation
            # is the consumer's own.
            if not self._closed or task is None or task.uncancel() > 0:
                raise
            return ()
        finally:
            self._consumer = None

    def _take(self, news: list[Started | Delta | Finished]) -> bool:
        """Process and deliver in place of the waiting consumer; false wakes it, because there is something for it."""
        try:
            events = self._process(news)
            if not self._closed and (not events or (self._deliver is not None and self._deliver(events))):
                return True
            self._pending += events
        except Exception as error:
            self._fault = error
        return False

    def _process(self, events: Sequence[Started | Delta | Finished]) -> list[Event]:
        if self._closed:
            return []
        now = time.monotonic()
        output = self._output
        had_tokens = output.usage.completion_tokens
        out = output.process(events, now)
        if not had_tokens and output.usage.completion_tokens:
            self.timings.first_token = now
        if output.failure is not None:
            if isinstance(output.failure, ContextLengthError) and self.request.sampling.max_tokens is not None:
                output.failure.param = self.request.max_tokens_field
            self.fail(output.failure)
            return out
        if out and type(last := out[-1]) is ChoiceDone:
            for event in out:
                if type(event) is ChoiceDone and self._is_exact(event):
                    self._service.remember(self.request, self.choice_text(event.choice), output.token_ids(event.choice))
            if output.num_open == 0:
                self._close(last.finish_reason)
        return out

    def _waited_too_long(self) -> None:
        if self._stream.started:
            return
        self._service.metrics.rejections["queue_timeout"] += 1
        self.fail(
            QueueFullError(
                f"The request waited {self.request.patience:g} seconds, as long as its client was going to wait, and "
                "did not start. Try again later.",
                code="queue_timeout",
                retry_after=1.0,
            )
        )

    def _is_exact(self, done: ChoiceDone) -> bool:
        """Whether a choice's ids decode to its text: a stop string ends the text before the ids, and a stop token
        that is shown is part of the text alone.
        """
        if isinstance(done.stop_reason, int):
            return not self.request.include_stop_str_in_output
        return done.stop_reason is None

    def _close(self, reason: str) -> None:
        self._closed = True
        self._deliver = None
        self.timings.finished = time.monotonic()
        if self._queue_deadline is not None:
            self._queue_deadline.cancel()
        self._stream.abort()
        self._service.release(self, reason)
        if self._consumer is not None and self._consumer is not asyncio.current_task():
            self._consumer.cancel()
