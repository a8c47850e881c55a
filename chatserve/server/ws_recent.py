"""What the hub remembers of the recent past: what each send led to, and which generations have ended.

Bounded for each tenant alone, so that nobody's flood makes another's resend start a second answer. Knows tenants and
ids, nothing of answers. `ws_hub` is its caller.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

IDEMPOTENCY_SECONDS = 600.0
MAX_REMEMBERED = 4096
"""Sends remembered at most, and ended generations, of each tenant."""

T = TypeVar("T")


class Recent(Generic[T]):
    """Sends with their futures, for ten minutes, and ended generations, by tenant.

    Args:
        clock: seconds of a steady clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sends: OrderedDict[str, OrderedDict[str, tuple[float, asyncio.Future[T]]]] = OrderedDict()
        # by tenant, the one that sent last at the end; then by command, the latest at the end
        self._ended: dict[str, OrderedDict[str, None]] = {}

    def find_send(self, tenant: str, command: str) -> asyncio.Future[T] | None:
        """What became, or is becoming, of a send; ``None`` if it was not seen lately."""
        self._expire(tenant)
        known = self._sends.get(tenant, OrderedDict()).get(command)
        return None if known is None else known[1]

    def add_send(self, tenant: str, command: str) -> asyncio.Future[T]:
        """Remember a new send; the caller sets the result."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        sends = self._sends.setdefault(tenant, OrderedDict())
        sends[command] = self._clock(), future
        self._sends.move_to_end(tenant)
        self._ended.setdefault(tenant, OrderedDict())
        while len(sends) > MAX_REMEMBERED and next(iter(sends.values()))[1].done():
            sends.popitem(last=False)
        return future

    def drop_send(self, tenant: str, command: str) -> None:
        """Forget a send that was refused."""
        self._sends.get(tenant, OrderedDict()).pop(command, None)

    def add_ended(self, tenant: str, gen: str) -> None:
        """Remember that a generation has ended, unless its tenant was forgotten meanwhile."""
        ended = self._ended.get(tenant)
        if ended is not None:
            ended[gen] = None
            if len(ended) > MAX_REMEMBERED:
                ended.popitem(last=False)

    def has_ended(self, tenant: str, gen: str) -> bool:
        """Whether this is a generation of this tenant that has ended, as far as is remembered."""
        return gen in self._ended.get(tenant, ())

    def forget(self, tenant: str) -> None:
        """Forget everything of a tenant, which was deleted."""
        self._sends.pop(tenant, None)
        self._ended.pop(tenant, None)

    def _expire(self, tenant: str) -> None:
        """Let go of what is too old: this tenant's sends, and tenants that sent nothing since."""
        since = self._clock() - IDEMPOTENCY_SECONDS
        sends = self._sends.get(tenant, OrderedDict())
        while sends and next(iter(sends.values()))[0] < since:
            sends.popitem(last=False)
        while self._sends:
            idle, sends = next(iter(self._sends.items()))
            if sends and next(reversed(sends.values()))[0] >= since:
                return
            del self._sends[idle]
