"""A whole decoder network in one call per step.

Knows weights by role (`LayerWeights`), not by name or file; knows no requests. The model room fills it in and hands
over each step's tokens. Hidden states are float32, keys and values bfloat16.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from chatserve_kernels.cpu.backend import NativeAttentionStep, address
from chatserve_kernels.cpu.library import LayerStruct, Library, NetworkStruct, StepStruct
from chatserve_kernels.cpu.weights import Arena, Matrix, PackedLinear

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

    Args:
        cos, sin: float32 [positions, head_dim]; sin is signed as `chatserve_kernels.interface.Backend.rotate` says.
    """

    def __init__(
        self,
        library: Library,
        sizes: Sizes,
        layers: Sequence[LayerWeights],
        final_norm: Tensor,
        head: Matrix,
        cos: Tensor,
        sin: Tensor,
    ) -> None:
        self._library = library
        self._vocab_size = head.outputs
        self._keep: list[object] = [cos, sin, final_norm]
        matrices = [m for layer in layers for m in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        arena = Arena(sum(Arena.size_of(library, m.kind, m.outputs, m.inputs) for m in (*matrices, head)))

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
            final_norm=address(final_norm),
            head=pack(head).struct,
        )

    def forward(self, hidden: Tensor, positions: Tensor, attention: NativeAttentionStep) -> Tensor:
        """Run every layer.

        Args:
            hidden: float32 [T, hidden], the embedded tokens; overwritten and returned.
            positions: int64 [T].
        """
        step = StepStruct(len(hidden), address(positions), address(attention.slot_mapping), attention.paged)
        self._library.call("cs_forward", ctypes.byref(self._network), ctypes.byref(step), address(hidden))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [s, hidden] → float32 [s, vocabulary]: final norm and head."""
        hidden = hidden.contiguous()
        out = torch.empty(len(hidden), self._vocab_size)
        self._library.call("cs_logits", ctypes.byref(self._network), address(hidden), len(hidden), address(out))
        return out


def interleave_gate_up(gate: Tensor, up: Tensor) -> Tensor:
    """Rows of [F, …] and [F, …] in alternating runs of `GATE_UP_RUN` → [2 * F, …]; F must be a multiple of it."""
    runs = (-1, GATE_UP_RUN, *gate.shape[1:])
    return torch.stack((gate.reshape(runs), up.reshape(runs)), dim=1).reshape(-1, *gate.shape[1:])
