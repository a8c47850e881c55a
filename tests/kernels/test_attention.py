"""Paged attention of every backend against its definition, over ragged batches and awkward lengths."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from chatserve_kernels.interface import AttentionMetadata, Backend, kv_cache_shape
from chatserve_kernels.reference import ReferenceBackend
from chatserve_kernels.torch_attention import decode_groups, prefill_groups
from chatserve_kernels.torch_backend import TorchBackend

from tests.kernels.batches import make_batch, naive_attention

BACKENDS = [ReferenceBackend(), TorchBackend()]


def backend_name(backend: Backend) -> str:
    return backend.name


def random_shapes(rng: random.Random, block_size: int) -> list[tuple[int, int]]:
    """(query_len, seq_len) of decodes, whole prompts and later chunks, many at the edges of blocks."""
    shapes = []
    for _ in range(rng.randint(1, 7)):
        seq_len = max(1, rng.choice([1, 2, 3, 5]) * block_size + rng.choice([-1, 0, 1, rng.randint(0, 40)]))
        query_len = rng.choice([1, 1, seq_len, rng.randint(1, seq_len)])
        shapes.append((query_len, seq_len))
    return shapes


@pytest.mark.parametrize("backend", BACKENDS, ids=backend_name)
@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
def test_attention_equals_its_definition(backend: Backend, block_size: int, group: int) -> None:
    """Whatever the mix of decodes and chunks, block size and heads per key: every row is the softmax average of
    its own sequence's past, read through the block table, and nothing else."""
    rng = random.Random(1000 * block_size + group)
    for case in range(6):
        window = rng.choice([None, None, 1, block_size, 7])
        batch = make_batch(
            random_shapes(rng, block_size), block_size=block_size, kv_heads=2, group=group, head_dim=8, seed=case
        )
        step = backend.begin_step(batch.metadata, batch.kv_cache)
        step.write(1, batch.key_value)
        out = step.attend(1, batch.query, 0.3, window)
        expected = naive_attention(batch, 0.3, window)
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_close_to_the_reference(dtype: torch.dtype) -> None:
    """In 16-bit types the torch backend differs from the reference by rounding only."""
    shapes = [(1, 70), (1, 33), (40, 40), (9, 57), (1, 1), (40, 40)]
    batch = make_batch(shapes, block_size=16, kv_heads=3, group=3, head_dim=64, dtype=dtype)
    outputs = []
    for backend in BACKENDS:
        cache = batch.kv_cache.clone()
        step = backend.begin_step(batch.metadata, cache)
        step.write(1, batch.key_value)
        outputs.append((step.attend(1, batch.query, 0.125, None), cache))
    torch.testing.assert_close(outputs[1][0], outputs[0][0], rtol=3e-2, atol=1e-2)
    torch.testing.assert_close(outputs[1][1], outputs[0][1], rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS, ids=backend_name)
def test_writing_touches_its_slots_of_its_layer_only(backend: Backend) -> None:
    """A write changes exactly the T slots of one layer; every other number of the cache stays as it was."""
    batch = make_batch([(3, 9), (1, 5)], block_size=4, kv_heads=2, group=1, head_dim=4)
    before = batch.kv_cache.clone()
    backend.begin_step(batch.metadata, batch.kv_cache).write(1, batch.key_value)
    for token, slot in enumerate(batch.metadata.slot_mapping.tolist()):
        written = batch.kv_cache[slot // 4, 1, :, :, slot % 4]
        torch.testing.assert_close(written, batch.key_value[token], rtol=0, atol=0)
        before[slot // 4, 1, :, :, slot % 4] = written
    assert torch.equal(batch.kv_cache, before)


@pytest.mark.parametrize("backend", BACKENDS, ids=backend_name)
def test_a_poisoned_sequence_leaves_the_others_bit_equal(backend: Backend) -> None:
    """NaN in one sequence's keys and values reaches no other row of the batch, padding or not."""
    shapes = [(1, 40), (1, 9), (1, 33), (6, 20), (6, 20)]
    batch = make_batch(shapes, block_size=16, kv_heads=1, group=3, head_dim=16)
    outs = []
    for poison in (False, True):
        cache = batch.kv_cache.clone()
        if poison:
            for row in (1, 3):
                cache[batch.metadata.block_tables[row, : -(-shapes[row][1] // 16)]] = torch.nan
        step = backend.begin_step(batch.metadata, cache)
        step.write(0, batch.key_value)
        outs.append(step.attend(0, batch.query, 0.25, None))
    healthy = [0, 2, *range(9, 15)]
    assert torch.equal(outs[0][healthy], outs[1][healthy])
    assert outs[1][[1, *range(3, 9)]].isnan().any(-1).all()


@pytest.mark.parametrize("backend", BACKENDS, ids=backend_name)
def test_copied_blocks_are_whole_and_exact(backend: Backend) -> None:
    """A copy takes all layers of a block, bit for bit, and leaves all other blocks alone."""
    cache = torch.randn(kv_cache_shape(9, 3, 2, 4, 8)).bfloat16()
    expected = cache.clone()
    expected[[7, 0, 4]] = cache[[2, 2, 8]]
    backend.copy_blocks(cache, torch.tensor([[2, 7], [2, 0], [8, 4]]))
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("backend", BACKENDS, ids=backend_name)
def test_a_cache_of_another_layout_is_refused(backend: Backend) -> None:
    """A tensor that is no paged cache is an error that says what one looks like, not garbage."""
    nothing = torch.zeros(0, dtype=torch.int64)
    metadata = AttentionMetadata(nothing, nothing, nothing, nothing)
    with pytest.raises(ValueError, match="kv_cache must be a contiguous tensor"):
        backend.begin_step(metadata, torch.zeros(4, 2, 3, 1, 16, 8))


def test_grouping_is_a_partition_with_little_padding() -> None:
    """Every sequence is in exactly one group; groups pad little; few calls for batches of similar length."""
    rng = np.random.default_rng(3)
    for _ in range(200):
        n = int(rng.integers(1, 65))
        query_lens = np.where(rng.random(n) < 0.7, 1, rng.integers(2, 5, n))
        seq_lens = query_lens + (rng.pareto(1.0, n) * 64).astype(np.int64).clip(0, 8000)
        blocks = -(-seq_lens // 16)
        decodes = decode_groups(query_lens, blocks)
        groups = decodes + prefill_groups(query_lens, seq_lens)
        assert sorted(np.concatenate(groups).tolist()) == list(range(n))
        for members in decodes:
            assert (blocks[members].max() - blocks[members]).sum() <= 32 * len(members)
    similar = decode_groups(np.ones(64, dtype=np.int64), np.full(64, 20))
    assert len(similar) == 1
    assert len(decode_groups(np.ones(4, dtype=np.int64), np.array([500, 2, 2, 1]))) == 2
