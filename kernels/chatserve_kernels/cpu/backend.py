"""Attention in C++ behind the common interface; what is left of it in torch.

`NativeBackend` is what the model room gets on CPUs where the kernels could be built. Attention is native for bfloat16
caches; pointwise operations, which only networks that `decoder` cannot run need one by one, are torch's.
"""

from __future__ import annotations

import ctypes
import weakref

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chatserve_kernels.cpu.library import Library, PagedStruct
from chatserve_kernels.interface import AttentionMetadata, AttentionStep, Draws, TokenLogprobs, check_kv_cache
from chatserve_kernels.torch_backend import TorchBackend


def address(tensor: Tensor | None) -> int | None:
    """Where a contiguous tensor's elements lie; ``None`` for none."""
    if tensor is None:
        return None
    if not tensor.is_contiguous():
        raise ValueError("kernels take contiguous tensors")
    return tensor.data_ptr()


def paged_struct(kv_cache: Tensor) -> PagedStruct:
    """The part that says where a cache lies, which must outlive it; no sequences."""
    check_kv_cache(kv_cache)
    if kv_cache.dtype != torch.bfloat16:
        raise ValueError(f"the compiled kernels' cache is bfloat16, not {kv_cache.dtype}")
    _, num_layers, _, kv_heads, block_size, head_dim = kv_cache.shape
    if block_size % 2 or head_dim % 2:
        raise ValueError(f"block_size ({block_size}) and head_dim ({head_dim}) must be even: the cache is in pairs.")
    return PagedStruct(
        cache=address(kv_cache), num_layers=num_layers, kv_heads=kv_heads, block_size=block_size, head_dim=head_dim
    )


class NativeAttentionStep:
    """`AttentionStep` over a bfloat16 cache.

    Attributes:
        paged: the step as the kernels take it; valid as long as this object.
        slot_mapping: int64 [T].
    """

    def __init__(self, library: Library, metadata: AttentionMetadata, kv_cache: Tensor) -> None:
        self._library = library
        tables = metadata.block_tables.contiguous()
        self.slot_mapping = metadata.slot_mapping.contiguous()
        self._keep = (kv_cache, metadata, tables)
        self.paged = paged_struct(kv_cache)
        self.paged.num_sequences = len(metadata.seq_lens)
        self.paged.query_start = address(metadata.query_start_loc)
        self.paged.seq_lens = address(metadata.seq_lens)
        self.paged.block_tables = address(tables)
        self.paged.table_stride = tables.shape[1] if tables.dim() == 2 else 0
        self.paged.share(metadata.shared_runs)

    def write(self, layer: int, key_value: Tensor) -> None:
        values = key_value.float().contiguous()
        self._library.call(
            *("cs_write_cache", ctypes.byref(self.paged), layer, len(values)),
            *(address(self.slot_mapping), address(values)),
        )

    def attend(self, layer: int, query: Tensor, scale: float, window: int | None) -> Tensor:
        wide = query.float().contiguous()
        out = torch.empty(len(wide), wide.shape[1] * wide.shape[2])
        self._library.call(
            *("cs_attend", ctypes.byref(self.paged), layer, wide.shape[1], address(wide), scale, window or 0),
            address(out),
        )
        return out.to(query.dtype)


class NativeBackend:
    """`Backend` for CPUs with compiled kernels. One object serves the steps of one cache, in order."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.name = f"native-{library.isa}"
        self._torch = TorchBackend()
        self._logits: weakref.ref[Tensor] | None = None
        self._logits_at: tuple[int | None, int] = None, 0
        self._tokens, self._tokens_at = np.empty(0, np.int32), 0

    def begin_step(self, metadata: AttentionMetadata, kv_cache: Tensor) -> AttentionStep:
        if kv_cache.dtype != torch.bfloat16:
            return self._torch.begin_step(metadata, kv_cache)
        return NativeAttentionStep(self.library, metadata, kv_cache)

    def copy_blocks(self, kv_cache: Tensor, pairs: Tensor) -> None:
        self._torch.copy_blocks(kv_cache, pairs)

    def clear_slots(self, kv_cache: Tensor, slots: Tensor) -> None:
        if kv_cache.dtype != torch.bfloat16:
            self._torch.clear_slots(kv_cache, slots)
            return
        block_size, head_dim = kv_cache.shape[4:]
        block, offset = slots // block_size, slots % block_size
        # In words of two, see src/attention.h.
        keys, values = kv_cache.unbind(2)
        keys.view(*keys.shape[:3], head_dim // 2, block_size, 2)[block, :, :, :, offset] = 0.0
        values.view(*values.shape[:3], block_size // 2, head_dim, 2)[block, :, :, offset // 2, :, offset % 2] = 0.0

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._torch.rms_norm(x, weight, eps)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        self._torch.rotate(x, cos, sin)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._torch.silu_mul(gate_up)

    def argmax(self, x: Tensor) -> Tensor:
        best = torch.empty(len(x), dtype=torch.int32)
        self.library.call("cs_argmax", address(x), len(x), x.shape[1], address(best))
        return best

    def draw(self, logits: Tensor, draws: Draws) -> npt.NDArray[np.int32]:
        # As a rule the same tensor in every step, and asking it anything is slow while caches are full of weights.
        if self._logits is None or self._logits() is not logits:
            self._logits, self._logits_at = weakref.ref(logits), (address(logits), logits.shape[1])
        count = len(draws.rows) // 8
        if count > len(self._tokens):
            self._tokens = np.empty(count, np.int32)
            self._tokens_at = self._tokens.ctypes.data
        self.library.draw(*self._logits_at, draws, self._tokens_at)
        return self._tokens[:count]

    def logprobs(
        self, logits: Tensor, rows: npt.NDArray[np.int64], tokens: npt.NDArray[np.int32], k: int
    ) -> TokenLogprobs:
        count, columns = len(rows), logits.shape[1]
        k = min(k, columns)
        found = TokenLogprobs(
            np.empty(count, np.float32), np.empty((count, k), np.int32), np.empty((count, k), np.float32)
        )
        self.library.call(
            *("cs_logprobs", address(logits), columns, count, rows.tobytes(), tokens.tobytes(), k),
            *(found.chosen.ctypes.data, found.top_ids.ctypes.data, found.top.ctypes.data),
        )
        return found
