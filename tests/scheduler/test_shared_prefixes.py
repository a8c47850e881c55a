"""The runs of blocks that rows of a step share: exactly what their tables say, also when it is remembered."""

from __future__ import annotations

import random

import numpy as np
import pytest

from chatserve.sampling_params import SamplingParams
from chatserve.scheduler.output import NewSequence, SharedRuns
from chatserve.scheduler.shared_prefixes import SharedPrefixes
from tests.harness import Harness, numbers

BLOCK_SIZE = 4


def sequence(row: int, blocks: list[int]) -> NewSequence:
    return NewSequence(row, b"", 1, np.array(blocks, np.int32).tobytes(), SamplingParams(seed=0))


def groups(runs: SharedRuns | None) -> list[tuple[int, frozenset[int]]]:
    if runs is None:
        return []
    starts, members = np.frombuffer(runs.starts, np.int32), np.frombuffer(runs.members, np.int32)
    return [
        (blocks, frozenset(members[starts[i] : starts[i + 1]].tolist()))
        for i, blocks in enumerate(np.frombuffer(runs.blocks, np.int32).tolist())
    ]


def expected(tables: list[list[int]], computed: list[int]) -> set[tuple[int, frozenset[int]]]:
    """By definition: for every two rows, the longest common run of full blocks, and everybody who begins with it."""
    found = set()
    for i in range(len(tables)):
        for j in range(i):
            full = min(computed[i], computed[j]) // BLOCK_SIZE
            common = next((k for k in range(full) if tables[i][k] != tables[j][k]), full)
            if common:
                members = [
                    m
                    for m in range(len(tables))
                    if computed[m] // BLOCK_SIZE >= common and tables[m][:common] == tables[i][:common]
                ]
                found.add((common, frozenset(members)))
    return found


@pytest.mark.parametrize("seed", range(6))
def test_runs_are_what_the_tables_have_in_common(seed: int) -> None:
    """Rows come, go, grow, take over and copy blocks at random; after each change the runs are those that comparing
    every two tables gives, parents before children. Most steps change nothing and are answered from memory."""
    rng = random.Random(seed)
    prefixes, tables, computed = SharedPrefixes(12), {}, np.zeros(12, np.int32)
    fresh = iter(range(1000, 100000))
    shared = [[next(fresh) for _ in range(rng.randint(1, 90))] for _ in range(3)]
    for _ in range(250):
        changes = []
        row = rng.randrange(12)
        if row not in tables or rng.random() < 0.1:
            known = rng.choice([*shared, *(t[: rng.randint(0, len(t))] for t in tables.values())])
            known = known[: rng.randint(0, len(known))]
            tables[row] = [*known, *(next(fresh) for _ in range(rng.randint(1, 3)))]
            computed[row] = len(known) * BLOCK_SIZE + rng.randrange(BLOCK_SIZE)
            prefixes.place(sequence(row, tables[row]))
        elif rng.random() < 0.1:
            del tables[row]
        for row, table in tables.items():
            computed[row] += 1
            if computed[row] // BLOCK_SIZE == len(table):
                changes.append((row, len(table), next(fresh)))
            elif rng.random() < 0.02:
                changes.append((row, rng.randrange(len(table)), next(fresh)))
        for row, index, block in changes:
            tables[row][index:] = [block, *tables[row][index + 1 :]]
        if changes:
            prefixes.change([list(change) for change in changes])
        rows = np.array(sorted(tables), np.int32)
        if len(rows) < 2:
            continue
        found = groups(prefixes.runs(rows, computed[rows].tobytes(), BLOCK_SIZE))
        assert set(found) == expected([tables[r] for r in rows.tolist()], computed[rows].tolist())
        assert [blocks for blocks, _ in found] == sorted(blocks for blocks, _ in found)


def test_plans_carry_what_running_sequences_share() -> None:
    """Two conversations on one system prompt, one of them answered twice: all share the prompt's blocks, the fork
    shares its own on top; strangers share nothing. (The oracle checks every run of every plan in all other tests.)"""
    engine = Harness(num_blocks=64)
    system = numbers(0, 8 * engine.manager.block_size)
    engine.run(engine.submit(system, 1))
    engine.submit([*system, *numbers(900, 2 * engine.manager.block_size)], 6, n=2, temperature=1.0, seed=1)
    engine.submit([*system, 5], 9)
    engine.submit(numbers(500, 40), 9)
    seen = set()
    execute = engine.executor.execute

    def watch(plan):  # type: ignore[no-untyped-def]
        seen.update((blocks, len(members)) for blocks, members in groups(plan.shared_runs))
        return execute(plan)

    engine.executor.execute = watch  # type: ignore[method-assign]
    engine.run()
    assert (8, 3) in seen
    assert (10, 2) in seen
