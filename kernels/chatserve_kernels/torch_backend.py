"""The production backend on CPUs: few, large torch calls per layer and no Python loop over sequences.

Decodes of similar length and prefill chunks of equal shape are grouped once per step; each group costs one
gather and one `scaled_dot_product_attention` per layer. The gather copies keys and values of a group into one
dense, padded buffer that stays in the L2 cache. Same results as `reference`, up to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from chatserve_kernels.interface import AttentionMetadata, check_kv_cache

_Int64 = npt.NDArray[np.int64]

# Decodes share one padded group until the padding costs more than another call per layer would:
# one call costs about as much as gathering and reading this many blocks (measured with 16-token blocks).
_PADDED_BLOCKS_PER_CALL = 32


@dataclass(slots=True)
class _Group:
    """Sequences that attend in one call.

    Attributes:
        token_rows: int64 [n * query_len], or ``None`` where the group is the whole batch in order.
        num_seqs: n.
        query_len: tokens of each sequence in this step.
        seq_lens: int64 [n]; all equal where query_len > 1.
        max_len: longest of them; keys and values are gathered and read up to here.
        gather_rows: int32 or int64 [2 * n * K * blocks], rows of layer 0 in the cache seen as
            [blocks * L * 2 * K, B * D].
        gathered: [2 * n * K * blocks, B * D] scratch that the gather fills.
        masks: additive masks by window, made on first use.
    """

    token_rows: Tensor | None
    num_seqs: int
    query_len: int
    seq_lens: Tensor
    max_len: int
    gather_rows: Tensor
    gathered: Tensor
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Additive mask [n or 1, 1, query_len, max_len]; ``None`` where every key is visible."""
        if window not in self.masks:
            self.masks[window] = self._make_mask(window, dtype)
        return self.masks[window]

    def _make_mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        last = self.seq_lens[:1] if self.query_len > 1 else self.seq_lens
        query_position = (last[:, None] - self.query_len + torch.arange(self.query_len))[:, None, :, None]
        key_position = torch.arange(self.max_len)
        hidden = key_position > query_position
        if window is not None:
            hidden |= key_position <= query_position - window
        if not bool(hidden.any()):
            return None
        return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)


