"""Folders that we cannot run are refused with the reason, never run wrongly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from chatserve.errors import ModelLoadError
from chatserve.model.architecture import Architecture
from tests.model.tiny import SIZES, edit_config, load_model, write_model

LLAMA = {"model_type": "llama", **SIZES}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "gpt2"}, "not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn' is not supported"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "Partial rotary"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor must be a positive number"),
        ({"hidden_act": "gelu"}, "'gelu' is not supported"),
        ({"quantization_config": {"bits": 4}}, "Quantised"),
        ({"num_key_value_heads": 4}, "multiple of num_key_value_heads"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers must be a positive integer"),
        ({"head_dim": 7}, "head_dim .* must be even"),
        ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["x"]}, "layer_types must list 3"),
    ],
)
def test_a_config_we_cannot_run_is_refused_by_name(changes: dict[str, Any], reason: str) -> None:
    """The message names the key or the value at fault."""
    with pytest.raises(ModelLoadError, match=reason):
        Architecture.from_hf_config({**LLAMA, **changes})


def test_older_and_newer_rope_keys_mean_the_same() -> None:
    """transformers 5 moved rope_theta and the scaling into one section; both spellings are read alike."""
    old = Architecture.from_hf_config({**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}})
    new = Architecture.from_hf_config(
        {**LLAMA, "rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}}
    )
    assert old == new
    assert old.rope_theta == 5e5


def test_a_folder_without_config_or_weights_says_so(tmp_path: Path) -> None:
    """The two files everything starts from are named when they are missing."""
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(ModelLoadError, match=r"no \*\.safetensors weights"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="cannot be read as JSON"):
        load_model(tmp_path)


def test_damaged_or_foreign_weights_are_refused(tmp_path: Path) -> None:
    """Truncated files, missing shards, missing tensors and wrong shapes are load errors, not crashes later."""
    write_model(tmp_path, "llama")
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()

    tensors = load_file(weights)
    tensors.pop("model.norm.weight")
    save_file(tensors, weights)
    with pytest.raises(ModelLoadError, match=r"lack the tensor 'model\.norm\.weight'"):
        load_model(tmp_path)

    tensors["model.norm.weight"] = torch.ones(3)
    save_file(tensors, weights)
    with pytest.raises(ModelLoadError, match=r"has shape \(3,\)"):
        load_model(tmp_path)

    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelLoadError, match="cannot be read"):
        load_model(tmp_path)

    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../gone.safetensors"}}))
    with pytest.raises(ModelLoadError, match=r"lacks gone\.safetensors"):
        load_model(tmp_path)


def test_an_untied_model_without_a_head_is_refused(tmp_path: Path) -> None:
    """A config that forgets to say the embeddings are tied must not give a model with a random head."""
    write_model(tmp_path, "llama-tied")
    edit_config(tmp_path, tie_word_embeddings=False)
    with pytest.raises(ModelLoadError, match=r"lack lm_head\.weight"):
        load_model(tmp_path)
