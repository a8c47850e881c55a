"""A quiet tenant beside every kind of adversary: what it waits, in steps, and what stays of its cache."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from chatserve.scheduler.fairness import OUTPUT_COST, QUANTUM_TOKENS
from chatserve.scope import Scope
from tests.harness import Harness, numbers

SLOTS = 8
EVIL = (Scope("tenant", "evil"),)
QUIET = (Scope("tenant", "quiet"),)

Attack = Callable[[Harness, int], object]


def flood(engine: Harness, i: int) -> None:
    engine.submit(numbers(i * 7, 20), 20, scopes=EVIL, tenant="evil", seed=i)


def long_prompts(engine: Harness, i: int) -> None:
    engine.submit(numbers(i * 7, 400), 4, scopes=EVIL, tenant="evil", seed=i)


def long_outputs(engine: Harness, i: int) -> None:
    engine.submit(numbers(i * 7, 8), 1200, scopes=EVIL, tenant="evil", seed=i)


def all_hits(engine: Harness, i: int) -> None:
    engine.submit(numbers(0, 200), 20, scopes=EVIL, tenant="evil", seed=i)


def many_salts(engine: Harness, i: int) -> None:
    """As many scopes as requests: the engine's view of a client that tries to be many."""
    engine.submit(numbers(0, 60), 20, scopes=(Scope("tenant", "evil", salt=str(i)),), tenant="evil", seed=i)


def sixteen_choices(engine: Harness, i: int) -> None:
    engine.submit(numbers(i * 7, 20), 20, n=16, temperature=1.0, scopes=EVIL, tenant="evil", seed=i)


def sixteen_long_choices(engine: Harness, i: int) -> None:
    engine.submit(numbers(i * 7, 20), 300, n=16, temperature=1.0, scopes=EVIL, tenant="evil", seed=i)


def best_priority(engine: Harness, i: int) -> None:
    engine.submit(numbers(i * 7, 20), 20, priority=-1000, scopes=EVIL, tenant="evil", seed=i)


ADVERSARIES: list[tuple[Attack, int]] = [
    (flood, 20),
    (long_prompts, 4),
    (long_outputs, 1200),
    (all_hits, 20),
    (many_salts, 20),
    (sixteen_choices, 20),
    (sixteen_long_choices, 300),
    (best_priority, 20),
]
"""With the output tokens after which a slot of theirs is free by itself."""


@pytest.mark.parametrize(("attack", "output"), ADVERSARIES, ids=[attack.__name__ for attack, _ in ADVERSARIES])
def test_a_quiet_tenant_waits_for_a_slot_and_for_nothing_else(attack: Attack, output: int) -> None:
    """Beside a backlog of sixty requests its own begins as soon as a slot is free, and one becomes free when an output
    of the adversary ends or its tenant is a quantum ahead, whichever is first. Then it is served in every step, and
    the next turn finds all of the last one.
    """
    engine = Harness(
        num_blocks=400, num_host_blocks=200, max_num_seqs=SLOTS, max_model_len=1600, max_num_batched_tokens=256
    )
    quantum_steps = QUANTUM_TOKENS / (OUTPUT_COST * SLOTS)
    # A step to notice, one to be placed, and the prefill of what fills the slot before it in the queue.
    bound = min(output, quantum_steps) + 8
    num_attacks = 0
    past: list[int] = []
    waits = []
    for turn in range(8):
        for _ in range(25):
            while len(engine.core.scheduler.requests) < 60:
                attack(engine, num_attacks)
                num_attacks += 1
            engine.step()
        past += numbers(300 + turn * 31, 30 if turn == 0 else 9)
        now = engine.core.scheduler.step
        stream = engine.submit(past, 6, scopes=QUIET, tenant="quiet")
        engine.run(stream, limit=500)
        engine.expect(stream)
        assert stream.first_step is not None
        waits.append(stream.first_step - now)
        assert engine.core.scheduler.step - stream.first_step == 5, "it was served in every step"
        assert stream.cached == (0 if turn == 0 else len(past) - 10)
        past += stream.tokens[0]
    assert max(waits) <= bound, waits
    assert len(engine.core.scheduler.waiting) > 20, "the adversary was not backlogged"
    print(f"{attack.__name__}: first token after {waits} steps, bound {bound:.0f}")
