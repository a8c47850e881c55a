"""Admission: what becomes of a request before and after it runs, whatever the transport.

`GenerationService` admits requests (or refuses them before anything is enqueued), renders chats, remembers answers
and books what tenants use. Knows nothing of HTTP, SSE or WebSocket; both the HTTP routes and the WebSocket call it.
What happens to an accepted request in between is `chatserve.server.generation`'s part.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from array import array
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec
import structlog

from chatserve.config import Config
from chatserve.engine.client import EngineClient
from chatserve.engine.protocol import EngineInfo
from chatserve.errors import (
    ChatserveError,
    ContextLengthError,
    DrainingError,
    EngineUnavailableError,
    InvalidRequestError,
    QueueFullError,
    RateLimitError,
)
from chatserve.scope import Scope
from chatserve.server.auth import Principal
from chatserve.server.context import Lifecycle
from chatserve.server.generation import Generation, GenerationRequest, Timings
from chatserve.server.metrics import ServerMetrics
from chatserve.server.output_processor import (
    OutputOptions,
    OutputProcessor,
)
from chatserve.tenancy.directory import key_revoked
from chatserve.tenancy.registry import Admission, TenantRegistry
from chatserve.tenancy.tenant import DEFAULT_TENANT, MAX_PRIORITY_CLASS, Tenant
from chatserve.tenancy.usage import Usage as TenantUsage
from chatserve.text.answer_memory import AnswerMemory
from chatserve.text.chat_template import ChatMessage, ChatTemplate, RenderedPrompt
from chatserve.text.tokenizer import Tokenizer

INT32_BYTES = 4
OFF_LOOP_CHARS = 32 * 1024
OFF_LOOP_MESSAGES = 64
"""Longer texts and conversations are rendered and encoded in a thread, so that no stream waits for them."""

QUEUE_RESERVE = 2
"""Times the queue's limit that may wait at the very most, where many tenants each take their part of a full queue."""

UNSTATED_OUTPUT_TOKENS = 512
"""Reserved from a tenant's tokens for an output whose length the request leaves open, until its end."""


