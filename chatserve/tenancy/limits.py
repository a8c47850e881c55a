"""Limits of one tenant as arithmetic: may this be admitted now, and if not, what would help.

Pure and synchronous: time is an argument, nothing is awaited, and a refusal changes nothing, so a decision is atomic
on the event loop and can be compared with a brute-force model. Tokens are *reserved* at admission (their number is
not known yet) and *settled* to what was used. Does not know who asks; `tenancy.registry` keeps one `Account` per
tenant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from chatserve.tenancy.tenant import TenantLimits

MINUTE = 60.0
TRY_AGAIN_SECONDS = 1.0
"""What is suggested where it cannot be known: when somebody else's request will end."""

_ROUNDING = 1e-6
"""Of a unit: who waits exactly as long as was said gets in."""


class Refusal(msgspec.Struct, frozen=True):
    """Why a request is not admitted.

    Attributes:
        retry_after: seconds after which the same request may be admitted; ``None`` if waiting a little cannot help.
    """

    code: Literal["rate_limit_exceeded", "concurrency_limit", "insufficient_quota", "queue_full"]
    message: str
    retry_after: float | None


class MeterStatus(msgspec.Struct, frozen=True):
    """One limit per minute: its size, what is left now, and seconds until it is whole again."""

    limit: int
    remaining: int
    reset: float


class LimitStatus(msgspec.Struct, frozen=True):
    """What a client is told about its limits per minute; ``None`` where there is none."""

    requests: MeterStatus | None
    tokens: MeterStatus | None


class Meter:
    """A leaky bucket (the generic cell rate algorithm with amounts): use drains at ``limit`` per minute.

    Admits a burst of ``limit`` from rest and ``limit`` per minute in the long run. Amounts may be given back. When
    the limit is raised, what was used stays; when it is lowered, the time until all has drained stays.
    """

    __slots__ = ("_at", "_level", "_limit")

    def __init__(self) -> None:
        self._level = 0.0
        self._limit = 1
        self._at = float("-inf")

    def level(self, limit: int, now: float) -> float:
        """Use that has not drained yet. May exceed the limit after a settlement."""
        level = self._level * min(1.0, limit / self._limit)
        if now <= self._at or not level:
            return level
        return max(0.0, level - (now - self._at) * limit / MINUTE)

    def wait(self, limit: int, amount: float, now: float) -> float:
        """Seconds until ``amount`` more fits; 0 if it does now."""
        excess = self.level(limit, now) + amount - limit
        return excess * MINUTE / limit if excess > _ROUNDING else 0.0

    def add(self, limit: int, amount: float, now: float) -> None:
        """Note use, whether it fits or not; a negative amount gives some back, never more than was used."""
        self._level = max(0.0, self.level(limit, now) + amount)
        self._limit = limit
        self._at = max(self._at, now)

    def status(self, limit: int, now: float) -> MeterStatus:
        """For the response's headers."""
        level = self.level(limit, now)
        return MeterStatus(limit, max(0, int(limit - level + _ROUNDING)), level * MINUTE / limit)


