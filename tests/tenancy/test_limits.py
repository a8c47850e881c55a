"""Limits decide as a brute-force model does, at once or not at all, and say truly when to come back."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatserve.tenancy.limits import Account, Meter, Refusal
from chatserve.tenancy.tenant import TenantLimits

DAY = "2026-01-01"

steps = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 130), st.integers(0, 100)), max_size=60)


class Bucket:
    """The textbook token bucket in exact arithmetic, refilled second by second."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.content = Fraction(limit)
        self.now = 0

    def advance(self, now: int) -> None:
        for _ in range(now - self.now):
            self.content = min(Fraction(self.limit), self.content + Fraction(self.limit, 60))
        self.now = now


@given(st.integers(1, 120), steps)
@settings(max_examples=300, deadline=None)
def test_meter_is_a_token_bucket(limit: int, script: list[tuple[int, int, int]]) -> None:
    """Over any history of spending and giving back, a meter has exactly the room the textbook bucket has."""
    meter, bucket, now = Meter(), Bucket(limit), 0
    for pause, amount, back in script:
        now += pause
        bucket.advance(now)
        fits = amount <= bucket.content
        wait = meter.wait(limit, amount, float(now))
        assert (wait == 0.0) == fits
        assert meter.status(limit, float(now)).remaining == int(bucket.content)
        if fits:
            meter.add(limit, amount, float(now))
            bucket.content -= amount
            refund = amount * back // 100
            meter.add(limit, -refund, float(now))
            bucket.content = min(Fraction(limit), bucket.content + refund)
        elif amount <= limit:
            assert abs(wait - float((amount - bucket.content) * 60 / limit)) < 1e-6


class Model:
    """What an account should say, from the whole history, looked through each time."""

    def __init__(self, limits: TenantLimits) -> None:
        self.limits = limits
        self.requests: list[tuple[int, int]] = []
        self.tokens: list[tuple[int, int]] = []
        self.open: dict[int, tuple[int, bool]] = {}
        self.days: dict[str, int] = {}

    @staticmethod
    def level(history: list[tuple[int, int]], limit: int, now: int) -> Fraction:
        level, at = Fraction(0), 0
        for when, amount in history:
            level = max(Fraction(0), level - Fraction((when - at) * limit, 60))
            level, at = max(Fraction(0), level + amount), when
        return max(Fraction(0), level - Fraction((now - at) * limit, 60))

    def refusal(self, costs: list[int], now: int, day: str) -> tuple[str, bool] | None:
        """Code of the first limit that refuses, and whether waiting can help."""
        limits, count, total = self.limits, len(costs), sum(costs)
        if limits.max_concurrent is not None and len(self.open) + count > limits.max_concurrent:
            return "concurrency_limit", count <= limits.max_concurrent
        waiting = sum(not started for _, started in self.open.values())
        if limits.max_queued is not None and waiting + count > limits.max_queued:
            return "queue_full", count <= limits.max_queued
        rpm, tpm, tpd = limits.requests_per_minute, limits.tokens_per_minute, limits.tokens_per_day
        if rpm is not None and self.level(self.requests, rpm, now) + count > rpm:
            return "rate_limit_exceeded", count <= rpm
        if tpm is not None and self.level(self.tokens, tpm, now) + total > tpm:
            return "rate_limit_exceeded", total <= tpm
        if tpd is not None:
            used, reserved = self.days.get(day, 0), sum(cost for cost, _ in self.open.values())
            if used + total > tpd:
                return "insufficient_quota", False
            if used + reserved + total > tpd:
                return "rate_limit_exceeded", True
        return None


maybe = st.one_of(st.none(), st.integers(1, 60))
some_limits = st.builds(
    TenantLimits,
    max_concurrent=maybe,
    requests_per_minute=maybe,
    tokens_per_minute=st.one_of(st.none(), st.integers(1, 600)),
    tokens_per_day=st.one_of(st.none(), st.integers(1, 2000)),
    max_queued=maybe,
)
actions = st.lists(
    st.tuples(
        st.sampled_from(["admit", "admit", "count", "start", "settle"]),
        st.integers(0, 30),
        st.lists(st.integers(1, 200), min_size=1, max_size=3),
        st.integers(0, 10**6),
    ),
    max_size=80,
)


