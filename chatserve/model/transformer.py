"""The decoder network of every supported family: one forward over a ragged batch of prefills and decodes.

Families differ only in what `Architecture` says (biases, head norms, windows), so there is one class. Knows tensors
and the kernel interface; knows no requests or sampling. `chatserve.worker.model_runner` calls it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from chatserve_kernels.cpu.backend import NativeBackend
from chatserve_kernels.interface import AttentionStep, Backend, StepBatch, StepLogits
from torch import Tensor
from torch.nn import functional

from chatserve.errors import ModelLoadError
from chatserve.model.architecture import Architecture
from chatserve.model.linear import Linear
from chatserve.model.native import Quantization, make_decoder
from chatserve.model.rope import rope_tables
from chatserve.model.step_layout import int64, lay_out
from chatserve.model.weights import Checkpoint

# A long prefill runs its feed-forward in pieces of this many tokens: the wide activations then stay in the L2 cache.
_FEED_FORWARD_ROWS = 256


class Transformer:
    """Weights and forward pass of one model.

    Args:
        num_positions: length of the rotary tables; positions must stay below it.
        quantization: with a native backend and bfloat16, the format that its kernels hold the weights in.

    Raises:
        ModelLoadError: weights missing, damaged, or not those that ``config.json`` describes.
    """

    def __init__(
        self,
        folder: Path,
        architecture: Architecture,
        backend: Backend,
        dtype: torch.dtype,
        num_positions: int,
        quantization: Quantization = "auto",
    ) -> None:
        self.architecture = architecture
        self._backend = backend
        vocabulary = (architecture.vocab_size, architecture.hidden_size)
        self._decoder = None
        with Checkpoint(folder) as checkpoint:
            self._embedding = checkpoint.tensor("model.embed_tokens.weight", vocabulary, dtype)
            if isinstance(backend, NativeBackend) and dtype == torch.bfloat16:
                self._decoder = make_decoder(
                    checkpoint, architecture, self._embedding, backend.library, quantization, num_positions
                )
            if self._decoder is not None:
                return
            self._cos, self._sin = rope_tables(architecture, num_positions, dtype)
            self._layers = [
                DecoderLayer(checkpoint, architecture, layer, backend, dtype)
                for layer in range(architecture.num_layers)
            ]
            self._norm = checkpoint.tensor("model.norm.weight", (architecture.hidden_size,), dtype)
            head = self._embedding
            if "lm_head.weight" in checkpoint and not architecture.tie_word_embeddings:
                head = checkpoint.tensor("lm_head.weight", vocabulary, dtype)
            elif not architecture.tie_word_embeddings:
                raise ModelLoadError(f"Weights in {folder} lack lm_head.weight, and tie_word_embeddings is not set.")
            self._head = Linear(head)

    @property
    def is_native(self) -> bool:
        """Whether the network runs in the compiled kernels, one call per step."""
        return self._decoder is not None

    @property
    def weight_format(self) -> str:
        """What most weights are in, in memory: a block format of GGUF's, or a dtype."""
        if self._decoder is None or self._decoder.weight_format == "bf16":
            return str(self._embedding.dtype).removeprefix("torch.")
        return self._decoder.weight_format

    def run(self, batch: StepBatch, kv_cache: Tensor) -> StepLogits:
        """Compute one step's tokens, store their keys and values, and give the logits that are wanted.

        Args:
            batch: its positions must stay below ``num_positions``.
            kv_cache: of the dtype of the model.
        """
        if self._decoder is not None:
            return self._decoder.run(batch, kv_cache)
        return self._run_operators(batch, kv_cache)

    @torch.inference_mode()
    def _run_operators(self, batch: StepBatch, kv_cache: Tensor) -> StepLogits:
        positions, metadata = lay_out(batch, kv_cache.shape[4])
        hidden = self._forward(
            torch.from_numpy(int64(batch.token_ids)),
            torch.from_numpy(positions),
            self._backend.begin_step(metadata, kv_cache),
        )
        # A sum is finite where all its terms are; every token of a sequence counts, not only the last.
        starts = metadata.query_start_loc.numpy()
        finite = np.logical_and.reduceat(np.isfinite(hidden.float().sum(-1).numpy()), starts[:-1])
        if not finite.all():
            # Whoever gets these blocks next must read finite padding.
            slots = metadata.slot_mapping.numpy()[~np.repeat(finite, np.diff(starts))]
            self._backend.clear_slots(kv_cache, torch.from_numpy(slots))
        if batch.sources is None:
            sources = np.repeat(np.arange(len(finite)), np.diff(starts))
        else:
            sources = int64(batch.sources)
            hidden = hidden[torch.from_numpy(starts[sources + 1] - 1)]
        logits = self._logits(hidden)
        best = self._backend.argmax(logits).numpy()
        broken = ~np.isfinite(logits.numpy()[np.arange(len(best)), best])  # NaN counts as the best
        if broken.any():
            logits[torch.from_numpy(broken)], best[broken] = 0.0, 0
            finite[sources[broken]] = False
        return StepLogits(logits, best, tuple(np.flatnonzero(~finite).tolist()))

    def _forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionStep) -> Tensor:
        """int64 [T], int64 [T] → the residual stream after the last layer, [T, hidden_size]."""
        cos = self._cos.index_select(0, positions)
        sin = self._sin.index_select(0, positions)
        hidden = functional.embedding(token_ids, self._embedding)
        for layer in self._layers:
            hidden = layer.forward(hidden, cos, sin, attention)
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        """hidden [s, hidden_size] → float32 [s, vocab_size]."""
        normed = self._backend.rms_norm(hidden, self._norm, self.architecture.rms_norm_eps)
        return self._head(normed).float()