class Account:
    """What one tenant is using.

    Attributes:
        num_open: requests admitted and not settled.
        num_waiting: of these, those that have not started.
        reserved: tokens reserved by open requests.
    """

    def __init__(self) -> None:
        self.num_open = 0
        self.num_waiting = 0
        self.reserved = 0
        self._requests = Meter()
        self._tokens = Meter()
        self._day = ""
        self._day_tokens = 0

    def set_day_tokens(self, day: str, tokens: int) -> None:
        """Start from what was used on ``day`` before this account existed."""
        self._day, self._day_tokens = day, tokens

    def decide(self, limits: TenantLimits, costs: Sequence[int], now: float, day: str) -> Refusal | None:
        """Whether requests that may use ``costs`` tokens each can all be admitted; changes nothing.

        Args:
            now: monotonic seconds.
            day: the UTC day, ``YYYY-MM-DD``.
        """
        count, tokens = len(costs), sum(costs)
        return (
            self._decide_concurrency(limits, count)
            or self._decide_requests(limits, count, now)
            or self._decide_tokens(limits, tokens, now)
            or self._decide_day(limits, tokens, day)
        )

    def admit(self, limits: TenantLimits, costs: Sequence[int], now: float, day: str) -> Refusal | None:
        """`decide`, and if the answer is yes reserve everything. Every admitted request must be settled once."""
        refusal = self.decide(limits, costs, now, day)
        if refusal is None:
            self.num_open += len(costs)
            self.num_waiting += len(costs)
            self.reserved += sum(costs)
            if limits.requests_per_minute is not None:
                self._requests.add(limits.requests_per_minute, len(costs), now)
            if limits.tokens_per_minute is not None:
                self._tokens.add(limits.tokens_per_minute, sum(costs), now)
        return refusal

    def count_request(self, limits: TenantLimits, now: float) -> Refusal | None:
        """Count a request that generates nothing, and so is over at once, if the limit per minute lets it in."""
        refusal = self._decide_requests(limits, 1, now)
        if refusal is None and limits.requests_per_minute is not None:
            self._requests.add(limits.requests_per_minute, 1, now)
        return refusal

    def start(self) -> None:
        """One admitted request has left the queue."""
        self.num_waiting -= 1

    def settle(self, limits: TenantLimits, cost: int, used: int, now: float, day: str, *, started: bool) -> None:
        """One admitted request is over: ``cost`` was reserved, ``used`` tokens it is.

        Args:
            started: whether `start` was called for it.
        """
        self.num_open -= 1
        self.num_waiting -= not started
        self.reserved -= cost
        if limits.tokens_per_minute is not None:
            self._tokens.add(limits.tokens_per_minute, used - cost, now)
        self._day_tokens = self._tokens_of(day) + used
        self._day = day

    def status(self, limits: TenantLimits, now: float) -> LimitStatus:
        """What is left per minute."""
        requests, tokens = limits.requests_per_minute, limits.tokens_per_minute
        return LimitStatus(
            None if requests is None else self._requests.status(requests, now),
            None if tokens is None else self._tokens.status(tokens, now),
        )

    def _tokens_of(self, day: str) -> int:
        return self._day_tokens if day == self._day else 0

    def _decide_concurrency(self, limits: TenantLimits, count: int) -> Refusal | None:
        return _too_many(
            *("concurrency_limit", limits.max_concurrent, self.num_open, count),
            "{busy} requests of this tenant are open, and {limit} may be at once. ",
        ) or _too_many(
            *("queue_full", limits.max_queued, self.num_waiting, count),
            "{busy} requests of this tenant are waiting, and {limit} may at once. ",
        )

    def _decide_requests(self, limits: TenantLimits, count: int, now: float) -> Refusal | None:
        return _too_fast(
            *(self._requests, limits.requests_per_minute, count, now),
            "The limit of {limit} requests per minute of this tenant is reached. ",
            "Try again in {wait:.1f} seconds.",
        )

    def _decide_tokens(self, limits: TenantLimits, tokens: int, now: float) -> Refusal | None:
        return _too_fast(
            *(self._tokens, limits.tokens_per_minute, tokens, now),
            "The request may use {amount} tokens, prompt and output, and this tenant has {limit} per minute. ",
            "Try again in {wait:.1f} seconds, or lower max_tokens.",
        )

    def _decide_day(self, limits: TenantLimits, tokens: int, day: str) -> Refusal | None:
        limit = limits.tokens_per_day
        used = self._tokens_of(day)
        if limit is None or used + self.reserved + tokens <= limit:
            return None
        if used + tokens <= limit:
            return Refusal(
                "rate_limit_exceeded",
                f"Of this tenant's {limit} tokens per day {used} are used and {self.reserved} reserved by open "
                f"requests; this one may use {tokens}. {_WAIT}",
                TRY_AGAIN_SECONDS,
            )
        return Refusal(
            "insufficient_quota",
            f"Of this tenant's {limit} tokens per day {used} are used; this request may use {tokens}. "
            "The next day begins at midnight UTC. Lower max_tokens, or ask the operator for a higher limit.",
            None,
        )


def _too_many(
    code: Literal["concurrency_limit", "queue_full"], limit: int | None, busy: int, count: int, words: str
) -> Refusal | None:
    """Refuse what is more at once than ``limit``, in ``words`` with its numbers."""
    if limit is None or busy + count <= limit:
        return None
    possible = count <= limit
    return Refusal(
        code,
        words.format(busy=busy, limit=limit) + (_WAIT if possible else _SMALLER),
        TRY_AGAIN_SECONDS if possible else None,
    )


def _too_fast(meter: Meter, limit: int | None, amount: int, now: float, words: str, advice: str) -> Refusal | None:
    """Refuse what is more than ``limit`` per minute, in ``words`` with its numbers; ``advice`` if waiting helps."""
    wait = 0.0 if limit is None else meter.wait(limit, amount, now)
    if limit is None or not wait:
        return None
    possible = amount <= limit
    return Refusal(
        "rate_limit_exceeded",
        words.format(limit=limit, amount=amount) + (advice.format(wait=wait) if possible else _SMALLER),
        wait if possible else None,
    )


_WAIT = "Try again when one of them has ended."
_SMALLER = "This request alone is over the limit: make it smaller."
