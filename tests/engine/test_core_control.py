"""Publishing, purging and explaining, on the engine core over the oracle model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import numpy as np

from chatserve.cache.node import Node
from chatserve.engine.protocol import Explain, ExplainReply, Publish, PublishReply, Purge, PurgeReply
from chatserve.engine.scope_ids import SALTED_KEPT
from chatserve.scheduler.invariants import check_scheduler
from chatserve.scope import Scope
from tests.harness import Harness, numbers

PUBLIC, GROUP = Scope("public"), Scope("group", "g")
ONE = (PUBLIC, Scope("tenant", "one"))
TWO = (PUBLIC, Scope("tenant", "two"))
MEMBER = (PUBLIC, GROUP, Scope("tenant", "member"))

R = TypeVar("R", PublishReply, PurgeReply, ExplainReply)


def reply(engine: Harness, kind: type[R]) -> R:
    """The next reply, after the steps it takes."""
    for _ in range(200):
        if engine.core.replies:
            answer = engine.core.replies.pop(0)
            assert isinstance(answer, kind)
            return answer
        engine.step()
    raise AssertionError("no reply")


def publish(
    engine: Harness, tokens: list[int], scopes: tuple[Scope, ...] = (PUBLIC,), withdraw: bool = False
) -> PublishReply:
    engine.core.publish(Publish(1, np.array(tokens, np.int32).tobytes(), scopes, withdraw))
    return reply(engine, PublishReply)


def explain(engine: Harness, tokens: list[int], scopes: tuple[Scope, ...]) -> ExplainReply:
    engine.core.explain(Explain(2, np.array(tokens, np.int32).tobytes(), scopes))
    return reply(engine, ExplainReply)


def test_a_published_prefix_is_computed_once_for_everyone() -> None:
    """64 tenants with 8 tokens of their own under 41 published ones: the 41 are computed and stored once."""
    engine = Harness(num_blocks=400, max_num_seqs=16)
    system = numbers(0, 41)
    assert publish(engine, system).num_blocks == 11
    computed, resident = engine.executor.num_tokens, engine.pool.num_blocks - engine.pool.num_free
    streams = [
        engine.submit([*system, *numbers(100 + 9 * i, 8)], 2, scopes=(PUBLIC, Scope("tenant", str(i))), tenant=str(i))
        for i in range(64)
    ]
    engine.run()
    for stream in streams:
        engine.expect(stream)
        assert stream.cached == 41
    assert engine.executor.num_tokens - computed == 64 * (8 + 1)
    # Each tenant keeps the block in which its own tokens begin, and the next: never the ten shared ones.
    assert engine.pool.num_blocks - engine.pool.num_free - resident <= 64 * 3


def test_pinned_blocks_survive_any_pressure_and_never_wedge_the_pool() -> None:
    """The largest request that fits beside the pins is served; one block more is refused at once."""
    engine = Harness(num_blocks=40)
    system = numbers(0, 40)
    assert publish(engine, system).error_code is None
    limit = 30 * 4 + 1
    assert engine.core.scheduler.max_total_tokens() == limit
    engine.ask(numbers(200, limit - 5), 5)
    refused = engine.submit(numbers(200, limit - 4), 5)
    engine.step()
    assert refused.errors == ["context_length_exceeded"]
    assert engine.ask([*system, 1, 2], 2, scopes=ONE).cached == 40


def test_a_publication_beyond_the_budget_is_refused_with_numbers() -> None:
    """A quarter of the pool; what is running keeps the room it was promised."""
    engine = Harness(num_blocks=40)
    answer = publish(engine, numbers(0, 44))
    assert answer.error_code == "invalid_value"
    assert "11 blocks" in (answer.error_message or "")
    running = engine.submit(numbers(300, 30), 36 * 4 + 1 - 30)
    engine.step()
    assert publish(engine, numbers(0, 20)).error_code == "invalid_value"
    engine.run(running)
    engine.expect(running)


def test_a_group_prefix_is_invisible_outside_the_group() -> None:
    """Members hit, others do not; both on the device and when explained."""
    engine = Harness()
    system = numbers(0, 24)
    publish(engine, system, (PUBLIC, GROUP))
    assert engine.ask([*system, 1], 2, scopes=MEMBER).cached == 24
    assert engine.ask([*system, 1], 2, scopes=ONE).cached == 0
    assert explain(engine, [*system, 5, 6], TWO).miss == "never_seen"


def test_withdrawing_ends_the_pin_and_a_second_time_says_so() -> None:
    """The blocks are ordinary cache afterwards."""
    engine = Harness(num_blocks=40)
    system = numbers(0, 40)
    publish(engine, system)
    assert publish(engine, system).num_blocks == 10
    assert publish(engine, system, withdraw=True).error_code is None
    assert engine.pool.num_held == 0
    assert publish(engine, system, withdraw=True).error_code == "not_found"
    engine.ask(numbers(200, 150), 5)
    cached = engine.ask([*system, 1], 2, scopes=ONE).cached
    assert cached is not None
    assert cached < 40


def test_purge_forgets_and_zeroes_one_tenant_on_both_tiers() -> None:
    """The purged tenant starts cold, its content is nowhere in memory, others keep theirs."""
    engine = Harness(num_blocks=12, num_host_blocks=40)
    mine, theirs = (Scope("tenant", "one"),), (Scope("tenant", "two"),)
    prompt = numbers(0, 30)
    engine.ask(prompt, 3, scopes=mine)
    engine.ask(prompt, 3, scopes=theirs)
    [owner] = engine.core.scopes.known(mine)
    assert (engine.executor.host_owner == owner).any()
    engine.core.purge(Purge(3, "one"))
    gone = reply(engine, PurgeReply)
    assert gone.device_blocks + gone.host_blocks == 8
    while engine.core.has_work:
        engine.step()
    assert not (engine.executor.owner == owner).any()
    assert not (engine.executor.host_owner == owner).any()
    assert engine.ask(prompt, 3, scopes=theirs).cached == 29
    assert engine.ask(prompt, 3, scopes=mine).cached == 0


def test_what_runs_during_a_purge_leaves_nothing_behind() -> None:
    """It goes on undisturbed, and its blocks are zeroed when it ends."""
    engine = Harness()
    mine = (Scope("tenant", "one"),)
    stream = engine.submit(numbers(0, 30), 12, scopes=mine)
    for _ in range(4):
        engine.step()
    engine.core.purge(Purge(3, "one"))
    engine.run(stream)
    engine.expect(stream)
    while engine.core.has_work:
        engine.step()
    assert not (engine.executor.owner == engine.core.scopes.known(mine)[0]).any()
    assert engine.ask(numbers(0, 30), 3, scopes=mine).cached == 0


def salted(tenant: str, salt: object) -> tuple[Scope, ...]:
    return (PUBLIC, Scope("tenant", tenant, salt=str(salt)))


def test_a_salt_for_every_request_costs_bounded_memory() -> None:
    """Clients choose salts; scopes that nothing is cached in and nobody uses are forgotten, the others are not."""
    engine = Harness(num_blocks=24, num_host_blocks=8)
    for salt in range(6 * SALTED_KEPT):
        engine.submit([5, salt % 999, salt // 999], 1, scopes=salted("one", salt), tenant="one")
        if salt % 16 == 15:
            # Straight through: checking every invariant after every one of so many steps would take minutes.
            while len(engine.core.scheduler.waiting) > 4:
                engine.core.step()
            assert len(engine.core.scopes) <= 2 * SALTED_KEPT + 3
    while engine.core.has_work:
        engine.core.step()
    check_scheduler(engine.core.scheduler)
    assert len(engine.manager.tree.owner_of_scope) == len(engine.core.scopes)
    for salt in (6 * SALTED_KEPT - 1, 0, 6 * SALTED_KEPT - 1):
        stream = engine.ask([5, salt % 999, salt // 999, 8], 2, scopes=salted("one", salt), tenant="one")
        assert bool(stream.cached) == (salt > 0)


def test_a_purge_reaches_every_salt_and_running_sequences_too() -> None:
    """One that is running while its scope is purged, or while others are forgotten, leaves nothing behind."""
    engine = Harness(num_blocks=200, max_num_seqs=4)
    running = engine.submit(numbers(0, 30), 60, scopes=salted("one", "x"), tenant="one")
    for _ in range(4):
        engine.step()
    for salt in range(SALTED_KEPT + 2):
        engine.core.scopes.numbers(salted("one", salt))
    engine.ask(numbers(300, 20), 2, scopes=salted("one", 3), tenant="one")
    engine.core.purge(Purge(3, "one"))
    assert reply(engine, PurgeReply).device_blocks > 0
    engine.run(running)
    engine.expect(running)
    assert engine.ask(numbers(0, 30), 2, scopes=salted("one", "x"), tenant="one").cached == 0
    assert engine.ask(numbers(300, 20), 2, scopes=salted("one", 3), tenant="one").cached == 0


def test_a_purge_costs_nothing_of_what_others_have_cached() -> None:
    """However often a tenant asks for it: the tree is not walked, neither for its scopes nor for its salts."""
    engine = Harness(num_blocks=400)
    for i in range(20):
        engine.ask(numbers(i * 30, 25), 1, scopes=salted("other", i))
    for i in range(8):
        engine.ask(numbers(i * 30, 25), 1, scopes=salted("one", i))
    tree = engine.manager.tree
    looked_at = 0
    below = tree._nodes_below

    def count(node: Node) -> Iterator[Node]:
        nonlocal looked_at
        found = list(below(node))
        looked_at += len(found)
        return iter(found)

    tree._nodes_below = count  # type: ignore[method-assign]
    engine.core.purge(Purge(3, "one"))
    own, looked_at = looked_at, 0
    engine.core.purge(Purge(4, "one"))
    tree._nodes_below = below  # type: ignore[method-assign]
    assert 0 < own <= 8 * 2 * 3  # a run and its tail, once to count their blocks and once to cut them
    assert looked_at == 0
    assert engine.ask(numbers(0, 25), 1, scopes=salted("other", 0)).cached == 24


def test_explanations() -> None:
    """Never seen, differs, complete, evicted; host tokens are told apart; strangers' caches do not count."""
    engine = Harness(num_blocks=12, num_host_blocks=12)
    mine = (Scope("tenant", "one"),)
    prompt = numbers(0, 30)
    assert explain(engine, prompt, mine).miss == "never_seen"
    engine.ask(prompt, 3, scopes=mine)
    assert explain(engine, prompt, mine).miss == "complete"
    assert explain(engine, prompt, (Scope("tenant", "two"),)).miss == "never_seen"
    other = [*prompt[:18], *numbers(400, 12)]
    answer = explain(engine, other, mine)
    assert (answer.miss, answer.device_tokens) == ("differs", 18)
    engine.ask(numbers(200, 40), 3, scopes=mine)
    answer = explain(engine, prompt, mine)
    assert answer.host_tokens > 0
    assert answer.device_tokens + answer.host_tokens == 29
    for i in range(4):
        engine.ask(numbers(300 + 45 * i, 40), 3, scopes=mine)
    answer = explain(engine, prompt, mine)
    assert answer.miss == "evicted"
    assert answer.steps_ago is not None
    assert answer.steps_ago > 0
