"""Random ragged batches over a paged cache, and the attention they should give, by definition."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from chatserve_kernels.interface import AttentionMetadata, kv_cache_shape
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """A cache whose past is filled, a step to run over it, and each sequence's dense keys and values.

    ``key_value`` is [T, 2, K, D] of the step's tokens; ``dense[i]`` is [seq_len, 2, K, D] of sequence i.
    """

    metadata: AttentionMetadata
    kv_cache: Tensor
    query: Tensor
    key_value: Tensor
    dense: list[Tensor]
    query_lens: list[int]


def make_batch(
    shapes: list[tuple[int, int]],
    *,
    block_size: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    num_layers: int = 2,
    layer: int = 1,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Batch:
    """One sequence per (query_len, seq_len); its blocks are scattered over the cache at random.

    Blocks hold large garbage where nothing was written, so that reading a wrong slot shows.
    """
    rng = torch.Generator().manual_seed(seed)
    tables = [math.ceil(seq_len / block_size) for _, seq_len in shapes]
    num_blocks = sum(tables) + 3
    order = torch.randperm(num_blocks, generator=rng)
    cache = torch.full(kv_cache_shape(num_blocks, num_layers, kv_heads, block_size, head_dim), 1e4, dtype=dtype)
    block_tables = torch.zeros(len(shapes), max(tables), dtype=torch.int64)
    slots, queries, new_key_values, dense = [], [], [], []
    used = 0
    for i, (query_len, seq_len) in enumerate(shapes):
        block_tables[i, : tables[i]] = order[used : used + tables[i]]
        used += tables[i]
        key_value = torch.randn(seq_len, 2, kv_heads, head_dim, generator=rng).to(dtype)
        for position in range(seq_len):
            block, offset = block_tables[i, position // block_size], position % block_size
            if position < seq_len - query_len:
                cache[block, layer, :, :, offset] = key_value[position]
            else:
                slots.append(int(block) * block_size + offset)
        queries.append(torch.randn(query_len, kv_heads * group, head_dim, generator=rng).to(dtype))
        new_key_values.append(key_value[seq_len - query_len :])
        dense.append(key_value)
    query_lens = [query_len for query_len, _ in shapes]
    metadata = AttentionMetadata(
        query_start_loc=torch.from_numpy(np.concatenate(([0], np.cumsum(query_lens)))),
        seq_lens=torch.tensor([seq_len for _, seq_len in shapes]),
        block_tables=block_tables,
        slot_mapping=torch.tensor(slots),
    )
    return Batch(metadata, cache, torch.cat(queries), torch.cat(new_key_values), dense, query_lens)


def naive_attention(batch: Batch, scale: float, window: int | None) -> Tensor:
    """The definition, one query vector and one head at a time, in float64 → [T, H * D]."""
    rows = []
    token = 0
    for key_value, query_len in zip(batch.dense, batch.query_lens, strict=True):
        seq_len = len(key_value)
        for position in range(seq_len - query_len, seq_len):
            first = 0 if window is None else max(0, position - window + 1)
            heads = []
            for head in range(batch.query.shape[1]):
                shared = head // (batch.query.shape[1] // key_value.shape[2])
                keys = key_value[first : position + 1, 0, shared].double()
                values = key_value[first : position + 1, 1, shared].double()
                weights = torch.softmax(keys @ batch.query[token, head].double() * scale, dim=0)
                heads.append(weights @ values)
            rows.append(torch.cat(heads))
            token += 1
    return torch.stack(rows)


def in_words(kv_cache: Tensor) -> Tensor:
    """A copy in the order of the compiled kernels: see ``attention.h``."""
    blocks, layers, _, heads, block_size, head_dim = kv_cache.shape
    keys, values = kv_cache.unbind(2)
    keys = keys.reshape(blocks, layers, heads, block_size, head_dim // 2, 2).transpose(3, 4)
    values = values.reshape(blocks, layers, heads, block_size // 2, 2, head_dim).transpose(4, 5)
    return torch.stack([part.reshape(keys.shape[:3] + kv_cache.shape[4:]) for part in (keys, values)], dim=2)


def from_words(kv_cache: Tensor) -> Tensor:
    """A copy in plain order of a cache in the order of the compiled kernels."""
    blocks, layers, _, heads, block_size, head_dim = kv_cache.shape
    keys, values = kv_cache.unbind(2)
    keys = keys.reshape(blocks, layers, heads, head_dim // 2, block_size, 2).transpose(3, 4)
    values = values.reshape(blocks, layers, heads, block_size // 2, head_dim, 2).transpose(4, 5)
    return torch.stack([part.reshape(keys.shape[:3] + kv_cache.shape[4:]) for part in (keys, values)], dim=2)
