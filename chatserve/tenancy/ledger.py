"""Counts what tenants use: at once in memory, and in batches in the store.

Every number is booked exactly once, at the end of what it measures, so the sums are exact whenever nothing runs.
A crash of the process loses what was booked since the last flush. Knows rows of numbers, no requests;
`tenancy.registry` owns one and flushes it, `chatserve.server` books.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from chatserve.tenancy.store import TenantStore
from chatserve.tenancy.usage import Usage, UsageRow, day_of

MAX_LABELS = 20
OTHER = "other"


class Ledger:
    """The sums of one server.

    Args:
        clock: Unix time; decides the day on which something is booked.
    """

    def __init__(self, store: TenantStore, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._pending: dict[tuple[str, str], Usage] = {}
        self._labels: dict[str, Usage] = {}
        self._flushing = asyncio.Lock()
        self._before_flush: list[Callable[[], None]] = []

    def book(self, tenant: str, usage: Usage) -> None:
        """Add to the sums of a tenant, today. Nothing is kept of nothing."""
        if usage == Usage():
            return
        self._pending.setdefault((tenant, day_of(self._clock())), Usage()).add(usage)
        label = tenant if tenant in self._labels or len(self._labels) < MAX_LABELS else OTHER
        self._labels.setdefault(label, Usage()).add(usage)

    def on_flush(self, listener: Callable[[], None]) -> None:
        """Call ``listener()`` before pending sums are written or read: the moment to book what grows with time."""
        self._before_flush.append(listener)

    def totals(self) -> Mapping[str, Usage]:
        """Sums since the start by metric label; each only grows.

        The first tenants with traffic get labels of their own, all others share one: a label that changed hands
        would let a counter fall.
        """
        return self._labels

    async def flush(self) -> None:
        """Write what is pending; on failure it stays pending and the error is raised."""
        for listener in self._before_flush:
            listener()
        async with self._flushing:
            taken, self._pending = self._pending, {}
            if not taken:
                return
            rows = [UsageRow(tenant, day, usage) for (tenant, day), usage in taken.items()]
            try:
                await asyncio.to_thread(self._store.add_usage, rows)
            except Exception:
                for key, usage in taken.items():
                    self._pending.setdefault(key, Usage()).add(usage)
                raise

    async def usage(self, *, tenant: str | None = None, first_day: str = "", last_day: str = "9999") -> list[UsageRow]:
        """Sums by day and tenant, everything booked so far included."""
        await self.flush()

        def read() -> list[UsageRow]:
            return self._store.usage(tenant=tenant, first_day=first_day, last_day=last_day)

        return await asyncio.to_thread(read)
