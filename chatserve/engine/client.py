"""The API process's view of the engine: submit a prompt, read a stream of events, know whether it is alive.

Turns step frames into per-request streams (one delivery per stream and frame) and guarantees that every stream
ends: by the engine's own terminal events, by an abort, or by the engine's death. Knows tokens, not text. Keeping a
process alive is `engine.supervisor`'s part. Everything here runs on one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from chatserve.config import EngineConfig
from chatserve.engine.launch import EngineChild
from chatserve.engine.protocol import (
    Abort,
    AddRequest,
    EngineInfo,
    EngineReady,
    EngineState,
    EngineStats,
    Explain,
    ExplainReply,
    Finished,
    FinishReason,
    GetState,
    Publish,
    PublishReply,
    Purge,
    PurgeReply,
    Reply,
    SetTenant,
    Started,
    StepFrame,
    TenantState,
    ToEngine,
)
from chatserve.engine.supervisor import DEFAULT_LIMITS, EngineSupervisor, Limits
from chatserve.errors import ChatserveError, EngineUnavailableError
from chatserve.sampling_params import SamplingParams
from chatserve.scheduler.output import SampleLogprobs
from chatserve.scope import Scope

logger = logging.getLogger(__name__)


class Delta(msgspec.Struct, frozen=True, gc=False):
    """One new token of one choice."""

    choice: int
    token_id: int
    logprobs: SampleLogprobs | None = None


Event = Started | Delta | Finished

T = TypeVar("T")
ReplyT = TypeVar("ReplyT", EngineState, PublishReply, PurgeReply, ExplainReply)


class _Mailbox:
    """What the client keeps of a request; the caller holds the `EngineStream`, so that dropping it is seen."""

    __slots__ = ("events", "on_start", "open_choices", "started", "take", "waiter")

    def __init__(self, n: int, on_start: Callable[[], None] | None) -> None:
        self.on_start = on_start
        self.events: list[Event] = []
        self.open_choices = set(range(n))
        self.started = False
        self.waiter: asyncio.Future[None] | None = None
        self.take: Callable[[list[Event]], bool] | None = None

    def deliver(self) -> None:
        """All events of a frame are in: give them to a reader that waits; without one they stay."""
        waiter = self.waiter
        if not self.events or waiter is None or waiter.done():
            return
        if self.take is not None:
            events, self.events = self.events, []
            if self.take(events):
                return
        if not waiter.done():
            waiter.set_result(None)


class EngineStream:
    """The events of one request: at most one `Started`, the `Delta`s, one `Finished` per choice.

    A stream that is garbage collected before its end aborts its request.
    """

    def __init__(self, client: EngineClient, request_id: int, mailbox: _Mailbox) -> None:
        self.request_id = request_id
        self._client = client
        self._mailbox = mailbox

    @property
    def started(self) -> bool:
        """Whether it waits no longer: the engine has admitted it, or it is over."""
        return self._mailbox.started

    async def next(self, take: Callable[[list[Event]], bool] | None = None) -> list[Event]:
        """All pending events in order, after waiting for the first; ``[]`` when every choice has finished.

        Never raises for an engine that fails: its death is a `Finished` with reason ``error`` per open choice.

        Args:
            take: while this waits, it is given each frame's events in place of the reader, on the loop and without a
                task switch; it returns whether to wait on. If not, this returns what has come since, maybe nothing.
                It must neither block nor raise.
        """
        mailbox = self._mailbox
        if not mailbox.events and mailbox.open_choices:
            if mailbox.waiter is not None:
                raise RuntimeError("an EngineStream has one reader at a time")
            mailbox.waiter, mailbox.take = asyncio.get_running_loop().create_future(), take
            try:
                await mailbox.waiter
            finally:
                mailbox.waiter = mailbox.take = None
        events, mailbox.events = mailbox.events, []
        return events

    def abort(self) -> None:
        """End the request now: each open choice gets a `Finished` with reason ``abort``. Idempotent."""
        self._client.abort(self.request_id)

    def __del__(self) -> None:
        if self._mailbox.open_choices:
            self._client.abort_from_any_thread(self.request_id)


class EngineClient:
    """The engine, as the API process sees it.

    Attributes:
        stats: the newest counters the engine has sent; they start again from zero when it is restarted.
    """

    def __init__(
        self, config: EngineConfig, child: EngineChild | None = None, *, limits: Limits = DEFAULT_LIMITS
    ) -> None:
        """
        Args:
            child: an engine that was spawned beforehand with the same config, to be used first.
        """
        self.stats = EngineStats()
        self._supervisor = EngineSupervisor(config, self, child, limits)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._info: EngineInfo | None = None
        self._ready = False
        self._ready_callbacks: list[Callable[[bool], None]] = []
        self._tenant_callbacks: list[Callable[[Sequence[TenantState]], None]] = []
        self._mailboxes: dict[int, _Mailbox] = {}
        self._num_waiting = 0
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._tenants: dict[str, SetTenant] = {}
        self._next_id = 1

    # -- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Spawn the engine process; returns while it loads."""
        self._loop = asyncio.get_running_loop()
        await self._supervisor.start()

    async def wait_ready(self) -> EngineInfo:
        """Wait until the engine has loaded.

        Raises:
            ChatserveError: it never will; the error says why.
        """
        await self._supervisor.wait_ready()
        return self.info

    async def wait_failed(self) -> ChatserveError:
        """Wait until the engine is given up for good (it cannot load, or dies again and again); the reason."""
        return await self._supervisor.wait_failed()

    async def close(self) -> None:
        """Stop the engine process. Open streams end with reason ``error``. Idempotent."""
        await self._supervisor.close()

    @property
    def info(self) -> EngineInfo:
        """Facts of the engine that last became ready.

        Raises:
            EngineUnavailableError: none has yet.
        """
        if self._info is None:
            raise EngineUnavailableError("The model is still loading. Try again shortly.", retry_after=1.0)
        return self._info

    @property
    def ready(self) -> bool:
        """Whether `submit` is worth calling: loaded, alive and responsive."""
        return self._ready

    @property
    def restarts(self) -> int:
        """How often a dead or hanging engine was replaced."""
        return self._supervisor.restarts

    @property
    def failure(self) -> ChatserveError | None:
        """Why the engine was given up, if it was."""
        return self._supervisor.failure

    def on_ready_change(self, callback: Callable[[bool], None]) -> None:
        """Call ``callback(ready)`` on the event loop at every change. It must not block."""
        self._ready_callbacks.append(callback)

    def on_tenants(self, callback: Callable[[Sequence[TenantState]], None]) -> None:
        """Call ``callback(states)`` on the event loop with the tenants whose counters have changed, a few times per
        second and whenever the engine falls idle. Counters start again from zero with each engine. It must not block.
        """
        self._tenant_callbacks.append(callback)

    # -- requests -----------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests submitted that have neither started nor finished."""
        return self._num_waiting

    def submit(
        self,
        prompt: bytes,
        sampling: SamplingParams,
        *,
        scopes: tuple[Scope, ...],
        priority: int = 0,
        priority_class: int = 0,
        tenant: str = "",
        on_start: Callable[[], None] | None = None,
    ) -> EngineStream:
        """Enqueue one request whose parameters are valid and whose seed is set.

        Args:
            prompt: int32 token ids.
            tenant: who is served and charged.
            on_start: called on the loop when the engine admits it, whether or not anybody reads the stream.

        Raises:
            EngineUnavailableError: the engine is loading, restarting or gone; nothing was enqueued.
        """
        if not self._ready:
            raise EngineUnavailableError("The engine is not ready. Try again shortly.", retry_after=1.0)
        request_id = self._next_id
        self._next_id += 1
        self._supervisor.send(AddRequest(request_id, prompt, sampling, scopes, priority, priority_class, tenant))
        mailbox = _Mailbox(sampling.n, on_start)
        self._mailboxes[request_id] = mailbox
        self._num_waiting += 1
        return EngineStream(self, request_id, mailbox)

    def abort(self, request_id: int) -> None:
        """End a request here and in the engine. Nothing if it has ended."""
        mailbox = self._mailboxes.get(request_id)
        if mailbox is not None:
            self._supervisor.send(Abort((request_id,)))
            self._end(request_id, mailbox, "abort")

    def abort_from_any_thread(self, request_id: int) -> None:
        """`abort`, for the garbage collector, which may run on any thread and after the loop has closed."""
        with contextlib.suppress(RuntimeError):
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self.abort, request_id)

    def set_tenant(self, tenant: str, *, weight: float = 1.0, kv_floor: float = 0.0, kv_cap: float = 1.0) -> None:
        """Weight and KV shares of a tenant, from now on and in every engine that replaces this one."""
        self._tenants[tenant] = SetTenant(tenant, weight, kv_floor, kv_cap)
        if self._ready:
            self._supervisor.send(self._tenants[tenant])

    async def state(self) -> EngineState:
        """Ask the engine for its counters and for the pool's counts recomputed from their holders.

        Raises, like all calls:
            EngineUnavailableError: it is not ready, or died before it answered.
        """
        return await self._call(GetState, EngineState)

    async def publish(self, prompt: bytes, scopes: tuple[Scope, ...], *, withdraw: bool = False) -> PublishReply:
        """Compute a prefix into the last of ``scopes`` and pin it, or withdraw one."""
        return await self._call(lambda call_id: Publish(call_id, prompt, scopes, withdraw), PublishReply)

    async def purge(self, tenant: str) -> PurgeReply:
        """Forget and zero what a tenant has cached in its private scopes."""
        return await self._call(lambda call_id: Purge(call_id, tenant), PurgeReply)

    async def explain(self, prompt: bytes, scopes: tuple[Scope, ...]) -> ExplainReply:
        """What of a prompt a request that sees ``scopes`` would find."""
        return await self._call(lambda call_id: Explain(call_id, prompt, scopes), ExplainReply)

    async def _call(self, message: Callable[[int], ToEngine], kind: type[ReplyT]) -> ReplyT:
        if not self._ready:
            raise EngineUnavailableError("The engine is not ready. Try again shortly.", retry_after=1.0)
        call_id = self._next_id
        self._next_id += 1
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = answer
        self._supervisor.send(message(call_id))
        try:
            reply = await answer
        finally:
            self._calls.pop(call_id, None)
        if not isinstance(reply, kind):
            raise RuntimeError(f"the engine answered a call with {type(reply).__name__}")
        return reply

    # -- called by the supervisor -------------------------------------------------------------------------------

    @property
    def has_pending_work(self) -> bool:
        """Whether the engine owes an answer."""
        return bool(self._mailboxes or self._calls)

    def handle_ready(self, message: EngineReady) -> None:
        self._info = message.info
        for declared in self._tenants.values():
            self._supervisor.send(declared)

    def handle_frame(self, frame: StepFrame) -> None:
        """Hand one step's news to their streams, each stream's tokens before its end."""
        if frame.stats is not None:
            self.stats = frame.stats
            if frame.tenants:
                _tell(self._tenant_callbacks, frame.tenants)
        mailboxes = self._mailboxes
        touched: list[_Mailbox] = []  # more than once where a request has several pieces of news, which does no harm
        for started in frame.started:
            if (mailbox := mailboxes.get(started.request_id)) is not None:
                self._mark_started(mailbox)
                if mailbox.on_start is not None:
                    mailbox.on_start()
                mailbox.events.append(started)
                touched.append(mailbox)
        ids = memoryview(frame.request_ids).cast("q")
        choices = memoryview(frame.choices).cast("i")
        tokens = memoryview(frame.tokens).cast("i")
        logprobs = frame.logprobs or (None,) * len(tokens)
        for request_id, choice, token, logprob in zip(ids, choices, tokens, logprobs, strict=True):
            if (mailbox := mailboxes.get(request_id)) is not None:
                mailbox.events.append(Delta(choice, token, logprob))
                touched.append(mailbox)
        for finished in frame.finished:
            if (mailbox := mailboxes.get(finished.request_id)) is not None and finished.choice in mailbox.open_choices:
                mailbox.open_choices.remove(finished.choice)
                if not mailbox.open_choices:
                    del mailboxes[finished.request_id]
                    self._mark_started(mailbox)
                mailbox.events.append(finished)
                touched.append(mailbox)
        for mailbox in touched:
            mailbox.deliver()

    def handle_reply(self, reply: Reply) -> None:
        answer = self._calls.get(reply.call_id)
        if answer is not None and not answer.done():
            answer.set_result(reply)

    def set_ready(self, ready: bool) -> None:
        if ready != self._ready:
            self._ready = ready
            _tell(self._ready_callbacks, ready)

    def handle_lost(self) -> None:
        """The engine is gone: not ready, and every stream and call ends now."""
        self.set_ready(False)
        error = EngineUnavailableError("The engine process died and is being restarted. Try again.", retry_after=1.0)
        for request_id, mailbox in list(self._mailboxes.items()):
            self._end(request_id, mailbox, "error", error)
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(error)
        self.stats = EngineStats()

    # -- helpers ------------------------------------------------------------------------------------------------

    def _end(
        self, request_id: int, mailbox: _Mailbox, reason: FinishReason, error: ChatserveError | None = None
    ) -> None:
        del self._mailboxes[request_id]
        self._mark_started(mailbox)
        code, message = (error.code, error.message) if error is not None else (None, None)
        for choice in sorted(mailbox.open_choices):
            mailbox.events.append(Finished(request_id, choice, reason, error_code=code, error_message=message))
        mailbox.open_choices.clear()
        mailbox.deliver()

    def _mark_started(self, mailbox: _Mailbox) -> None:
        """It waits no longer, because it was admitted or because it is over."""
        if not mailbox.started:
            mailbox.started = True
            self._num_waiting -= 1


def _tell(callbacks: Sequence[Callable[[T], None]], news: T) -> None:
    for callback in callbacks:
        try:
            callback(news)
        except Exception:  # whoever watches must not be able to break what is watched
            logger.exception("a callback of the engine client failed")