@given(some_limits, actions)
@settings(max_examples=300, deadline=None)
def test_account_decides_as_the_model(limits: TenantLimits, script: list[tuple[str, int, list[int], int]]) -> None:
    """Every decision, over any interleaving of admissions, counted requests, starts and settlements and over
    midnight, is the model's; a refusal changes nothing, and suggests a wait exactly where waiting can help.
    """
    account, model, now, number = Account(), Model(limits), 0, 0
    for action, pause, costs, choice in script:
        now += pause
        day = f"day {now // 300}"
        if action == "admit":
            expected = model.refusal(costs, now, day)
            before = (account.num_open, account.num_waiting, account.reserved, account.status(limits, now))
            refusal = account.admit(limits, costs, float(now), day)
            told = None if refusal is None else (refusal.code, refusal.retry_after is not None)
            assert told == expected
            if refusal is None:
                for cost in costs:
                    model.open[number] = (cost, False)
                    number += 1
                model.requests.append((now, len(costs)))
                model.tokens.append((now, sum(costs)))
            else:
                assert before == (account.num_open, account.num_waiting, account.reserved, account.status(limits, now))
        elif action == "count":
            rpm = limits.requests_per_minute
            fits = rpm is None or model.level(model.requests, rpm, now) + 1 <= rpm
            assert (account.count_request(limits, float(now)) is None) == fits
            if fits:
                model.requests.append((now, 1))
        elif model.open:
            key = sorted(model.open)[choice % len(model.open)]
            cost, started = model.open[key]
            if action == "start" and not started:
                account.start()
                model.open[key] = (cost, True)
            elif action == "settle":
                used = choice % (2 * cost)
                account.settle(limits, cost, used, float(now), day, started=started)
                del model.open[key]
                model.tokens.append((now, used - cost))
                model.days[day] = model.days.get(day, 0) + used
        assert account.num_open == len(model.open)
        assert account.num_waiting == sum(not started for _, started in model.open.values())
        assert account.reserved == sum(cost for cost, _ in model.open.values())


def refused(refusal: Refusal | None) -> Refusal:
    assert refusal is not None
    return refusal


@pytest.mark.parametrize("limit", [1, 7, 60, 600, 999_983])
def test_who_waits_as_long_as_told_gets_in(limit: int) -> None:
    """No rounding sends a client away twice: at exactly now + retry_after the request is admitted."""
    limits = TenantLimits(requests_per_minute=limit)
    account, now = Account(), 1234.567
    while (refusal := account.admit(limits, [1], now, DAY)) is None:
        pass
    for _ in range(50):
        assert refusal is not None
        assert refusal.retry_after is not None
        now += refusal.retry_after
        assert account.admit(limits, [1], now, DAY) is None
        refusal = account.admit(limits, [1], now, DAY)


def test_long_run_rate_is_the_limit() -> None:
    """A client that always asks gets its burst and then the limit, not a request more."""
    limits, account, admitted = TenantLimits(requests_per_minute=30), Account(), 0
    for tick in range(6000):  # ten minutes in tenths of a second
        admitted += account.admit(limits, [1], tick / 10, DAY) is None
    assert admitted == 30 + 30 * 10 - 1


def test_reserved_tokens_come_back() -> None:
    """What was reserved and not used is free again at once, for the minute and for the day."""
    limits = TenantLimits(tokens_per_minute=1000, tokens_per_day=1500)
    account = Account()
    assert account.admit(limits, [900], 0.0, DAY) is None
    assert refused(account.admit(limits, [200], 0.0, DAY)).code == "rate_limit_exceeded"
    account.settle(limits, 900, 100, 0.0, DAY, started=False)
    assert account.admit(limits, [900], 0.0, DAY) is None
    account.settle(limits, 900, 900, 0.0, DAY, started=False)
    assert refused(account.decide(limits, [600], 3600.0, DAY)) == Refusal(
        "insufficient_quota", refused(account.decide(limits, [600], 3600.0, DAY)).message, None
    )
    assert account.decide(limits, [600], 3600.0, "2026-01-02") is None


def test_a_clock_that_goes_back_gives_nothing_away() -> None:
    """Neither a free refill nor a lockout."""
    meter = Meter()
    meter.add(60, 60, 100.0)
    assert meter.wait(60, 1, 50.0) == pytest.approx(1.0)
    assert meter.wait(60, 1, 101.0) == 0.0


def test_a_lowered_limit_locks_nobody_out() -> None:
    """Who has used a large limit waits a minute for a small one, not until the use of the large one has drained."""
    meter = Meter()
    meter.add(6000, 6000, 0.0)
    assert meter.wait(6, 1, 0.0) == pytest.approx(10.0)
    meter.add(6, 0, 0.0)
    assert meter.wait(6, 1, 10.0) == 0.0


def test_a_raised_limit_counts_at_once() -> None:
    """An operator who lifts a limit helps a tenant that is waiting for it."""
    account = Account()
    assert account.admit(TenantLimits(requests_per_minute=1), [1], 0.0, DAY) is None
    assert account.decide(TenantLimits(requests_per_minute=1), [1], 1.0, DAY) is not None
    assert account.decide(TenantLimits(requests_per_minute=10), [1], 1.0, DAY) is None
    assert account.decide(TenantLimits(), [1], 1.0, DAY) is None
