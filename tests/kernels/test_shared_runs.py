"""Parts of the past that sequences share are attended to once for all of them, and nobody can tell from the result."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from chatserve_kernels.cpu.backend import NativeBackend
from chatserve_kernels.cpu.build import supported_isas
from chatserve_kernels.interface import SharedRuns
from chatserve_kernels.reference import ReferenceBackend

from tests.kernels.batches import Batch, from_words, in_words, make_batch
from tests.kernels.native import library


@pytest.fixture(params=supported_isas())
def backend(request: pytest.FixtureRequest) -> Iterator[NativeBackend]:
    """With every run that is named used, however short."""
    lib = library(request.param)
    before, lib.share_threshold = lib.share_threshold, 0
    yield NativeBackend(lib)
    lib.share_threshold = before


def share(batch: Batch, groups: list[tuple[int, list[int]]], order: random.Random | None = None) -> Batch:
    """Let every group's sequences begin with the same blocks, those of its first; groups come as runs do."""
    tables = batch.metadata.block_tables.clone()
    for count, members in groups:
        tables[members, :count] = tables[members[0], :count]
    if order is not None:
        groups = [(count, order.sample(members, len(members))) for count, members in groups]
    runs = SharedRuns(
        np.array([count for count, _ in groups], np.int32).tobytes(),
        np.array([0, *(len(members) for _, members in groups)], np.int32).cumsum(dtype=np.int32).tobytes(),
        np.array([m for _, members in groups for m in members], np.int32).tobytes(),
    )
    return dataclasses.replace(
        batch, metadata=dataclasses.replace(batch.metadata, block_tables=tables, shared_runs=runs)
    )


def random_groups(rng: random.Random, full_blocks: list[int]) -> list[tuple[int, list[int]]]:
    """A random forest over sequences: (blocks in common, members), parents first."""
    groups: list[tuple[int, list[int]]] = []

    def divide(members: list[int], begin: int) -> None:
        limit = min((full_blocks[m] for m in members), default=0)
        if len(members) < 2 or limit <= begin:
            return
        end = rng.randint(begin + 1, limit)
        groups.append((end, members))
        cut = rng.randint(0, len(members))
        for part in (members[:cut], members[cut:]):
            if len(part) < len(members) and rng.random() < 0.7:
                divide(part, end)

    indices = list(range(len(full_blocks)))
    rng.shuffle(indices)
    cut = rng.randint(0, len(indices))
    for part in (indices[:cut], indices[cut:]):
        if part:
            divide(part, 0)
    return groups


def check(backend: NativeBackend, batch: Batch, window: int | None = None) -> None:
    cache = in_words(batch.kv_cache)
    step = backend.begin_step(batch.metadata, cache)
    step.write(1, batch.key_value)
    out = step.attend(1, batch.query.float(), 0.2, window)
    expected = ReferenceBackend().begin_step(batch.metadata, from_words(cache))
    wanted = expected.attend(1, batch.query.float(), 0.2, window)
    torch.testing.assert_close(out, wanted, rtol=2e-2, atol=3e-2)
    assert float((out - wanted).norm() / wanted.norm()) < 5e-3


@pytest.mark.parametrize("group", [1, 3, 4])
def test_any_tree_of_shared_runs_gives_the_reference(backend: NativeBackend, group: int) -> None:
    """Groups of any size, nested or side by side, of decodes and of chunks: only rounding differs. With a window the
    runs are not used, and the result is right all the same."""
    rng = random.Random(group)
    for case in range(12):
        block_size = rng.choice([4, 16, 32])
        shapes = []
        for _ in range(rng.randint(2, 9)):
            past, query_len = rng.randint(0, 12 * block_size), rng.choice([1, 1, 1, rng.randint(1, 50)])
            shapes.append((query_len, past + query_len))
        batch = make_batch(
            shapes,
            block_size=block_size,
            kv_heads=2,
            group=group,
            head_dim=rng.choice([32, 48, 64]),
            dtype=torch.bfloat16,
            seed=case,
        )
        groups = random_groups(rng, [(seq_len - query_len) // block_size for query_len, seq_len in shapes])
        check(backend, share(batch, groups, rng), rng.choice([None, None, None, 20]))


def test_many_decodes_on_a_long_prefix(backend: NativeBackend) -> None:
    """More rows than one task takes, and a run that several threads share."""
    batch = make_batch(
        [(1, 700 + i) for i in range(40)], block_size=16, kv_heads=1, group=3, head_dim=64, dtype=torch.bfloat16
    )
    check(backend, share(batch, [(40, list(range(40)))]))


def test_runs_are_a_hint(backend: NativeBackend) -> None:
    """A run that says more than is computed, or that continues two different ones, is left alone, not believed."""
    shapes = [(1, 70), (1, 70), (20, 80), (1, 90)]
    batch = make_batch(shapes, block_size=16, kv_heads=1, group=3, head_dim=64, dtype=torch.bfloat16)
    check(backend, share(batch, [(4, [0, 1, 2, 3])]))  # row 2 has computed three blocks only
    check(backend, share(batch, [(2, [0, 1]), (3, [0, 1, 3])]))


def test_a_poisoned_member_leaves_the_others_bit_equal(backend: NativeBackend) -> None:
    """NaN in one sequence's own part changes no bit of those that share its beginning."""
    shapes = [(1, 100), (1, 120), (3, 90)]
    batch = make_batch(shapes, block_size=16, kv_heads=1, group=3, head_dim=64, dtype=torch.bfloat16)
    batch = share(batch, [(4, [0, 1, 2])])
    outs = []
    for poison in (False, True):
        cache = batch.kv_cache.clone()
        if poison:
            cache[batch.metadata.block_tables[1, 5]] = torch.nan
        step = backend.begin_step(batch.metadata, cache)
        step.write(0, batch.key_value)
        outs.append(step.attend(0, batch.query, 0.25, None))
    assert torch.equal(outs[0][[0, 2, 3, 4]], outs[1][[0, 2, 3, 4]])
    assert outs[1][1].isnan().all()
