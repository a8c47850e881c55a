"""Preemption by swapping: nothing lost, nothing wedged, nobody's business seen, on the oracle model."""

from __future__ import annotations

import pytest

from chatserve.scope import Scope
from tests.harness import Harness, numbers

MINE, THEIRS = (Scope("tenant", "one"),), (Scope("tenant", "two"),)


@pytest.mark.parametrize("after", range(1, 22))
def test_swapped_out_at_every_step_nothing_is_lost(after: int) -> None:
    """Tokens, log-probabilities and reason of an undisturbed run, resumed without recomputing (vllm#16832)."""
    engine = Harness(num_blocks=16, num_host_blocks=64, max_num_batched_tokens=8)
    quiet = Harness(num_blocks=16, max_num_batched_tokens=8)
    options = {"seed": 3, "temperature": 1.0, "logprobs": 0}
    stream = engine.submit(numbers(0, 19), 20, **options)  # type: ignore[arg-type]
    undisturbed = quiet.ask(numbers(0, 19), 20, **options)
    for _ in range(after):
        engine.step()
    engine.preempt(stream)
    # Somebody else takes the whole pool meanwhile: what was computed moves to the host.
    filler = engine.submit(numbers(400, 55), 9, priority_class=-1)
    engine.run(filler)
    before = engine.executor.num_tokens
    engine.run(stream)
    engine.expect(stream)
    assert stream.logprobs == undisturbed.logprobs
    assert stream.reasons == undisturbed.reasons
    known = 19 + len(stream.tokens[0])
    computed = min(19, 8 * after) + max(0, after - 3)
    assert engine.executor.num_tokens - before <= known - computed


def test_two_halves_do_not_hold_each_other_up() -> None:
    """Two swapped requests that each need 60 % of the pool come back together: one after the other (vllm#45388)."""
    engine = Harness(num_blocks=20, num_host_blocks=60)
    pair = [engine.submit(numbers(start, 30), 18) for start in (0, 400)]
    for _ in range(6):
        engine.step()
    for stream in pair:
        engine.preempt(stream)
    engine.ask(numbers(200, 70), 8, priority_class=-1)
    engine.run()
    for stream in pair:
        engine.expect(stream)


@pytest.mark.parametrize("host_blocks", [0, 1, 3])
def test_a_tiny_or_absent_host_tier_falls_back_to_recomputing(host_blocks: int) -> None:
    """Swap exhaustion stops nobody (vllm#546)."""
    engine = Harness(num_blocks=14, num_host_blocks=host_blocks)
    streams = [engine.submit(numbers(i * 90, 12), 25) for i in range(5)]
    engine.run()
    for stream in streams:
        engine.expect(stream)
    assert engine.core.stats().preemptions > 0


def test_groups_of_choices_leave_no_host_block_behind() -> None:
    """64 requests of 4 choices with little swap: all done, and the host holds only cache (vllm#5578)."""
    engine = Harness(num_blocks=30, num_host_blocks=12, max_num_seqs=12)
    groups = [engine.submit(numbers(i * 7, 6 + i % 5), 7, n=4, seed=i, temperature=1.0) for i in range(64)]
    engine.run(limit=20_000)
    for group in groups:
        engine.expect(group)
    pool = engine.manager.host_pool
    assert pool.num_held == 0
    assert pool.num_free + pool.num_idle == 12


def test_swapping_beats_recomputing_in_computed_tokens() -> None:
    """The same overload with and without a host tier: the host tier saves what preemption would recompute."""

    def computed(host_blocks: int) -> int:
        engine = Harness(num_blocks=40, num_host_blocks=host_blocks, max_num_seqs=16)
        for i in range(12):
            engine.submit(numbers(i * 60, 24), 40)
        engine.run(limit=20_000)
        for stream in engine.streams.values():
            engine.expect(stream)
        assert engine.core.stats().preemptions > 0
        return engine.executor.num_tokens

    needed = 12 * (24 + 39)
    assert computed(400) <= needed + 12 * 4
    assert computed(0) > needed + 200


def test_a_tenant_hits_its_own_swapped_prefix_and_nobody_elses() -> None:
    """Asserted in pairs on the host tier (sglang#26747, LMCache#4825)."""
    engine = Harness(num_blocks=16, num_host_blocks=64)
    prompt = numbers(0, 33)
    engine.ask(prompt, 3, scopes=MINE)
    engine.ask(numbers(300, 58), 3, scopes=THEIRS)
    assert engine.core.stats().demotions > 0
    assert engine.ask(prompt, 3, scopes=THEIRS).cached == 0
    assert engine.ask(prompt, 3, scopes=MINE).cached == 32
    assert engine.core.stats().promotions > 0


def test_idle_conversations_survive_on_the_host() -> None:
    """Ten conversations that do not fit the device together: every next turn finds its whole past."""
    engine = Harness(num_blocks=24, num_host_blocks=200)
    pasts = [numbers(i * 70, 40) for i in range(10)]
    for turn in range(3):
        for i, past in enumerate(pasts):
            stream = engine.ask(past, 4, scopes=(Scope("tenant", str(i)),))
            if turn:
                assert stream.cached == len(past) - 3
            pasts[i] = [*past, *stream.tokens[0], 5, 6]


def test_a_never_and_an_exact_fit_with_a_full_host() -> None:
    """The host tier does not change what can ever fit, and an exact fit is served beside a full one."""
    engine = Harness(num_blocks=10, num_host_blocks=10)
    for i in range(6):
        engine.ask(numbers(i * 50, 30), 4)
    never = engine.submit(numbers(0, 30), 12)
    engine.step()
    assert never.errors == ["context_length_exceeded"]
    engine.ask(numbers(0, 30), 11)