class TorchAttentionStep:
    """`AttentionStep` over dense gathers of the paged cache."""

    def __init__(self, metadata: AttentionMetadata, kv_cache: Tensor) -> None:
        check_kv_cache(kv_cache)
        _, self._num_layers, _, self._num_kv_heads, self._block_size, self._head_dim = kv_cache.shape
        self._dtype = kv_cache.dtype
        self._token_rows_of_cache = kv_cache.view(-1, self._head_dim)
        self._block_rows_of_cache = kv_cache.view(-1, self._block_size * self._head_dim)
        self._write_rows = self._rows_to_write(metadata.slot_mapping)
        self._groups = self._make_groups(metadata)

    def write(self, layer: int, key_value: Tensor) -> None:
        rows = self._write_rows + layer * (2 * self._num_kv_heads * self._block_size)
        self._token_rows_of_cache.index_put_((rows,), key_value.flatten(1, 2))

    def attend(self, layer: int, query: Tensor, scale: float, window: int | None) -> Tensor:
        first = self._groups[0]
        if first.token_rows is None:
            return self._attend_group(first, layer, query, scale, window)
        out = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
        for group in self._groups:
            assert group.token_rows is not None
            part = self._attend_group(group, layer, query.index_select(0, group.token_rows), scale, window)
            out.index_copy_(0, group.token_rows, part)
        return out

    def _attend_group(self, group: _Group, layer: int, query: Tensor, scale: float, window: int | None) -> Tensor:
        """query [n * query_len, H, D] → [n * query_len, H * D]."""
        n, kv_heads, dim = group.num_seqs, self._num_kv_heads, self._head_dim
        rows = group.gather_rows + layer * (2 * kv_heads)
        torch.index_select(self._block_rows_of_cache, 0, rows, out=group.gathered)
        key, value = group.gathered.view(2, n, kv_heads, -1, dim)[:, :, :, : group.max_len].unbind(0)
        mask = group.mask(window, self._dtype)
        heads_per_group = query.shape[1] // kv_heads
        if group.query_len == 1:
            # The query heads that share a key/value head become the query rows of one small product.
            grouped = query.view(n, kv_heads, heads_per_group, dim)
            if mask is not None:
                mask = mask.expand(n, kv_heads, heads_per_group, -1)
            return functional.scaled_dot_product_attention(grouped, key, value, mask, scale=scale).reshape(n, -1)
        # Sequence and key/value head are the batch, so that the heads sharing a key need no copy of it.
        grouped = query.view(n, group.query_len, kv_heads, heads_per_group, dim).permute(0, 2, 3, 1, 4).flatten(0, 1)
        shared = (n * kv_heads, heads_per_group, group.max_len, dim)
        key = key.flatten(0, 1)[:, None].expand(shared)
        value = value.flatten(0, 1)[:, None].expand(shared)
        causal = group.query_len == group.max_len and (window is None or window >= group.max_len)
        out = functional.scaled_dot_product_attention(
            grouped, key, value, None if causal else mask, is_causal=causal, scale=scale
        )
        return (
            out.view(n, kv_heads, heads_per_group, group.query_len, dim)
            .permute(0, 3, 1, 2, 4)
            .reshape(n * group.query_len, -1)
        )

    def _rows_to_write(self, slot_mapping: Tensor) -> Tensor:
        """int64 [T, 2 * K]: rows of layer 0, in the cache seen as [blocks * L * 2 * K * B, D]."""
        block = slot_mapping.div(self._block_size, rounding_mode="floor")
        base = block * (self._num_layers * 2 * self._num_kv_heads * self._block_size) + slot_mapping % self._block_size
        return base[:, None] + torch.arange(2 * self._num_kv_heads) * self._block_size

    def _make_groups(self, metadata: AttentionMetadata) -> list[_Group]:
        starts: _Int64 = metadata.query_start_loc.numpy()
        seq_lens: _Int64 = metadata.seq_lens.numpy()
        query_lens = np.diff(starts)
        groups = decode_groups(query_lens, -(-seq_lens // self._block_size))
        groups += prefill_groups(query_lens, seq_lens)
        whole = len(groups) == 1
        if whole:
            groups = [np.arange(len(seq_lens))]
        return [self._make_group(metadata, starts, members, whole) for members in groups]

    def _make_group(self, metadata: AttentionMetadata, starts: _Int64, members: _Int64, whole: bool) -> _Group:
        index = torch.from_numpy(members)
        seq_lens = metadata.seq_lens[index]
        max_len = int(seq_lens.max())
        query_len = int(starts[members[0] + 1] - starts[members[0]])
        num_blocks = -(-max_len // self._block_size)
        tables = metadata.block_tables[index, :num_blocks]
        # Padding reads the sequence's own first block, which is finite whenever the sequence is.
        used = torch.arange(num_blocks) * self._block_size < seq_lens[:, None]
        tables = torch.where(used, tables, tables[:, :1])
        kv_heads = self._num_kv_heads
        planes = torch.arange(2 * kv_heads).view(2, 1, kv_heads, 1)
        rows = (tables[None, :, None, :] * (self._num_layers * 2 * kv_heads) + planes).flatten()
        token_rows = None
        if not whole:
            token_rows = torch.from_numpy((starts[members][:, None] + np.arange(query_len)).reshape(-1))
        return _Group(
            token_rows=token_rows,
            num_seqs=len(members),
            query_len=query_len,
            seq_lens=seq_lens,
            max_len=max_len,
            gather_rows=rows,
            gathered=torch.empty(rows.numel(), self._block_size * self._head_dim, dtype=self._dtype),
        )


class TorchBackend:
    """`Backend` for CPUs."""

    name = "torch"

    def begin_step(self, metadata: AttentionMetadata, kv_cache: Tensor) -> TorchAttentionStep:
        return TorchAttentionStep(metadata, kv_cache)

    def copy_blocks(self, kv_cache: Tensor, pairs: Tensor) -> None:
        kv_cache.index_copy_(0, pairs[:, 1], kv_cache.index_select(0, pairs[:, 0]))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, eps)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        swapped = x.roll(x.shape[-1] // 2, -1)
        x.mul_(cos).addcmul_(swapped, sin)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)


def decode_groups(query_lens: _Int64, num_blocks: _Int64) -> list[_Int64]:
    """Partition the sequences that run one token so that padding them to their group's longest stays cheap.

    Longest first: a group is closed where padding everything that is left to its length would read more than
    `_PADDED_BLOCKS_PER_CALL` useless blocks.
    """
    members = np.flatnonzero(query_lens == 1)
    if not len(members):
        return []
    members = members[np.argsort(-num_blocks[members], kind="stable")]
    groups: list[_Int64] = []
    first = 0
    for i in range(1, len(members)):
        padding = (num_blocks[members[first]] - num_blocks[members[i]]) * (len(members) - i)
        if padding > _PADDED_BLOCKS_PER_CALL:
            groups.append(np.sort(members[first:i]))
            first = i
    groups.append(np.sort(members[first:]))
    return groups


def prefill_groups(query_lens: _Int64, seq_lens: _Int64) -> list[_Int64]:
    """Group the sequences that run several tokens by equal (query length, sequence length): no padding at all."""
    shapes: dict[tuple[int, int], list[int]] = {}
    for i in np.flatnonzero(query_lens > 1).tolist():
        shapes.setdefault((int(query_lens[i]), int(seq_lens[i])), []).append(i)
    return [np.array(members, dtype=np.int64) for members in shapes.values()]
