"""Longest prefix first where memory is tight: hits are used before they are lost, and nobody cold starves."""

from __future__ import annotations

from chatserve.scope import Scope
from tests.harness import Harness, Stream, numbers

SCOPES = (Scope("tenant", "t"),)


def submit(engine: Harness, prompt: list[int], tenant: str = "t") -> Stream:
    return engine.submit(prompt, 2, scopes=(Scope("tenant", tenant),), tenant=tenant)


def test_a_cached_prefix_goes_before_the_cold_prompt_that_would_evict_it() -> None:
    """In order of arrival the cold one would take the cached blocks, and both would be computed."""
    engine = Harness(num_blocks=30, max_num_seqs=1)
    shared = numbers(7, 80)
    engine.ask([*shared, 1, 2], 2, scopes=SCOPES, tenant="t")
    cold = submit(engine, numbers(3000, 100))
    hot = submit(engine, [*shared, 3, 4])
    engine.run()
    assert hot.cached >= 80
    assert hot.started_step < cold.started_step
    engine.expect(cold)
    engine.expect(hot)


def test_order_of_arrival_holds_while_there_is_room() -> None:
    """Reordering costs somebody a wait; where nothing is lost it does not happen."""
    engine = Harness(num_blocks=200, max_num_seqs=1)
    shared = numbers(7, 80)
    engine.ask([*shared, 1, 2], 2, scopes=SCOPES, tenant="t")
    cold = submit(engine, numbers(3000, 100))
    hot = submit(engine, [*shared, 3, 4])
    engine.run()
    assert cold.started_step < hot.started_step


def test_a_cold_request_is_passed_a_bounded_number_of_times() -> None:
    """Hits that never end do not hold a cold request of their own tenant back for ever."""
    engine = Harness(num_blocks=30, max_num_seqs=1, max_overtakes=3)
    shared = numbers(7, 80)
    engine.ask([*shared, 1, 2], 2, scopes=SCOPES, tenant="t")
    cold = submit(engine, numbers(3000, 100))
    hot = [submit(engine, [*shared, 10 + i]) for i in range(12)]
    engine.run()
    assert sum(stream.started_step < cold.started_step for stream in hot) == 3


def test_hits_of_a_tenant_that_is_ahead_do_not_go_before_a_cold_tenant() -> None:
    """Fairness comes first: the slack is all that a prefix is worth."""
    engine = Harness(num_blocks=30, max_num_seqs=1)
    shared = numbers(7, 80)
    first = submit(engine, [*shared, 1, 2], "ahead")
    ahead = [submit(engine, [*shared, 10 + i], "ahead") for i in range(3)]
    engine.step()
    tenants = engine.core.scheduler.tenants
    cold = submit(engine, numbers(3000, 100), "cold")
    tenants.charge_computed(tenants.index("ahead"), 1000)
    engine.run()
    assert first.done
    assert all(cold.started_step < stream.started_step for stream in ahead)
