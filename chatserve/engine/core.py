"""One engine step: schedule, execute, update.

A synchronous state machine without clock, I/O or asyncio, so that a million random operations run in minutes and
every failure replays from its seed. It turns protocol messages into scheduler calls and the scheduler's news into
one `StepFrame`. `engine.process` drives it in production, tests and benchmarks drive it directly.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator

import msgspec
import numpy as np

from chatserve.cache.explain import explain_match
from chatserve.cache.kv_cache_manager import KVCacheManager, xxh3_hash
from chatserve.config import EngineConfig
from chatserve.engine.protocol import (
    AddRequest,
    EngineInfo,
    EngineState,
    EngineStats,
    Explain,
    ExplainReply,
    Publish,
    Purge,
    PurgeReply,
    Reply,
    SetTenant,
    StepFrame,
)
from chatserve.engine.publications import Publications
from chatserve.engine.scope_ids import ScopeIds
from chatserve.engine.tenant_report import TenantReport
from chatserve.errors import ChatserveError
from chatserve.scheduler.fairness import OPERATOR
from chatserve.scheduler.output import Executor, Finished, StepNews
from chatserve.scheduler.request import Request
from chatserve.scheduler.scheduler import Scheduler
from chatserve.scope import Scope


class EngineCore:
    """Owns the scheduler and the executor of one engine."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        info: EngineInfo,
        *,
        hash_block: Callable[[bytes], int] | None = None,
    ) -> None:
        """Args:
        info: what the executor reported: pool size, model limits, end tokens.
        hash_block: index function of the prefix tree; by default xxh3 with a seed of this process.
        """
        self.manager = KVCacheManager(
            info.num_blocks,
            info.block_size,
            hash_block or xxh3_hash(secrets.randbits(64)),
            num_host_blocks=info.num_host_blocks,
        )
        self.scheduler = Scheduler(
            config.scheduler,
            self.manager,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            eos_token_ids=info.eos_token_ids,
            prefill_tokens_per_second=info.prefill_tokens_per_second,
        )
        self._executor = executor
        self.scopes = ScopeIds(self.manager, self._owner_of, self._scopes_in_use)
        self.publications = Publications(self.scheduler, self.manager)
        self.replies: list[Reply] = []
        self.tenant_report = TenantReport(self.scheduler.tenants, self.manager.tree)
        self._refused: list[Finished] = []
        self._num_steps = 0

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to run or to report."""
        scheduler = self.scheduler
        waiting = len(scheduler.requests) or scheduler.requests.has_news or self._refused
        return bool(waiting or self.manager.must_clear)

    def add(self, message: AddRequest) -> None:
        """Accept a request; one that can never be served is answered with its terminal event in the next frame."""
        request = Request(
            message.request_id,
            message.prompt,
            message.sampling,
            self.scopes.numbers(message.scopes),
            tenant=self.scheduler.tenants.index(message.tenant),
            priority=message.priority,
            priority_class=message.priority_class,
        )
        try:
            self.scheduler.add(request)
        except ChatserveError as error:
            self._refused += (
                Finished(message.request_id, choice, "error", None, error.code, error.message)
                for choice in range(message.sampling.n)
            )

    def _owner_of(self, scope: Scope) -> int:
        """Whom a scope's blocks are charged to: its tenant, or the operator if several may see it."""
        return self.scheduler.tenants.index(scope.owner) if scope.kind == "tenant" else OPERATOR

    def _scopes_in_use(self) -> Iterator[int]:
        for request in self.scheduler.requests:
            yield from request.scopes

    def set_tenant(self, message: SetTenant) -> None:
        """Weight and shares of a tenant, from now on."""
        tenant = self.scheduler.tenants.index(message.tenant)
        self.scheduler.tenants.set_weight(tenant, message.weight)
        self.manager.shares.set(tenant, weight=message.weight, floor=message.kv_floor, cap=message.kv_cap)

    def publish(self, message: Publish) -> None:
        """Compute and pin a prefix, or withdraw one; the reply comes with a later step."""
        scopes = self.scopes.numbers(message.scopes)
        reply = self.publications.begin(message, scopes)
        if reply is not None:
            self.replies.append(reply)

    def purge(self, message: Purge) -> None:
        """Forget a tenant's cache, between two steps; the next one zeroes the memory."""
        counts = [self.manager.purge(number) for number in self.scopes.of_tenant(message.tenant)]
        device, host = (sum(count[tier] for count in counts) for tier in (0, 1))
        self.replies.append(PurgeReply(message.call_id, device, host))

    def explain(self, message: Explain) -> None:
        """Say what a prompt would find. Scopes nobody has used are empty, and are not interned for it."""
        known = self.scopes.known(message.scopes)
        device, host, miss, steps_ago = explain_match(self.manager, message.prompt, known, self.scheduler.step)
        self.replies.append(ExplainReply(message.call_id, len(message.prompt) // 4, device, host, miss, steps_ago))

    def abort(self, request_ids: tuple[int, ...]) -> None:
        """End requests between two steps."""
        for request_id in request_ids:
            self.scheduler.abort(request_id)

    def step(self, announce: Callable[[StepFrame], None] | None = None) -> StepFrame:
        """Run one step. Raises only what the executor raises when it is unusable as a whole.

        Args:
            announce: is told before the step runs which requests have just started, where some have; without it the
                step's own frame says so. A long prefill would else count as time in the queue.
        """
        plan = self.scheduler.schedule()
        if plan is None:
            news = self.scheduler.requests.tell(StepNews())
        else:
            if announce is not None:
                started = tuple(each for each in self.scheduler.requests.take_started() if each.request_id >= 0)
                if started:
                    announce(StepFrame(step=self.scheduler.step, started=started))
            news = self.scheduler.update(self._executor.execute(plan))
            self._num_steps += 1
        return self._frame(news)

    def _frame(self, news: StepNews) -> StepFrame:
        finished = news.finished
        if self.publications.pending:
            news = self._without_publications(news)
            finished = news.finished
        if self._refused:
            finished += tuple(self._refused)
            self._refused.clear()
        return StepFrame(
            step=self.scheduler.step,
            request_ids=news.request_ids,
            choices=news.choices,
            tokens=news.tokens,
            logprobs=news.logprobs,
            started=news.started,
            finished=finished,
        )

    def _without_publications(self, news: StepNews) -> StepNews:
        """Take out what concerns the operator's own requests, whose ids are negative."""
        for end in news.finished:
            self.replies += self.publications.end(end)
        ids = np.frombuffer(news.request_ids, np.int64)
        keep = np.flatnonzero(ids >= 0)
        return StepNews(
            request_ids=ids[keep].tobytes(),
            choices=np.frombuffer(news.choices, np.int32)[keep].tobytes(),
            tokens=np.frombuffer(news.tokens, np.int32)[keep].tobytes(),
            logprobs=None if news.logprobs is None else tuple(news.logprobs[i] for i in keep.tolist()),
            started=tuple(each for each in news.started if each.request_id >= 0),
            finished=tuple(each for each in news.finished if each.request_id >= 0),
        )

    def stats(self) -> EngineStats:
        """Gauges and counters now; the caller, who has a clock, adds ``busy_seconds``."""
        scheduler, manager, counters = self.scheduler, self.manager, self.scheduler.counters
        return EngineStats(
            num_running=len(scheduler.batch),
            num_waiting=len(scheduler.waiting),
            blocks_total=manager.pool.num_blocks,
            blocks_free=manager.pool.num_free,
            blocks_cached=manager.pool.num_idle,
            blocks_held=manager.pool.num_held,
            blocks_leaked=0 if len(scheduler.requests) else manager.pool.num_held - manager.num_pinned,
            steps=self._num_steps,
            preemptions=counters.preemptions,
            copies=manager.num_copies,
            evictions=manager.evictor.num_evictions,
            demotions=manager.evictor.num_demotions,
            promotions=manager.num_promotions,
            host_drops=manager.evictor.num_host_drops,
            host_blocks_total=manager.host_pool.num_blocks,
            host_blocks_free=manager.host_pool.num_free,
            partial_hits=manager.num_partial_hits,
            aborts=counters.aborts,
            prefix_query_tokens=counters.prefix_query_tokens,
            prefix_hit_tokens=counters.prefix_hit_tokens,
            prompt_tokens=counters.prompt_tokens,
            computed_tokens=counters.computed_tokens,
            computed_prompt_tokens=counters.computed_prompt_tokens,
            generation_tokens=counters.generation_tokens,
        )

    def state(self, call_id: int, busy_seconds: float = 0.0) -> EngineState:
        """The counters beside the pool's counts recomputed from its reference counts."""
        held, cached = self.manager.pool.recount()
        return EngineState(
            call_id=call_id,
            stats=msgspec.structs.replace(self.stats(), busy_seconds=busy_seconds),
            recounted_held=held,
            recounted_cached=cached,
            live_requests=len(self.scheduler.requests),
            tenants=self.tenant_report.states(),
        )
