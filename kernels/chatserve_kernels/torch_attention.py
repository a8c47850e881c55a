"""Attention of one step in few, large torch calls: no Python loop over sequences.

Decodes of similar length and prefill chunks of equal shape form groups; a group costs one
`scaled_dot_product_attention` per layer over dense keys and values, either gathered through the block tables or
kept in a `DecodeWindow`. `torch_backend` makes one `TorchAttentionStep` per step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from chatserve_kernels.decode_window import DecodeGroup, DecodeWindow, gather_rows, window_blocks
from chatserve_kernels.interface import AttentionMetadata, check_kv_cache

_Int64 = npt.NDArray[np.int64]

# Decodes share one padded group until the padding costs more than another call per layer would:
# one call costs about as much as gathering and reading this many blocks (measured with 16-token blocks).
_PADDED_BLOCKS_PER_CALL = 32

# Windows are a second copy of what they hold; beyond this many bytes a group gathers at every step instead.
_MAX_WINDOW_BYTES = 1 << 30


@dataclass(slots=True)
class _Group:
    """Sequences that attend in one call.

    Attributes:
        token_rows: int64 [n * query_len], or ``None`` where the group is the whole batch in order.
        num_seqs: n.
        query_len: tokens of each sequence in this step.
        seq_lens: int64 [n]; all equal where query_len > 1.
        max_len: longest of them; keys and values are read up to here.
        window: dense past, and ``append_rows`` where this step's tokens go in it; or else
        gather_rows, gathered: what to gather per layer, and the scratch [2 * n * K * blocks, B * D] that takes it.
        masks: additive masks by window size, made on first use.
    """

    token_rows: Tensor | None
    num_seqs: int
    query_len: int
    seq_lens: Tensor
    max_len: int
    window: DecodeWindow | None
    append_rows: Tensor
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
    """`AttentionStep` over dense groups.

    Args:
        previous: the decode groups of the step before this one on the same cache.

    Attributes:
        decode_groups: those of this step, for the next.
    """

    def __init__(self, metadata: AttentionMetadata, kv_cache: Tensor, previous: list[DecodeGroup]) -> None:
        check_kv_cache(kv_cache)
        _, self._num_layers, _, self._num_kv_heads, self._block_size, self._head_dim = kv_cache.shape
        self._kv_cache = kv_cache
        self._token_rows_of_cache = kv_cache.view(-1, self._head_dim)
        self._block_rows_of_cache = kv_cache.view(-1, self._block_size * self._head_dim)
        self._write_rows = self._rows_to_write(metadata.slot_mapping)
        self.decode_groups: list[DecodeGroup] = []
        self._groups = self._make_groups(metadata, previous)

    def write(self, layer: int, key_value: Tensor) -> None:
        rows = self._write_rows + layer * (2 * self._num_kv_heads * self._block_size)
        heads = key_value.flatten(1, 2)
        self._token_rows_of_cache.index_put_((rows,), heads)
        for group in self._groups:
            if group.window is not None:
                newest = heads if group.token_rows is None else heads.index_select(0, group.token_rows)
                group.window.append(layer, group.append_rows, newest)

    def attend(self, layer: int, query: Tensor, scale: float, window: int | None) -> Tensor:
        out: Tensor | None = None
        for group in self._groups:
            if group.token_rows is None:
                return self._attend_group(group, layer, query, scale, window)
            if out is None:
                out = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
            part = self._attend_group(group, layer, query.index_select(0, group.token_rows), scale, window)
            out.index_copy_(0, group.token_rows, part)
        return query.flatten(1) if out is None else out

    def _attend_group(self, group: _Group, layer: int, query: Tensor, scale: float, window: int | None) -> Tensor:
        """query [n * query_len, H, D] → [n * query_len, H * D]."""
        n, kv_heads, dim = group.num_seqs, self._num_kv_heads, self._head_dim
        key, value = self._keys_and_values(group, layer)[:, :, :, : group.max_len].unbind(0)
        mask = group.mask(window, key.dtype)
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
        out = out.view(n, kv_heads, heads_per_group, group.query_len, dim).permute(0, 3, 1, 2, 4)
        return out.reshape(n * group.query_len, -1)

    def _keys_and_values(self, group: _Group, layer: int) -> Tensor:
        """[2, n, K, at least max_len, D]."""
        if group.window is not None:
            return group.window.keys_and_values(layer)
        rows = group.gather_rows + layer * (2 * self._num_kv_heads)
        torch.index_select(self._block_rows_of_cache, 0, rows, out=group.gathered)
        return group.gathered.view(2, group.num_seqs, self._num_kv_heads, -1, self._head_dim)

    def _rows_to_write(self, slot_mapping: Tensor) -> Tensor:
        """int64 [T, 2 * K]: rows of layer 0, in the cache seen as [blocks * L * 2 * K * B, D]."""
        block = slot_mapping.div(self._block_size, rounding_mode="floor")
        base = block * (self._num_layers * 2 * self._num_kv_heads * self._block_size) + slot_mapping % self._block_size
        return base[:, None] + torch.arange(2 * self._num_kv_heads) * self._block_size

    def _make_groups(self, metadata: AttentionMetadata, previous: list[DecodeGroup]) -> list[_Group]:
        starts: _Int64 = metadata.query_start_loc.numpy()
        seq_lens: _Int64 = metadata.seq_lens.numpy()
        query_lens = np.diff(starts)
        parts = decode_groups(query_lens, -(-seq_lens // self._block_size)) + prefill_groups(query_lens, seq_lens)
        # One group is the whole batch: its members in order need no index.
        return [self._make_group(metadata, starts, members, len(parts) == 1, previous) for members in parts]

    def _make_group(
        self, metadata: AttentionMetadata, starts: _Int64, members: _Int64, whole: bool, previous: list[DecodeGroup]
    ) -> _Group:
        index = torch.from_numpy(members)
        seq_lens = metadata.seq_lens[index]
        tables = metadata.block_tables[index]
        query_len = int(starts[members[0] + 1] - starts[members[0]])
        max_len = int(seq_lens.max())
        window = self._window(tables.numpy(), seq_lens.numpy(), previous) if query_len == 1 else None
        nothing = torch.empty(0, dtype=torch.int64)
        rows = nothing
        if window is None:
            rows = gather_rows(tables, seq_lens, -(-max_len // self._block_size), self._kv_cache)
        token_rows = None
        if not whole:
            token_rows = torch.from_numpy((starts[members][:, None] + np.arange(query_len)).reshape(-1))
        return _Group(
            token_rows=token_rows,
            num_seqs=len(members),
            query_len=query_len,
            seq_lens=seq_lens,
            max_len=max_len,
            window=window,
            append_rows=nothing if window is None else window.append_rows(seq_lens),
            gather_rows=rows,
            gathered=self._kv_cache.new_empty(len(rows), self._block_size * self._head_dim),
        )

    def _window(self, tables: _Int64, seq_lens: _Int64, previous: list[DecodeGroup]) -> DecodeWindow | None:
        """The dense past of a decode group, if it is the same group as in the step before.

        Built in the second step that a group lives, so that groups which change at every step never pay for it.
        """
        group = DecodeGroup(tables, seq_lens, self._block_size)
        self.decode_groups.append(group)
        for candidate in previous:
            if group.follows(candidate):
                window = candidate.window
                if window is None or window.capacity < int(seq_lens.max()):
                    # Let go of the old copy before the new one is made.
                    candidate.window = window = None
                    window = DecodeWindow(group, self._kv_cache) if self._affordable(group) else None
                group.window = window
                break
        return group.window

    def _affordable(self, group: DecodeGroup) -> bool:
        block_bytes = self._kv_cache.stride(0) * self._kv_cache.element_size()
        held = sum(len(other.seq_lens) * window_blocks(other) for other in self.decode_groups)
        return held * block_bytes <= _MAX_WINDOW_BYTES


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
