"""Small random models of every family, written by transformers, and their logits by our network."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from chatserve_kernels.interface import StepBatch, StepLogits, kv_cache_shape
from chatserve_kernels.torch_backend import TorchBackend
from torch import Tensor

from chatserve.model.architecture import Architecture
from chatserve.model.transformer import Transformer

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 12}),
    "llama-linear-rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e3, "factor": 4.0}}),
    "llama3-rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 11}),
    "qwen2": ("qwen2", {}),
    "qwen2-windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 16}),
}


def write_model(
    folder: Path, variant: str, *, max_shard_size: str = "1GB", seed: int = 0, **sizes: Any
) -> torch.nn.Module:
    """Write a random model folder with float32 weights; returns transformers' model of it, in eval mode."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, changes = VARIANTS[variant]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**SIZES, **changes, **sizes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        # Fresh biases are zero and norms one: random ones show whether they are used at all.
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif "embed" not in name and "lm_head" not in name:
                parameter.mul_(4.0)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model  # type: ignore[no-any-return]


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of a written ``config.json``; ``None`` removes a key."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def load_model(folder: Path, dtype: torch.dtype = torch.float32, num_positions: int = 256) -> Transformer:
    return Transformer(folder, Architecture.from_folder(folder), TorchBackend(), dtype, num_positions)


@torch.inference_mode()
def all_logits(
    model: Transformer,
    prompts: list[list[int]],
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Logits at every position of every prompt: `run_prompts`."""
    result, _ = run_prompts(model, prompts, dtype)
    return list(result.logits.clone().split([len(prompt) for prompt in prompts]))


def error(logits: list[Tensor], expected: list[Tensor]) -> float:
    """Relative to the expected logits' norm."""
    return float((torch.cat(logits) - torch.cat(expected)).norm() / torch.cat(expected).norm())


@torch.inference_mode()
def run_prompts(model: Transformer, prompts: list[list[int]], dtype: torch.dtype) -> tuple[StepLogits, Tensor]:
    """One ragged step over an empty cache of 4-token blocks that gives logits everywhere; and that cache."""
    block_size = 4
    architecture = model.architecture
    lengths = [len(prompt) for prompt in prompts]
    num_blocks = [-(-length // block_size) for length in lengths]
    tables = np.zeros((len(prompts), max(num_blocks)), dtype=np.int64)
    for i, count in enumerate(num_blocks):
        tables[i, :count] = np.arange(sum(num_blocks[:i]), sum(num_blocks[: i + 1]))
    cache = torch.zeros(
        kv_cache_shape(
            sum(num_blocks), architecture.num_layers, architecture.num_kv_heads, block_size, architecture.head_dim
        ),
        dtype=dtype,
    )
    batch = StepBatch(
        block_tables=tables,
        rows=int32(range(len(prompts))),
        num_computed=int32([0] * len(prompts)),
        num_new=int32(lengths),
        token_ids=int32(token for prompt in prompts for token in prompt),
        sources=None,
    )
    return model.run(batch, cache), cache


def int32(values: Iterable[int]) -> bytes:
    return np.fromiter(values, dtype="<i4").tobytes()