class GenerationService:
    """Admits, renders and remembers, for the one model that is served.

    Attributes:
        tokenizer, template: of the model, loaded in this process.
        tenants: whose limits admit and whose ledger books.
        lifecycle: while it drains, nothing is admitted.
    """

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        answers: AnswerMemory,
        config: Config,
        tenants: TenantRegistry,
        *,
        metrics: ServerMetrics,
        lifecycle: Lifecycle,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.tenants = tenants
        self.metrics = metrics
        self.lifecycle = lifecycle
        self._engine = engine
        self._answers = answers
        self._max_queued = config.engine.scheduler.max_num_queued_reqs
        self._running: set[Generation] = set()
        self._longest_token: int | None = None
        tenants.on_revoked(self._end_revoked)

    @property
    def num_running(self) -> int:
        """Generations that were admitted and have not ended."""
        return len(self._running)

    def engine_info(self) -> EngineInfo:
        """Facts of the engine; raises `EngineUnavailableError` while it loads or restarts."""
        if not self._engine.ready:
            raise EngineUnavailableError("The model is loading. Try again in a few seconds.", retry_after=2.0)
        return self._engine.info

    def context_length(self) -> int:
        """Tokens of prompt and output that one sequence can ever have here."""
        info = self.engine_info()
        return min(info.max_model_len, info.max_tokens_in_pool)

    def scope(self, kind: Literal["public", "group", "tenant"], owner: str = "", salt: str = "") -> Scope:
        """A cache scope of the served model. Raises `EngineUnavailableError` while the weights are unknown."""
        return Scope(kind, owner, self.engine_info().weights_revision, self.tokenizer.revision, salt)

    def check_tenant(self, principal: Principal) -> None:
        """Refuse early, before a prompt is rendered, what the tenant's limits will certainly refuse; see `start`."""
        with self._counting_refusals():
            self.tenants.check(principal.tenant)

    def count_request(self, principal: Principal) -> None:
        """Count a request that works without generating.

        Raises:
            RateLimitError: it is one too many.
            AuthenticationError: the tenant is gone.
        """
        with self._counting_refusals():
            self.tenants.count_request(principal.tenant)

    @contextlib.contextmanager
    def _counting_refusals(self) -> Iterator[None]:
        try:
            yield
        except (RateLimitError, QueueFullError) as error:
            self.metrics.rejections[error.code] += 1
            raise

    def start(self, request: GenerationRequest) -> Generation:
        """Admit one request and hand it to the engine; see `start_all`."""
        (generation,) = self.start_all([request])
        return generation

    def start_all(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Admit requests of one caller and hand them to the engine: all of them or none.

        Raises, before anything is enqueued:
            DrainingError, EngineUnavailableError: not now.
            QueueFullError: the waiting queue, or the tenant's part of it, is at its limit.
            RateLimitError: another limit of the tenant is reached.
            ContextLengthError: prompt and output can never fit, with the numbers.
            InvalidRequestError: an empty prompt, or a sampling parameter out of range.
            AuthenticationError: the tenant is gone.
        """
        for request in requests:
            self._check(request)
        tenant = self.tenants.tenant(requests[0].principal.tenant)
        with self._counting_refusals():
            self._check_queue(tenant.name, len(requests))
            admissions = self.tenants.admit(tenant.name, [self._cost(request) for request in requests])
        generations: list[Generation] = []
        try:
            for request, admission in zip(requests, admissions, strict=True):
                generations.append(self._submit(request, tenant, admission))
        except BaseException:
            for generation in generations:
                generation.cancel()
            for admission in admissions:
                admission.settle(0)
            raise
        return generations

    def _submit(self, request: GenerationRequest, tenant: Tenant, admission: Admission) -> Generation:
        sampling = request.sampling
        if sampling.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=secrets.randbits(63))
        output = self._output_processor(request)
        timings = Timings(arrived=time.monotonic())

        def note_start() -> None:
            timings.started = time.monotonic()
            admission.start()

        stream = self._engine.submit(
            request.prompt_ids,
            sampling,
            scopes=request.scopes,
            priority=request.priority,
            priority_class=min(tenant.priority_class + request.flex, MAX_PRIORITY_CLASS),
            tenant=tenant.name,
            on_start=note_start,
        )
        generation = Generation(self, request, output, stream, admission, timings)
        self._running.add(generation)
        return generation

    def _cost(self, request: GenerationRequest) -> int:
        """Tokens that a request may use, for its tenant's limits."""
        prompt = len(request.prompt_ids) // INT32_BYTES
        output = request.sampling.max_tokens
        if output is None:
            output = min(UNSTATED_OUTPUT_TOKENS, self.context_length() - prompt)
        return prompt + request.sampling.n * output

    def _output_processor(self, request: GenerationRequest) -> OutputProcessor:
        options = OutputOptions(
            stop=request.stop,
            include_stop=request.include_stop_str_in_output,
            skip_special_tokens=request.skip_special_tokens,
            continues_text=request.continues_prompt,
            stop_token_ids=frozenset(request.sampling.stop_token_ids),
        )
        return OutputProcessor(
            self.tokenizer,
            options,
            num_choices=request.sampling.n,
            prompt_tokens=len(request.prompt_ids) // INT32_BYTES,
            observe_gap=self.metrics.observe_token_gap,
        )

    def _check(self, request: GenerationRequest) -> None:
        if self.lifecycle.draining:
            raise DrainingError("The server is shutting down. Send the request again shortly.", retry_after=5.0)
        info = self.engine_info()
        request.sampling.validate(info.vocab_size)
        self._check_length(request)
        self.refuse_unknown_tokens(request.prompt_ids, request.prompt_field)

    def refuse_unknown_tokens(self, token_ids: bytes, param: str | None) -> None:
        """Raise `InvalidRequestError` where a token (int32) has no embedding: tokenizers may know more than models."""
        limit = self.engine_info().vocab_size
        if self.tokenizer.vocab_size <= limit:
            return  # as with nearly every model: no prompt needs to be looked through
        largest = max(memoryview(token_ids).cast("i"), default=0)
        if largest >= limit:
            raise InvalidRequestError(
                f"The text holds {self.tokenizer.token_text(largest)!r}, token {largest}, which this model's tokenizer "
                f"knows and the model does not: it has {limit} tokens. Leave that text out.",
                param=param,
            )

    def _check_queue(self, tenant: str, count: int) -> None:
        """A full queue still takes in whoever has not had an equal part of it: a flood fills its own tenant's queue."""
        if not self._has_place(tenant, count):
            raise QueueFullError(
                f"{self._engine.num_waiting} requests are waiting, and your part of this server's queue of "
                f"{self._max_queued} is full. Try again shortly.",
                retry_after=1.0,
            )

    def _has_place(self, tenant: str, count: int) -> bool:
        waiting, limit = self._engine.num_waiting + count, self._max_queued
        return waiting <= limit or (
            waiting <= QUEUE_RESERVE * limit and self.tenants.has_queue_share(tenant, count, limit)
        )

    @property
    def queue_is_full(self) -> bool:
        """Whether no tenant could put another request into the queue."""
        names = [tenant.name for tenant in self.tenants.tenants()] or [DEFAULT_TENANT]
        return not any(self._has_place(name, 1) for name in names)

    def _check_length(self, request: GenerationRequest) -> None:
        limit = self.context_length()
        prompt = len(request.prompt_ids) // INT32_BYTES
        output = request.sampling.max_tokens
        if prompt == 0:
            raise InvalidRequestError(
                "The prompt is empty: it must hold at least one token.", param=request.prompt_field
            )
        if prompt + max(output or 1, request.sampling.min_tokens) > limit:
            asked = f"{output} for the output" if output is not None else "at least 1 for the output"
            raise ContextLengthError(
                f"This model holds at most {limit} tokens of prompt and output here. The request asks for "
                f"{prompt + (output or 1)}: {prompt} in the prompt and {asked}. "
                f"Shorten the prompt or lower {request.max_tokens_field}.",
                param=request.max_tokens_field if output is not None and prompt < limit else None,
            )

    async def render_chat_off_loop(
        self, messages: Sequence[ChatMessage], scope: Scope, *, add_generation_prompt: bool = True
    ) -> RenderedPrompt:
        """Chat template and encoding, with the exact ids of remembered answers spliced in.

        Runs in a thread where the conversation is long. Raises `InvalidRequestError` with the template's own message
        when it refuses the conversation.
        """
        num_chars = sum(len(message.content) for message in messages)
        await self.refuse_oversized(num_chars)
        known = self._recall(messages, scope)
        if num_chars <= OFF_LOOP_CHARS and len(known) <= OFF_LOOP_MESSAGES:
            return self._count(self.template.render(known, add_generation_prompt=add_generation_prompt))
        return self._count(
            await asyncio.to_thread(self.template.render, known, add_generation_prompt=add_generation_prompt)
        )

    async def refuse_oversized(self, num_chars: int) -> None:
        """Raise `ContextLengthError` for a text that cannot fit however well it is encoded, before it is encoded."""
        limit = self.context_length()
        if num_chars <= OFF_LOOP_CHARS:
            return
        if self._longest_token is None:
            self._longest_token = await asyncio.to_thread(_longest_token, self.tokenizer)
        at_least = -(-num_chars // self._longest_token)
        if at_least > limit:
            raise ContextLengthError(
                f"This model holds at most {limit} tokens of prompt and output here. The prompt has {num_chars} "
                f"characters, which is at least {at_least} tokens. Shorten it."
            )

    async def encode(self, text: str, *, add_special_tokens: bool) -> bytes:
        """int32 ids of a text; long ones are encoded in a thread."""
        if len(text) <= OFF_LOOP_CHARS:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)

    def remember(self, request: GenerationRequest, text: str, token_ids: array[int]) -> None:
        """Keep the ids behind a finished answer, unless a control token hides among them."""
        if not request.continues_prompt and text and self.tokenizer.special_ids.isdisjoint(token_ids):
            self._answers.remember(request.scopes[-1], text, token_ids.tobytes())

    def forget(self, tenant: str) -> None:
        """Forget the ids behind a tenant's answers, as its cache is forgotten."""
        self._answers.forget(tenant)

    def release(self, generation: Generation, reason: str) -> None:
        """A generation has ended; only `Generation` calls this."""
        self._running.discard(generation)
        self.metrics.observe_generation(generation, reason)
        used = generation.usage
        started = generation.timings.started is not None
        generation.admission.settle(used.prompt_tokens + used.completion_tokens if started else 0)
        self.tenants.ledger.book(generation.request.principal.tenant, _tenant_usage(generation, reason))

    def fail_all(self, error: ChatserveError) -> None:
        """End every running generation with an error its client gets to see."""
        for generation in list(self._running):
            generation.fail(error)

    def _end_revoked(self, key_ids: frozenset[str | None]) -> None:
        for generation in list(self._running):
            if generation.request.principal.key_id in key_ids:
                generation.fail(key_revoked())

    def _count(self, prompt: RenderedPrompt) -> RenderedPrompt:
        """Report how exact the history was: a template that drops parts of answers costs cached tokens every turn."""
        self.metrics.answers_spliced += prompt.num_spliced
        if prompt.num_unspliceable and not self.metrics.answers_unspliceable:
            structlog.get_logger("chatserve.generation").warning(
                "template_changes_answers", effect="the chat template drops or changes parts of earlier answers"
            )
        self.metrics.answers_unspliceable += prompt.num_unspliceable
        return prompt

    def _recall(self, messages: Sequence[ChatMessage], scope: Scope) -> list[ChatMessage]:
        known = []
        for message in messages:
            if message.role == "assistant" and message.token_ids is None and message.content:
                ids = self._answers.recall(scope, message.content)
                if ids is not None:
                    message = msgspec.structs.replace(message, token_ids=ids)
            known.append(message)
        return known


def _tenant_usage(generation: Generation, reason: str) -> TenantUsage:
    """What an ended generation adds to its tenant's sums, beside the tokens that the engine counts."""
    times = generation.timings
    finished = times.finished or times.arrived
    started = times.started
    return TenantUsage(
        requests_completed=reason in ("stop", "length"),
        requests_cancelled=reason == "abort",
        requests_failed=reason == "error",
        delivered_tokens=generation.usage.completion_tokens,
        queue_seconds=(finished if started is None else started) - times.arrived,
        run_seconds=0.0 if started is None else finished - started,
    )


def _longest_token(tokenizer: Tokenizer) -> int:
    """Bytes of the longest token."""
    return max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))
