"""What a model folder's ``config.json`` says, reduced to the numbers a decoder needs.

Knows the Hugging Face keys of the families we run (llama, mistral, qwen2, qwen3), their defaults, and what we must
refuse. Imports no torch. `chatserve.model.transformer` builds a network from an `Architecture`, the engine reads
sizes from it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from chatserve.errors import ModelLoadError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


class RopeScaling(msgspec.Struct, frozen=True):
    """How rotary frequencies are stretched for longer contexts.

    Attributes:
        kind: ``none``, ``linear`` (every frequency divided by ``factor``), or ``llama3`` (low frequencies divided,
            high ones kept, a ramp between).
        original_max_positions: context of the first training; llama3 only, like the two factors.
    """

    kind: Literal["none", "linear", "llama3"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


class Architecture(msgspec.Struct, frozen=True):
    """A pre-norm decoder with rotary attention and a gated SiLU feed-forward.

    Attributes:
        qkv_bias: bias on the query, key and value projections.
        output_bias: bias on the attention output projection.
        mlp_bias: bias on the feed-forward projections.
        qk_norm: RMS norm of every query and key head, before the rotation.
        windows: attention window of each layer in tokens, ``None`` for full attention.
        max_positions: positions the model was made for.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    max_positions: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]

    @classmethod
    def from_folder(cls, folder: Path) -> Architecture:
        """Read ``folder/config.json``.

        Raises:
            ModelLoadError: no such file, not JSON, or a model we cannot run faithfully.
        """
        path = folder / "config.json"
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ModelLoadError(f"{folder} has no config.json; expected a Hugging Face model folder.") from None
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{path} cannot be read as JSON: {error}.") from error
        if not isinstance(raw, dict):
            raise ModelLoadError(f"{path} must hold a JSON object.")
        return cls.from_hf_config(raw)

    @classmethod
    def from_hf_config(cls, raw: Mapping[str, Any]) -> Architecture:
        """Interpret the keys of a Hugging Face configuration. Raises `ModelLoadError` for what we cannot run."""
        family = raw.get("model_type")
        if family not in FAMILIES:
            raise ModelLoadError(f"Models of type {family!r} are not supported; chatserve runs {', '.join(FAMILIES)}.")
        if raw.get("quantization_config"):
            raise ModelLoadError("Quantised safetensors are not supported; use the unquantised folder or a GGUF file.")
        if raw.get("hidden_act", "silu") != "silu":
            raise ModelLoadError(f"Activation {raw['hidden_act']!r} is not supported; only silu is.")
        num_layers = _integer(raw, "num_hidden_layers")
        num_heads = _integer(raw, "num_attention_heads")
        hidden_size = _integer(raw, "hidden_size")
        num_kv_heads = _integer(raw, "num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise ModelLoadError(
                f"num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads ({num_kv_heads})."
            )
        head_dim = _integer(raw, "head_dim", 128 if family == "qwen3" else hidden_size // num_heads)
        if head_dim % 2:
            raise ModelLoadError(f"head_dim ({head_dim}) must be even for rotary embeddings.")
        attention_bias = bool(raw.get("attention_bias", False))
        max_positions = _integer(raw, "max_position_embeddings", 2048)
        return cls(
            family=family,
            vocab_size=_integer(raw, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_integer(raw, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
            rope_theta=_number(_rope_parameters(raw), "rope_theta", _number(raw, "rope_theta", 10000.0)),
            rope_scaling=_rope_scaling(_rope_parameters(raw), max_positions),
            max_positions=max_positions,
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2" or attention_bias,
            output_bias=family in ("llama", "qwen3") and attention_bias,
            mlp_bias=family == "llama" and bool(raw.get("mlp_bias", False)),
            qk_norm=family == "qwen3",
            windows=_windows(family, raw, num_layers),
        )

    @property
    def kv_elements_per_token(self) -> int:
        """Key and value elements of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


def _integer(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelLoadError(f"config.json: {key} must be a positive integer; got {value!r}.")
    return value


def _number(raw: Mapping[str, Any], key: str, default: float) -> float:
    value = raw.get(key)
    if value is None:
        value = default
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
        raise ModelLoadError(f"config.json: {key} must be a positive number; got {value!r}.")
    return float(value)


def _rope_parameters(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rope section under its present name (``rope_parameters``) or its older one (``rope_scaling``)."""
    for key in ("rope_parameters", "rope_scaling"):
        section = raw.get(key)
        if isinstance(section, dict):
            return section
    return {}


def _rope_scaling(section: Mapping[str, Any], max_positions: int) -> RopeScaling:
    kind = section.get("rope_type", section.get("type", "default"))
    if section.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelLoadError("Partial rotary embeddings are not supported.")
    if kind == "default":
        return RopeScaling()
    if kind == "linear":
        return RopeScaling("linear", _number(section, "factor", 1.0))
    if kind == "llama3":
        scaling = RopeScaling(
            "llama3",
            _number(section, "factor", 1.0),
            _number(section, "low_freq_factor", 1.0),
            _number(section, "high_freq_factor", 4.0),
            _integer(section, "original_max_position_embeddings", max_positions),
        )
        if scaling.high_freq_factor <= scaling.low_freq_factor:
            raise ModelLoadError("config.json: rope high_freq_factor must exceed low_freq_factor.")
        return scaling
    raise ModelLoadError(f"Rope scaling of type {kind!r} is not supported; chatserve runs default, linear and llama3.")


def _windows(family: str, raw: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Attention window of every layer. Mistral's window defaults to 4096 tokens where the key is absent."""
    full: tuple[int | None, ...] = (None,) * num_layers
    if family == "llama":
        return full
    if family == "mistral":
        window = raw.get("sliding_window", 4096)
        return full if window is None else (_integer(raw, "sliding_window", 4096),) * num_layers
    if not raw.get("use_sliding_window", False) or raw.get("sliding_window", 4096) is None:
        return full
    window = _integer(raw, "sliding_window", 4096)
    kinds = raw.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            raise ModelLoadError(f"config.json: layer_types must list {num_layers} layers.")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    first = raw.get("max_window_layers", 28)
    return tuple(window if layer >= first else None for layer in range(num_layers))
