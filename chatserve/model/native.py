"""A model folder's weights as the network that the compiled CPU kernels run.

Knows tensor names and which quantised blocks a folder holds; decides per matrix whether stored blocks are used,
values are quantised now, or kept in bfloat16. `chatserve.model.transformer` is the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from chatserve_kernels.cpu.decoder import GATE_UP_RUN, LayerWeights, NativeDecoder, Sizes, interleave_gate_up
from chatserve_kernels.cpu.library import Library
from chatserve_kernels.cpu.weights import BLOCK, Matrix, quantise
from torch import Tensor

from chatserve.model.architecture import Architecture
from chatserve.model.rope import rope_tables
from chatserve.model.weights import BLOCKS_FILE, Checkpoint

Quantization = Literal["auto", "none", "q4_1", "q8_0"]

# Of a quantised model, what is not stored in a format the kernels have is rounded to this one: errors well below those
# of bfloat16 activations. So is the head.
_FALLBACK = "q8_0"

Parts = tuple[tuple[str, int], ...]


def make_decoder(
    checkpoint: Checkpoint,
    architecture: Architecture,
    embedding: Tensor,
    library: Library,
    quantization: Quantization,
    num_positions: int,
) -> NativeDecoder | None:
    """The network with weights in the format that is asked for or (``auto``) stored, else in bfloat16; ``None`` where
    its sizes do not allow either."""
    if architecture.intermediate_size % GATE_UP_RUN:
        return None
    quantised = checkpoint.has_blocks if quantization == "auto" else quantization != "none"
    if not (quantised and _has_whole_blocks(architecture)):
        reader = head_reader = _Reader(checkpoint, "bf16")
    elif quantization == "auto":
        reader = head_reader = _Reader(checkpoint, _FALLBACK, stored=True)
    else:
        reader, head_reader = _Reader(checkpoint, quantization), _Reader(checkpoint, _FALLBACK)
    layers = [_layer(reader, architecture, layer) for layer in range(architecture.num_layers)]
    tied = architecture.tie_word_embeddings
    head = "model.embed_tokens" if tied else "lm_head"
    cos, sin = rope_tables(architecture, num_positions, torch.float32)
    return NativeDecoder(
        library,
        Sizes(architecture.num_heads, architecture.num_kv_heads, architecture.head_dim, architecture.rms_norm_eps),
        embedding,
        layers,
        reader.vector("model.norm.weight", architecture.hidden_size),
        head_reader.matrix(((head, architecture.vocab_size),), architecture.hidden_size),
        cos[:, 0].contiguous(),
        sin[:, 0].contiguous(),
    )


def is_quantised(folder: Path, quantization: Quantization) -> bool:
    """Whether the kernels would multiply this folder's weights in a quantised format, sizes permitting."""
    return (folder / BLOCKS_FILE).is_file() if quantization == "auto" else quantization != "none"


def _has_whole_blocks(architecture: Architecture) -> bool:
    """Whether every row is a whole number of blocks."""
    inputs = (
        architecture.hidden_size,
        architecture.num_heads * architecture.head_dim,
        architecture.intermediate_size,
    )
    return all(size % BLOCK == 0 for size in inputs)


class _Reader:
    """Matrices of one checkpoint.

    Args:
        kind: format of what is not stored in one that the kernels have.
        stored: whether stored blocks are used.
    """

    def __init__(self, checkpoint: Checkpoint, kind: str, stored: bool = False) -> None:
        self._checkpoint = checkpoint
        self._kind = kind
        self._stored = stored

    def vector(self, name: str, size: int) -> Tensor:
        """float32, in memory of its own."""
        return self._checkpoint.tensor(name, (size,), torch.float32).clone()

    def biases(self, parts: Parts) -> list[Tensor]:
        return [self.vector(f"{name}.bias", size) for name, size in parts]

    def matrix(self, parts: Parts, inputs: int, join: Callable[[list[Tensor]], Tensor] = torch.cat) -> Matrix:
        """Projections of one input as one matrix: their rows one after another, or as ``join`` orders them."""
        outputs = sum(size for _, size in parts)
        if self._stored:
            found = [self._checkpoint.blocks(f"{name}.weight", (size, inputs)) for name, size in parts]
            kinds = {blocks and blocks[0] for blocks in found}
            if len(kinds) == 1 and (kind := kinds.pop()) is not None:
                return Matrix(kind, outputs, inputs, lambda: join([blocks[1] for blocks in found if blocks]))
        return Matrix(self._kind, outputs, inputs, lambda: join([self._rows(*part, inputs) for part in parts]))

    def _rows(self, name: str, outputs: int, inputs: int) -> Tensor:
        if self._kind == "bf16":
            return self._checkpoint.tensor(f"{name}.weight", (outputs, inputs), torch.bfloat16)
        weight = self._checkpoint.tensor(f"{name}.weight", (outputs, inputs), torch.float32)
        return quantise(weight, self._kind).blocks


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
    return LayerWeights(
        input_norm=reader.vector(f"{prefix}.input_layernorm.weight", hidden),
        qkv=reader.matrix(qkv, hidden),
        qkv_bias=torch.cat(reader.biases(qkv)) if architecture.qkv_bias else None,
        query_norm=reader.vector(f"{prefix}.self_attn.q_norm.weight", dim) if architecture.qk_norm else None,
        key_norm=reader.vector(f"{prefix}.self_attn.k_norm.weight", dim) if architecture.qk_norm else None,
        output=reader.matrix(output, query),
        output_bias=reader.biases(output)[0] if architecture.output_bias else None,
        post_norm=reader.vector(f"{prefix}.post_attention_layernorm.weight", hidden),
        gate_up=reader.matrix(gate_up, hidden, lambda halves: interleave_gate_up(*halves)),
        gate_up_bias=interleave_gate_up(*reader.biases(gate_up)) if architecture.mlp_bias else None,
        down=reader.matrix(down, inner),
        down_bias=reader.biases(down)[0] if architecture.mlp_bias else None,
        window=architecture.windows[layer],
    )
