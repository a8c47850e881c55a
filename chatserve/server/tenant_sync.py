"""Keeps the engine and the tenants' registry of one mind, and has everybody forget a tenant that was deleted.

Towards the engine go weights and shares of the KV pool, and a purge when a tenant is deleted; from it come the tokens
and blocks it counted, which are booked in the ledger. The engine's counts are the truth: they include what was
sampled for a client that had just left, and what ran again after a preemption. An engine that is killed takes with
it what it had not reported yet, a quarter of a second at most. `chatserve.server.run` makes one per
server; it works through callbacks alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence

from chatserve.engine.client import EngineClient
from chatserve.engine.protocol import TenantState
from chatserve.errors import EngineUnavailableError
from chatserve.tenancy.registry import TenantRegistry
from chatserve.tenancy.usage import Usage
from chatserve.text.answer_memory import AnswerMemory

OPERATOR = "_operator"
"""In the books: whoever publishes prefixes to several tenants. No tenant can have this name."""

_DEFAULTS = (1.0, 0.0, 1.0)


class TenantSync:
    """The link between one `EngineClient` and one `TenantRegistry`; deleted tenants leave ``answers`` too."""

    def __init__(
        self,
        engine: EngineClient,
        tenants: TenantRegistry,
        answers: AnswerMemory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._answers = answers
        self._tenants = tenants
        self._clock = clock
        self._declared: dict[str, tuple[float, float, float]] = {}
        self._names: set[str] = set()
        self._counted: dict[str, tuple[TenantState, float]] = {}  # of the engine that runs now, booked until when
        self._restarts = engine.restarts
        self._away = False
        self._forgetters: list[Callable[[str], Coroutine[None, None, None]]] = [self._purge]
        self._forgetting: set[asyncio.Task[None]] = set()
        engine.on_tenants(self._book)
        engine.on_ready_change(self._ready_changed)
        tenants.on_change(self._declare)
        tenants.ledger.on_flush(self._book_blocks)
        self._declare()

    def on_deleted(self, forget: Callable[[str], Coroutine[None, None, None]]) -> None:
        """Run ``forget(tenant)`` on the loop for every tenant that is deleted from now on."""
        self._forgetters.append(forget)

    def _declare(self) -> None:
        """Tell the engine what differs from what it was told, and have everybody forget tenants that are gone."""
        names = set[str]()
        for tenant in self._tenants.tenants():
            names.add(tenant.name)
            weight, floor, cap = settings = (tenant.weight, tenant.limits.kv_floor, tenant.limits.kv_cap)
            if self._declared.get(tenant.name, _DEFAULTS) != settings:
                self._engine.set_tenant(tenant.name, weight=weight, kv_floor=floor, kv_cap=cap)
                self._declared[tenant.name] = settings
        for name in self._names - names:
            self._engine.set_tenant(name)
            self._declared.pop(name, None)
            self._answers.forget(name)
            for forget in self._forgetters:
                task = asyncio.create_task(forget(name))
                self._forgetting.add(task)
                task.add_done_callback(self._forgetting.discard)
        self._names = names

    async def _purge(self, name: str) -> None:
        with contextlib.suppress(EngineUnavailableError):  # a new engine remembers nothing
            await self._engine.purge(name)

    def _book(self, states: Sequence[TenantState]) -> None:
        """Book what was counted since the last report."""
        now = self._clock()
        for state in states:
            before, since = self._counted.get(state.tenant, (TenantState(state.tenant, 0, 0, 0, 0, 0, 0, 0.0), now))
            self._counted[state.tenant] = state, now
            self._tenants.ledger.book(
                state.tenant or OPERATOR,
                Usage(
                    prompt_tokens=state.prompt_tokens - before.prompt_tokens,
                    cached_tokens=state.cached_tokens - before.cached_tokens,
                    computed_tokens=state.computed_tokens - before.computed_tokens,
                    generated_tokens=state.generated_tokens - before.generated_tokens,
                    device_block_seconds=before.device_blocks * (now - since),
                    host_block_seconds=before.host_blocks * (now - since),
                ),
            )

    def _book_blocks(self) -> None:
        """Book the blocks that everybody held until now: time passes without news."""
        if not self._away:
            self._book([state for state, _ in self._counted.values()])

    def _ready_changed(self, ready: bool) -> None:
        """An engine that is gone holds nothing, and the next one counts from zero; one that was only slow goes on."""
        if not ready:
            self._book_blocks()
        elif self._engine.restarts != self._restarts:
            self._restarts = self._engine.restarts
            self._counted.clear()
        self._away = not ready
