"""A model folder's weights as the network that the compiled CPU kernels run.

Knows tensor names and which quantised blocks a folder holds; decides per matrix whether stored blocks are used or
values are quantised now. `chatserve.model.transformer` is the caller.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from chatserve_kernels.cpu.decoder import GATE_UP_RUN, LayerWeights, NativeDecoder, Sizes, interleave_gate_up
from chatserve_kernels.cpu.library import Library
from chatserve_kernels.cpu.weights import BLOCK, QuantisedRows, quantise
from torch import Tensor

from chatserve.model.architecture import Architecture
from chatserve.model.rope import rope_tables
from chatserve.model.weights import BLOCKS_FILE, Checkpoint

Quantization = Literal["auto", "none", "q4_1", "q8_0"]

# What is not stored in a format the kernels have is rounded to this one: errors well below bfloat16 activations'.
_FALLBACK = "q8_0"


def make_decoder(
    checkpoint: Checkpoint,
    architecture: Architecture,
    library: Library,
    quantization: Quantization,
    num_positions: int,
) -> NativeDecoder | None:
    """The quantised network; ``None`` where none is asked for, stored (for ``auto``), or possible for its sizes."""
    if quantization == "none" or (quantization == "auto" and not checkpoint.has_blocks):
        return None
    if not _fits(architecture):
        return None
    reader = _Reader(checkpoint, quantization)
    layers = [_layer(reader, architecture, layer) for layer in range(architecture.num_layers)]
    tied = architecture.tie_word_embeddings
    head = "model.embed_tokens" if tied else "lm_head"
    cos, sin = rope_tables(architecture, num_positions, torch.float32)
    return NativeDecoder(
        library,
        Sizes(architecture.num_heads, architecture.num_kv_heads, architecture.head_dim, architecture.rms_norm_eps),
        layers,
        reader.vector("model.norm.weight", architecture.hidden_size),
        reader.rows(((head, architecture.vocab_size),), architecture.hidden_size, kind=_FALLBACK),
        cos[:, 0].contiguous(),
        sin[:, 0].contiguous(),
    )


def is_quantised(folder: Path, quantization: Quantization) -> bool:
    """Whether the kernels would multiply this folder's weights in a quantised format, sizes permitting."""
    return (folder / BLOCKS_FILE).is_file() if quantization == "auto" else quantization != "none"


def _fits(architecture: Architecture) -> bool:
    inputs = (
        architecture.hidden_size,
        architecture.num_heads * architecture.head_dim,
        architecture.intermediate_size,
    )
    return all(size % BLOCK == 0 for size in inputs) and architecture.intermediate_size % GATE_UP_RUN == 0


class _Reader:
    """Matrices of one checkpoint as blocks."""

    def __init__(self, checkpoint: Checkpoint, quantization: Quantization) -> None:
        self._checkpoint = checkpoint
        self._kind = None if quantization == "auto" else quantization

    def vector(self, name: str, size: int) -> Tensor:
        """float32, in memory of its own."""
        return self._checkpoint.tensor(name, (size,), torch.float32).clone()

    def biases(self, parts: tuple[tuple[str, int], ...]) -> list[Tensor]:
        return [self.vector(f"{name}.bias", size) for name, size in parts]

    def rows(self, parts: tuple[tuple[str, int], ...], inputs: int, kind: str | None = None) -> QuantisedRows:
        """Projections of one input, their rows one after another."""
        matrices = self.matrices(parts, inputs, kind)
        return QuantisedRows(matrices[0].kind, torch.cat([matrix.blocks for matrix in matrices]))

    def matrices(self, parts: tuple[tuple[str, int], ...], inputs: int, kind: str | None = None) -> list[QuantisedRows]:
        """The projections in one common format: the stored one, or ``kind`` (or the configured one)."""
        if self._kind is None:
            stored = [self._checkpoint.blocks(f"{name}.weight", (size, inputs)) for name, size in parts]
            matrices = [QuantisedRows(*found) for found in stored if found is not None]
            if len(matrices) == len(parts) and len({matrix.kind for matrix in matrices}) == 1:
                return matrices
        kind = kind or self._kind or _FALLBACK
        return [
            quantise(self._checkpoint.tensor(f"{name}.weight", (size, inputs), torch.float32), kind)
            for name, size in parts
        ]


def _layer(reader: _Reader, architecture: Architecture, layer: int) -> LayerWeights:
    prefix = f"model.layers.{layer}"
    hidden, inner, dim = architecture.hidden_size, architecture.intermediate_size, architecture.head_dim
    query, key_value = architecture.num_heads * dim, architecture.num_kv_heads * dim
    qkv = tuple(
        (f"{prefix}.self_attn.{name}_proj", size) for name, size in (("q", query), ("k", key_value), ("v", key_value))
    )
    output = ((f"{prefix}.self_attn.o_proj", hidden),)
    gate_up = ((f"{prefix}.mlp.gate_proj", inner), (f"{prefix}.mlp.up_proj", inner))
    down = ((f"{prefix}.mlp.down_proj", hidden),)
    gate, up = reader.matrices(gate_up, hidden)
    return LayerWeights(
        input_norm=reader.vector(f"{prefix}.input_layernorm.weight", hidden),
        qkv=reader.rows(qkv, hidden),
        qkv_bias=torch.cat(reader.biases(qkv)) if architecture.qkv_bias else None,
        query_norm=reader.vector(f"{prefix}.self_attn.q_norm.weight", dim) if architecture.qk_norm else None,
        key_norm=reader.vector(f"{prefix}.self_attn.k_norm.weight", dim) if architecture.qk_norm else None,
        output=reader.rows(output, query),
        output_bias=reader.biases(output)[0] if architecture.output_bias else None,
        post_norm=reader.vector(f"{prefix}.post_attention_layernorm.weight", hidden),
        gate_up=QuantisedRows(gate.kind, interleave_gate_up(gate.blocks, up.blocks)),
        gate_up_bias=interleave_gate_up(*reader.biases(gate_up)) if architecture.mlp_bias else None,
        down=reader.rows(down, inner),
        down_bias=reader.biases(down)[0] if architecture.mlp_bias else None,
        window=architecture.windows[layer],
    )
