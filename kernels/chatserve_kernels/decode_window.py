"""Dense copies of the keys and values of decoding sequences, kept from one step to the next.

Gathering a growing past through block tables at every step costs as much memory traffic as attending to it. While
the same sequences decode step after step, only their newest tokens are missing from the last gather; a
`DecodeWindow` appends those. The paged cache stays the truth: every token is written there too, and whenever
membership, order or blocks of a group change, its window is dropped. `torch_backend` is the caller.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_Int64 = npt.NDArray[np.int64]

# Room for this many further tokens, so that a window is rebuilt seldom.
_SLACK_TOKENS = 64


class DecodeGroup:
    """Which sequences decoded together in a step, and what of them is in the cache.

    A group *follows* another if it is the same sequences one token later. Why blocks and lengths tell: between two
    consecutive steps, a sequence that computes one token on top of L tokens in the same blocks reads what is in
    those blocks, whether it wrote that itself or was handed it; and nobody can have rewritten a block in between
    without a step that computes more than one token there, or a copy, after which nothing follows.

    Args:
        tables: int64 [n, max_blocks] of the group's sequences.
        seq_lens: int64 [n], with this step's token.
    """

    def __init__(self, tables: _Int64, seq_lens: _Int64, block_size: int) -> None:
        self.tables = tables
        self.seq_lens = seq_lens
        self.block_size = block_size
        self.window: DecodeWindow | None = None

    def follows(self, previous: DecodeGroup) -> bool:
        """Whether this is ``previous`` one step later."""
        if len(self.seq_lens) != len(previous.seq_lens) or not np.array_equal(self.seq_lens, previous.seq_lens + 1):
            return False
        num_blocks = -(-previous.seq_lens // self.block_size)
        width = int(num_blocks.max())
        used = np.arange(width) < num_blocks[:, None]
        return bool(((self.tables[:, :width] == previous.tables[:, :width]) | ~used).all())


class DecodeWindow:
    """The past of one group's sequences, padded to a common capacity.

    Args:
        kv_cache: the paged cache, from which everything before this step's tokens is gathered now.
    """

    def __init__(self, group: DecodeGroup, kv_cache: Tensor) -> None:
        _, num_layers, _, kv_heads, block_size, head_dim = kv_cache.shape
        n, num_blocks = len(group.seq_lens), window_blocks(group)
        rows = gather_rows(torch.from_numpy(group.tables), torch.from_numpy(group.seq_lens), num_blocks, kv_cache)
        source = kv_cache.view(-1, block_size * head_dim)
        self.capacity = num_blocks * block_size
        self._dense = torch.empty(
            num_layers, 2, n, kv_heads, self.capacity, head_dim, dtype=kv_cache.dtype, device=kv_cache.device
        )
        for layer, dense in enumerate(self._dense.view(num_layers, -1, block_size * head_dim)):
            torch.index_select(source, 0, rows + layer * 2 * kv_heads, out=dense)
        # Row of token 0 of each (sequence, key or value, head), in a layer seen as [2 * n * K * capacity, D].
        plane = torch.arange(2).view(1, 2, 1) * n + torch.arange(n).view(n, 1, 1)
        self._first_rows = ((plane * kv_heads + torch.arange(kv_heads)) * self.capacity).flatten(1)

    def append_rows(self, seq_lens: Tensor) -> Tensor:
        """int64 [n, 2 * K]: where `append` puts each sequence's newest token."""
        return self._first_rows + (seq_lens - 1)[:, None]

    def append(self, layer: int, rows: Tensor, key_value: Tensor) -> None:
        """Add the newest token of every sequence; key_value [n, 2 * K, D]."""
        dense = self._dense[layer]
        dense.view(-1, dense.shape[-1]).index_put_((rows,), key_value)

    def keys_and_values(self, layer: int) -> Tensor:
        """[2, n, K, capacity, D]."""
        return self._dense[layer]


def window_blocks(group: DecodeGroup) -> int:
    """Blocks that each sequence gets in a window of ``group``."""
    return -(-(int(group.seq_lens.max()) + _SLACK_TOKENS) // group.block_size)


def gather_rows(tables: Tensor, seq_lens: Tensor, num_blocks: int, kv_cache: Tensor) -> Tensor:
    """Rows to gather for layer 0, with the cache seen as [blocks * L * 2 * K, B * D]; layer l adds ``l * 2 * K``.

    Padding reads the sequence's own first block, which is finite whenever the sequence is.

    Args:
        tables: int64 [n, at least ceil(max(seq_lens) / B)].
        num_blocks: blocks per sequence, padding included.

    Returns:
        int64 [2 * n * K * num_blocks], in the order (key or value, sequence, head, block).
    """
    _, num_layers, _, kv_heads, block_size, _ = kv_cache.shape
    used = torch.arange(num_blocks) * block_size < seq_lens[:, None]
    known = tables[:, :num_blocks]
    padded = tables[:, :1].expand(-1, num_blocks).clone()
    padded[:, : known.shape[1]] = known
    padded = torch.where(used, padded, tables[:, :1])
    planes = torch.arange(2 * kv_heads).view(2, 1, kv_heads, 1)
    return (padded[None, :, None, :] * (num_layers * 2 * kv_heads) + planes).flatten()
