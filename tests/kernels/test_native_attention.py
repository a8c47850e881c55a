"""Native attention over bfloat16 caches against the plain reference, on every instruction set of this CPU."""

from __future__ import annotations

import random

import pytest
import torch
from chatserve_kernels.cpu.backend import NativeBackend
from chatserve_kernels.cpu.build import supported_isas
from chatserve_kernels.reference import ReferenceBackend

from tests.kernels.batches import Batch, from_words, in_words, make_batch
from tests.kernels.native import library


@pytest.fixture(params=supported_isas())
def backend(request: pytest.FixtureRequest) -> NativeBackend:
    return NativeBackend(library(request.param))


def attend(backend: NativeBackend, batch: Batch, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernels' attention, and the reference's: float32 inside and out, over the cache as the kernels wrote it."""
    cache = in_words(batch.kv_cache)
    step = backend.begin_step(batch.metadata, cache)
    step.write(1, batch.key_value)
    out = step.attend(1, batch.query.float(), 0.2, window)
    reference = ReferenceBackend().begin_step(batch.metadata, from_words(cache))
    return out, reference.attend(1, batch.query.float(), 0.2, window)


def assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Queries and softmax weights may be rounded to bfloat16: half a percent over all, a little more here and there."""
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=3e-2)
    assert float((out - expected).norm() / expected.norm()) < 5e-3


def random_shapes(rng: random.Random, block_size: int) -> list[tuple[int, int]]:
    shapes = []
    for _ in range(rng.randint(1, 6)):
        seq_len = max(1, rng.choice([1, 2, 3, 5, 20]) * block_size + rng.choice([-1, 0, 1, rng.randint(0, 40)]))
        shapes.append((min(200, rng.choice([1, 1, seq_len, rng.randint(1, seq_len)])), seq_len))
    return shapes


@pytest.mark.parametrize("group", [1, 3, 4, 7])
def test_attention_equals_the_reference(backend: NativeBackend, group: int) -> None:
    """Any mix of decodes and chunks, block and head size, heads per key and window: only rounding differs."""
    rng = random.Random(group)
    for case in range(12):
        batch = make_batch(
            random_shapes(rng, block_size := rng.choice([4, 16, 32])),
            block_size=block_size,
            kv_heads=2,
            group=group,
            head_dim=rng.choice([32, 48, 64, 128]),
            dtype=torch.bfloat16,
            seed=case,
        )
        assert_close(*attend(backend, batch, window=rng.choice([None, None, 1, 7, 16])))


def test_a_long_past_is_split_and_merged(backend: NativeBackend) -> None:
    """One sequence on two threads: its past is attended to in parts, and the parts weigh what they should even where
    their scores differ wildly."""
    batch = make_batch([(1, 3000)], block_size=16, kv_heads=1, group=3, head_dim=64, dtype=torch.bfloat16)
    batch.kv_cache[batch.metadata.block_tables[0, 100:110], 1, 0] *= 12.0
    assert_close(*attend(backend, batch, None))


@pytest.mark.parametrize("isa", supported_isas())
@pytest.mark.parametrize("threads", [1, 3, 12])
def test_any_number_of_threads_shares_the_work(isa: str, threads: int) -> None:
    """Heads and pasts are split as there are threads for them, for one sequence and for several of very different
    lengths."""
    backend = NativeBackend(library(isa, threads))
    for shapes in ([(1, 200)], [(1, 2000), (1, 70), (40, 300)], [(1, 30 * i + 1) for i in range(9)]):
        batch = make_batch(shapes, block_size=16, kv_heads=3, group=3, head_dim=64, dtype=torch.bfloat16)
        for window in (None, 100):
            assert_close(*attend(backend, batch, window))


def test_a_row_does_not_depend_on_its_batch(backend: NativeBackend) -> None:
    """A poisoned neighbour changes no bit of the others, and its own rows say that they are poisoned."""
    shapes = [(1, 40), (1, 9), (1, 33), (6, 20), (6, 20)]
    batch = make_batch(shapes, block_size=16, kv_heads=1, group=3, head_dim=64, dtype=torch.bfloat16)
    outs = []
    for poison in (False, True):
        cache = batch.kv_cache.clone()
        if poison:
            for row in (1, 3):
                cache[batch.metadata.block_tables[row, : -(-shapes[row][1] // 16)], :, 0] = torch.nan
        step = backend.begin_step(batch.metadata, cache)
        step.write(0, batch.key_value)
        outs.append(step.attend(0, batch.query, 0.25, None))
    healthy = [0, 2, *range(9, 15)]
    assert torch.equal(outs[0][healthy], outs[1][healthy])
    assert outs[1][1].isnan().any()


def test_writing_rounds_and_touches_its_slots_only(backend: NativeBackend) -> None:
    """Keys and values land rounded to nearest in exactly their slots of their layer, and are cleared from there."""
    batch = make_batch([(3, 9), (1, 5)], block_size=4, kv_heads=2, group=1, head_dim=32, dtype=torch.bfloat16)
    values = torch.randn(4, 2, 2, 32)
    cache, expected = in_words(batch.kv_cache), batch.kv_cache.clone()
    for token, slot in enumerate(batch.metadata.slot_mapping.tolist()):
        expected[slot // 4, 1, :, :, slot % 4] = values[token].bfloat16()
    backend.begin_step(batch.metadata, cache).write(1, values)
    assert torch.equal(from_words(cache), expected)
    slots = batch.metadata.slot_mapping[[0, 2, 3]]
    for slot in slots.tolist():
        expected[slot // 4, :, :, :, slot % 4] = 0.0
    backend.clear_slots(cache, slots)
    assert torch.equal(from_words(cache), expected)