class DecoderLayer:
    """Attention and feed-forward of one layer, with query/key/value and gate/up each fused into one projection."""

    def __init__(
        self, checkpoint: Checkpoint, architecture: Architecture, layer: int, backend: Backend, dtype: torch.dtype
    ) -> None:
        self._layer = layer
        self._backend = backend
        self._eps = architecture.rms_norm_eps
        self._window = architecture.windows[layer]
        self._num_heads = architecture.num_heads
        self._num_kv_heads = architecture.num_kv_heads
        self._head_dim = architecture.head_dim
        self._scale = architecture.head_dim**-0.5

        hidden, inner = architecture.hidden_size, architecture.intermediate_size
        query, key_value = self._num_heads * self._head_dim, self._num_kv_heads * self._head_dim
        prefix = f"model.layers.{layer}"

        def vector(name: str, size: int) -> Tensor:
            return checkpoint.tensor(f"{prefix}.{name}.weight", (size,), dtype)

        def linear(parts: tuple[tuple[str, int], ...], in_size: int, biased: bool) -> Linear:
            """Projections of one input, their outputs one after another."""
            weights = [checkpoint.tensor(f"{prefix}.{name}.weight", (size, in_size), dtype) for name, size in parts]
            bias = None
            if biased:
                bias = torch.cat([checkpoint.tensor(f"{prefix}.{name}.bias", (size,), dtype) for name, size in parts])
            return Linear(torch.cat(weights), bias)

        self._input_norm = vector("input_layernorm", hidden)
        self._qkv = linear(
            (("self_attn.q_proj", query), ("self_attn.k_proj", key_value), ("self_attn.v_proj", key_value)),
            hidden,
            architecture.qkv_bias,
        )
        self._query_norm = vector("self_attn.q_norm", self._head_dim) if architecture.qk_norm else None
        self._key_norm = vector("self_attn.k_norm", self._head_dim) if architecture.qk_norm else None
        self._output = linear((("self_attn.o_proj", hidden),), query, architecture.output_bias)
        self._post_norm = vector("post_attention_layernorm", hidden)
        self._gate_up = linear((("mlp.gate_proj", inner), ("mlp.up_proj", inner)), hidden, architecture.mlp_bias)
        self._down = linear((("mlp.down_proj", hidden),), inner, architecture.mlp_bias)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, attention: AttentionStep) -> Tensor:
        """hidden [T, hidden_size] → [T, hidden_size]."""
        backend = self._backend
        heads, kv_heads, dim = self._num_heads, self._num_kv_heads, self._head_dim

        normed = backend.rms_norm(hidden, self._input_norm, self._eps)
        qkv = self._qkv(normed).view(-1, heads + 2 * kv_heads, dim)
        if self._query_norm is not None and self._key_norm is not None:
            qkv[:, :heads] = backend.rms_norm(qkv[:, :heads], self._query_norm, self._eps)
            qkv[:, heads : heads + kv_heads] = backend.rms_norm(
                qkv[:, heads : heads + kv_heads], self._key_norm, self._eps
            )
        backend.rotate(qkv[:, : heads + kv_heads], cos, sin)
        attention.write(self._layer, qkv[:, heads:].view(-1, 2, kv_heads, dim))
        attended = attention.attend(self._layer, qkv[:, :heads], self._scale, self._window)
        hidden = self._output.add_to(hidden, attended)
        if len(hidden) <= _FEED_FORWARD_ROWS:
            return self._feed_forward(hidden)
        cuts = list(range(_FEED_FORWARD_ROWS, len(hidden), _FEED_FORWARD_ROWS))
        return torch.cat([self._feed_forward(part) for part in torch.tensor_split(hidden, cuts)])

    def _feed_forward(self, hidden: Tensor) -> Tensor:
        normed = self._backend.rms_norm(hidden, self._post_norm, self._eps)
        return self._down.add_to(hidden, self._backend.silu_mul(self._gate_up(normed)))
