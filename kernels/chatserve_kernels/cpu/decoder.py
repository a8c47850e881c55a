"""A whole decoder network in one call per step.

Knows weights by role (`LayerWeights`), not by name or file; knows no requests. The model room fills it in and hands
over each step's tokens. Hidden states are float32, keys and values bfloat16.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chatserve_kernels.cpu.backend import address, paged_struct
from chatserve_kernels.cpu.library import LayerStruct, Library, NetworkStruct, StepMemoryStruct
from chatserve_kernels.cpu.weights import Arena, Matrix, PackedLinear
from chatserve_kernels.interface import StepBatch, StepLogits

# Gate and up projections are interleaved in runs of this many rows, so that one tile pair holds both halves of a
# gated unit and only their product is stored.
GATE_UP_RUN = 16


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer, projections of one input stacked; biases and norms float32.

    Attributes:
        gate_up: rows interleaved as `interleave_gate_up` does.
        query_norm, key_norm: [head_dim], or ``None``.
        window: tokens that a query sees; ``None`` for all.
    """

    input_norm: Tensor
    qkv: Matrix
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Matrix
    output_bias: Tensor | None
    post_norm: Tensor
    gate_up: Matrix
    gate_up_bias: Tensor | None
    down: Matrix
    down_bias: Tensor | None
    window: int | None


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes that weights alone do not tell."""

    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float


class NativeDecoder:
    """Packed weights, ready to run.

    Attributes:
        weight_format: one of `weights.KINDS`: what most weights are in.

    Args:
        embedding: bfloat16 [vocabulary, hidden].
        cos, sin: float32 [positions, head_dim]; sin is signed as `chatserve_kernels.interface.Backend.rotate` says.
    """

    def __init__(
        self,
        library: Library,
        sizes: Sizes,
        embedding: Tensor,
        layers: Sequence[LayerWeights],
        final_norm: Tensor,
        head: Matrix,
        cos: Tensor,
        sin: Tensor,
    ) -> None:
        self._library = library
        self._memory = StepMemoryStruct()
        self._shares = False
        self._kv_cache: Tensor | None = None
        self._tables: npt.NDArray[np.int64] | None = None
        self._logits, self._best, self._finite = (
            torch.empty(0, head.outputs),
            np.empty(0, np.int32),
            np.empty(0, np.bool_),
        )
        self._keep: list[object] = [cos, sin, embedding, final_norm]
        matrices = [m for layer in layers for m in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        matrices.append(head)
        arena = Arena(sum(Arena.size_of(library, m.kind, m.outputs, m.inputs) for m in matrices))
        sizes_by_kind = Counter[str]()
        for matrix in matrices:
            sizes_by_kind[matrix.kind] += matrix.outputs * matrix.inputs
        self.weight_format = sizes_by_kind.most_common(1)[0][0]

        # Rows are copied into the arena; of a layer only norms and biases need to live on.
        def pack(matrix: Matrix, bias: Tensor | None = None) -> PackedLinear:
            packed = PackedLinear(library, matrix, bias, arena)
            self._keep.append(packed)
            return packed

        structs = (LayerStruct * len(layers))()
        for struct, layer in zip(structs, layers, strict=True):
            norms = (layer.input_norm, layer.post_norm, layer.query_norm, layer.key_norm)
            self._keep.append(norms)
            struct.input_norm, struct.post_norm = address(layer.input_norm), address(layer.post_norm)
            struct.query_norm, struct.key_norm = address(layer.query_norm), address(layer.key_norm)
            struct.qkv = pack(layer.qkv, layer.qkv_bias).struct
            struct.output = pack(layer.output, layer.output_bias).struct
            struct.gate_up = pack(layer.gate_up, layer.gate_up_bias).struct
            struct.down = pack(layer.down, layer.down_bias).struct
            struct.window = layer.window or 0
        self._network = NetworkStruct(
            num_layers=len(layers),
            hidden=layers[0].output.outputs,
            inner=layers[0].down.inputs,
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            eps=sizes.norm_eps,
            layers=structs,
            cos=address(cos),
            sin=address(sin),
            embedding=address(embedding),
            final_norm=address(final_norm),
            head=pack(head).struct,
        )
        self._addresses = ctypes.addressof(self._network), ctypes.addressof(self._memory)

    def run(self, batch: StepBatch, kv_cache: Tensor) -> StepLogits:
        """One step over a bfloat16 cache, in one call of the kernels."""
        num_samples = len(batch.token_ids if batch.sources is None else batch.sources) // 4
        if kv_cache is not self._kv_cache or batch.block_tables is not self._tables:
            self._memory.paged = paged_struct(kv_cache)
            self._memory.paged.block_tables = batch.block_tables.ctypes.data
            self._memory.paged.table_stride = batch.block_tables.shape[1]
            self._kv_cache, self._tables = kv_cache, batch.block_tables
        num_sequences = len(batch.rows) // 4
        if num_samples > len(self._best) or num_sequences > len(self._finite):
            self._make_room(num_samples, num_sequences)
        if batch.shared_runs is not None or self._shares:
            self._memory.paged.share(batch.shared_runs)
            self._shares = batch.shared_runs is not None
        failed = self._library.run(*self._addresses, batch, num_samples)
        return StepLogits(
            self._logits,
            self._best[:num_samples],
            tuple(np.flatnonzero(~self._finite[:num_sequences]).tolist()) if failed else (),
        )

    def _make_room(self, num_samples: int, num_sequences: int) -> None:
        """Memory for results, kept from step to step and doubled when it grows: the system's new pages cost more than
        the product that fills them, and here, where caches are full of weights, every line of Python costs
        microseconds."""
        if num_samples > len(self._best):
            samples = max(num_samples, 2 * len(self._best))
            self._logits = torch.empty(samples, self._logits.shape[1])
            self._best = np.empty(samples, dtype=np.int32)
            self._memory.logits, self._memory.best = self._logits.data_ptr(), self._best.ctypes.data
        if num_sequences > len(self._finite):
            self._finite = np.empty(max(num_sequences, 2 * len(self._finite)), dtype=np.bool_)
            self._memory.finite = self._finite.ctypes.data


def interleave_gate_up(gate: Tensor, up: Tensor) -> Tensor:
    """Rows of [F, …] and [F, …] in alternating runs of `GATE_UP_RUN` → [2 * F, …]; F must be a multiple of it."""
    runs = (-1, GATE_UP_RUN, *gate.shape[1:])
    return torch.stack((gate.reshape(runs), up.reshape(runs)), dim=1).reshape(-1, *gate.shape[1:])
