"""Plain torch on any device: one loop per sequence, float32 inside, obviously right.

The truth that every other backend is tested against. Too slow to serve with, on purpose simple to read.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chatserve_kernels.interface import AttentionMetadata, Draws, TokenLogprobs, check_kv_cache


class ReferenceAttentionStep:
    """`AttentionStep` by gathering each sequence's keys and values through its block table."""

    def __init__(self, metadata: AttentionMetadata, kv_cache: Tensor) -> None:
        check_kv_cache(kv_cache)
        self._metadata = metadata
        self._kv_cache = kv_cache

    def write(self, layer: int, key_value: Tensor) -> None:
        block_size = self._kv_cache.shape[4]
        for token, slot in enumerate(self._metadata.slot_mapping.tolist()):
            self._kv_cache[slot // block_size, layer, :, :, slot % block_size, :] = key_value[token]

    def attend(self, layer: int, query: Tensor, scale: float, window: int | None) -> Tensor:
        out = torch.empty_like(query)
        starts = self._metadata.query_start_loc.tolist()
        for i, seq_len in enumerate(self._metadata.seq_lens.tolist()):
            start, end = starts[i], starts[i + 1]
            key, value = self._gather(layer, i, seq_len)
            out[start:end] = _causal_attention(query[start:end], key, value, scale, window)
        return out.flatten(1)

    def _gather(self, layer: int, sequence: int, seq_len: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one sequence, [seq_len, K, D] each."""
        block_size = self._kv_cache.shape[4]
        num_blocks = -(-seq_len // block_size)
        blocks = self._kv_cache[self._metadata.block_tables[sequence, :num_blocks], layer]
        tokens = blocks.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :seq_len]
        return tokens[0], tokens[1]


class ReferenceBackend:
    """`Backend` in the plainest torch."""

    name = "reference"

    def begin_step(self, metadata: AttentionMetadata, kv_cache: Tensor) -> ReferenceAttentionStep:
        return ReferenceAttentionStep(metadata, kv_cache)

    def copy_blocks(self, kv_cache: Tensor, pairs: Tensor) -> None:
        for source, destination in pairs.tolist():
            kv_cache[destination] = kv_cache[source]

    def clear_slots(self, kv_cache: Tensor, slots: Tensor) -> None:
        for slot in slots.tolist():
            kv_cache[slot // kv_cache.shape[4], :, :, :, slot % kv_cache.shape[4]] = 0.0

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (normed * weight.float()).to(x.dtype)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        first, second = x.float().chunk(2, dim=-1)
        swapped = torch.cat((second, first), dim=-1)
        x.copy_(x.float() * cos.float() + swapped * sin.float())

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)

    def argmax(self, x: Tensor) -> Tensor:
        nan = x.isnan()
        best = torch.where(nan.any(-1, keepdim=True), nan, x == x.amax(-1, keepdim=True))
        return torch.where(best, torch.arange(x.shape[1]), x.shape[1]).amin(-1).int()

    def draw(self, logits: Tensor, draws: Draws) -> npt.NDArray[np.int32]:
        rows, options, uniform = draws.arrays()
        return np.array([_draw(logits[row].double(), options[i], uniform[i]) for i, row in enumerate(rows)], np.int32)

    def logprobs(
        self, logits: Tensor, rows: npt.NDArray[np.int64], tokens: npt.NDArray[np.int32], k: int
    ) -> TokenLogprobs:
        scores = logits[torch.from_numpy(rows)]
        order = scores.argsort(stable=True, dim=-1, descending=True)[:, :k]
        values = scores.double().log_softmax(-1).float()
        chosen = values.gather(1, torch.from_numpy(tokens).long()[:, None])[:, 0]
        return TokenLogprobs(chosen.numpy(), order.int().numpy(), values.gather(1, order).numpy())


def _draw(logits: Tensor, options: npt.NDArray[np.float64], uniform: float) -> int:
    """One token of logits [V]; 0 where they have no finite maximum."""
    if not logits.amax().isfinite():
        return 0
    cumulative = _kept(logits, *options.tolist()).cumsum(0)
    return int((cumulative > uniform * cumulative[-1]).nonzero()[0])


def _kept(logits: Tensor, temperature: float, min_p: float, top_k: float, top_p: float) -> Tensor:
    """Probabilities [V] after temperature, min-p, top-k and top-p: 0 for what they drop, the rest not normalised."""
    probabilities = (logits / temperature).softmax(0)
    order = logits.argsort(descending=True, stable=True)
    order = order[probabilities[order] >= min_p * probabilities.max()]
    order = order[: int(top_k) or None]
    if top_p < 1.0:
        mass = probabilities[order].cumsum(0)
        order = order[: int((mass < top_p * mass[-1]).sum()) + 1]
    kept = torch.zeros_like(probabilities)
    kept[order] = probabilities[order]
    return kept


def _causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
    """query [q, H, D] are the last q of the s positions of key and value [s, K, D] → [q, H, D]."""
    num_query, num_heads, _ = query.shape
    seq_len, num_kv_heads, _ = key.shape
    group = num_heads // num_kv_heads
    key = key.float().repeat_interleave(group, dim=1)
    value = value.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,shd->hqs", query.float(), key) * scale
    query_position = torch.arange(seq_len - num_query, seq_len, device=query.device)[:, None]
    key_position = torch.arange(seq_len, device=query.device)[None, :]
    visible = key_position <= query_position
    if window is not None:
        visible &= key_position > query_position - window
    probabilities = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqs,shd->qhd", probabilities, value).to(query.dtype)
