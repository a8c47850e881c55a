"""The production backend on CPUs, in plain torch.

Same results as `reference`, up to rounding. Holds no tensors of its own but the windows of the sequences that
decoded in the last step; attention itself is in `torch_attention`, drawing in `torch_draw`.
"""

from __future__ import annotations

import weakref

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from chatserve_kernels import torch_draw
from chatserve_kernels.decode_window import DecodeGroup
from chatserve_kernels.interface import AttentionMetadata, Draws, TokenLogprobs
from chatserve_kernels.torch_attention import TorchAttentionStep


class TorchBackend:
    """`Backend` for CPUs. One object serves the steps of one cache, in order."""

    name = "torch"

    def __init__(self) -> None:
        self._decode_groups: list[DecodeGroup] = []
        self._cache: weakref.ref[Tensor] | None = None

    def begin_step(self, metadata: AttentionMetadata, kv_cache: Tensor) -> TorchAttentionStep:
        if self._cache is None or self._cache() is not kv_cache:
            self._decode_groups, self._cache = [], weakref.ref(kv_cache)
        step = TorchAttentionStep(metadata, kv_cache, self._decode_groups)
        self._decode_groups = step.decode_groups
        return step

    def copy_blocks(self, kv_cache: Tensor, pairs: Tensor) -> None:
        self._decode_groups = []
        kv_cache.index_copy_(0, pairs[:, 1], kv_cache.index_select(0, pairs[:, 0]))

    def clear_slots(self, kv_cache: Tensor, slots: Tensor) -> None:
        self._decode_groups = []
        block_size = kv_cache.shape[4]
        kv_cache[slots // block_size, :, :, :, slots % block_size] = 0.0

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, eps)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        swapped = x.roll(x.shape[-1] // 2, -1)
        x.mul_(cos).addcmul_(swapped, sin)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    def argmax(self, x: Tensor) -> Tensor:
        # numpy's is vectorised along a row, torch's is not (15 times slower).
        return torch.from_numpy(x.numpy().argmax(-1).astype(np.int32))

    def draw(self, logits: Tensor, draws: Draws) -> npt.NDArray[np.int32]:
        return torch_draw.draw(logits, draws)

    def logprobs(
        self, logits: Tensor, rows: npt.NDArray[np.int64], tokens: npt.NDArray[np.int32], k: int
    ) -> TokenLogprobs:
        own = logits[torch.from_numpy(rows)]
        k = min(k, own.shape[1])
        top_ids = np.empty((len(rows), k), np.int32)
        for ids, row in zip(top_ids, own, strict=True) if k else ():
            ids[:] = _best(row, k).numpy()  # by logit: logarithms of probabilities may round to the same number
        values = own.log_softmax(-1).numpy()
        return TokenLogprobs(values[np.arange(len(rows)), tokens], top_ids, np.take_along_axis(values, top_ids, 1))


def _best(scores: Tensor, k: int) -> Tensor:
    """Ids of the k best of ``scores`` [V], best first, equal ones by id → int64 [k]."""
    candidates = torch.nonzero(scores >= scores.topk(k).values[-1])[:, 0]
    order = scores[candidates].argsort(descending=True, stable=True)
    return candidates[order][:k]
