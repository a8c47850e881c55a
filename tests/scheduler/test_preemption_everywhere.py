"""Preemption at every step of a mixed batch, on both tiers: nobody can tell that it happened.

Complements the tests of one stream in `test_scheduling` and `test_two_tiers`: here victims run beside others, share
prefixes and fork, and stop at tokens of their own.
"""

from __future__ import annotations

import pytest

from chatserve.scope import Scope
from tests.harness import Harness, Stream, numbers

SYSTEM = numbers(0, 13)
ONE, TWO = (Scope("tenant", "one"),), (Scope("tenant", "two"),)
NUM_STREAMS = 5


def small(num_host_blocks: int) -> Harness:
    """Room for the batch when nobody else is there."""
    return Harness(num_blocks=56, num_host_blocks=num_host_blocks, max_num_batched_tokens=12)


def submit_batch(engine: Harness) -> list[Stream]:
    """Greedy, sampled, forked, one that stops at a token, and a stranger with the same prompt."""
    shared = [*SYSTEM, 1, 2]
    free = Harness().ask([*SYSTEM, 9], 14).tokens[0]
    return [
        engine.submit([*SYSTEM, 3], 16, scopes=ONE, logprobs=0),
        engine.submit(shared, 11, scopes=ONE, seed=5, temperature=1.0, logprobs=0),
        engine.submit([*SYSTEM, 4, 5, 6], 9, scopes=ONE, n=3, seed=8, temperature=1.0, logprobs=0),
        engine.submit([*SYSTEM, 9], 14, scopes=ONE, stop_token_ids=(free[8],), logprobs=0),
        engine.submit(shared, 11, scopes=TWO, seed=5, temperature=1.0, logprobs=0, tenant="two"),
    ]


def outcome(stream: Stream) -> tuple[list[list[int]], list[list[float]], list[str | None]]:
    return stream.tokens, stream.logprobs, stream.reasons


def undisturbed() -> tuple[list[tuple[list[list[int]], list[list[float]], list[str | None]]], int]:
    """What everybody is told when nothing happens, and in how many steps."""
    engine = small(0)
    streams = submit_batch(engine)
    steps = engine.run()
    assert engine.core.stats().preemptions == 0
    assert streams[3].reasons == ["stop"]
    return [outcome(stream) for stream in streams], steps


WANTED, STEPS = undisturbed()


def take_the_pool(engine: Harness) -> None:
    """Somebody else, first in line, needs nearly all of the device."""
    engine.run(engine.submit(numbers(400, 190), 4, scopes=(Scope("tenant", "big"),), priority_class=-1, tenant="big"))


@pytest.mark.parametrize("num_host_blocks", [0, 3, 300], ids=["recompute", "some swap", "swap"])
def test_at_every_step_one_or_all(num_host_blocks: int) -> None:
    """After k steps, for every k, each stream alone in turn or all of them lose their slots, and every other time
    their device blocks too: tokens, log-probabilities, their order and finish reasons stay those of a quiet run.
    """
    preemptions = promotions = 0
    for after in range(1, STEPS + 1):
        engine = small(num_host_blocks)
        streams = submit_batch(engine)
        for _ in range(after):
            engine.step()
        for victim in streams if after % 3 == 0 else [streams[after % NUM_STREAMS]]:
            engine.preempt(victim)
        if after % 2:
            take_the_pool(engine)
        engine.run()
        assert [outcome(stream) for stream in streams] == WANTED, f"after {after} steps"
        assert engine.pool.num_held == engine.manager.host_pool.num_held == 0
        preemptions += engine.core.stats().preemptions
        promotions += engine.core.stats().promotions
    assert preemptions > STEPS
    assert bool(promotions) == bool(num_host_blocks)


@pytest.mark.parametrize("every", [1, 2, 3, 5])
@pytest.mark.parametrize("num_host_blocks", [0, 300], ids=["recompute", "swap"])
def test_again_and_again(every: int, num_host_blocks: int) -> None:
    """Whoever runs is sent back every so many steps, down to each: still the same, and it still comes to an end."""
    engine = small(num_host_blocks)
    streams = submit_batch(engine)
    for step in range(40 * STEPS):
        if all(stream.done for stream in streams):
            break
        engine.step()
        if step % every == every - 1:
            for stream in streams:
                engine.preempt(stream)
        if step % 17 == 16:
            take_the_pool(engine)
    assert [outcome(stream) for stream in streams] == WANTED
    assert engine.core.stats().preemptions > STEPS // every
