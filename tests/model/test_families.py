"""Every supported family computes what transformers computes from the same folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.model.tiny import SIZES, VARIANTS, all_logits, load_model, write_model


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(variant: str, tmp_path: Path) -> None:
    """At every position of a ragged batch, in float32: no bias, norm, window, scaling or tying is left out."""
    theirs = write_model(tmp_path, variant)
    ours = load_model(tmp_path)
    generator = torch.Generator().manual_seed(5)
    prompts = [
        torch.randint(3, SIZES["vocab_size"], (length,), generator=generator).tolist() for length in (60, 1, 17, 16)
    ]
    for prompt, logits in zip(prompts, all_logits(ours, prompts), strict=True):
        with torch.no_grad():
            expected = theirs(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
        assert expected.std() > 0.05


def test_shards_load_like_one_file(tmp_path: Path) -> None:
    """A folder of many shards and one of a single file give bit-equal logits."""
    write_model(tmp_path / "one", "llama")
    write_model(tmp_path / "many", "llama", max_shard_size="50KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    prompts = [[5, 9, 100, 3]]
    one, many = (all_logits(load_model(tmp_path / name), prompts)[0] for name in ("one", "many"))
    assert torch.equal(one, many)


def test_bfloat16_differs_by_rounding_only(tmp_path: Path) -> None:
    """The packed bfloat16 projections compute the same network as the float32 ones."""
    write_model(tmp_path, "llama")
    prompts = [list(range(3, 40)), [7, 8]]
    exact = all_logits(load_model(tmp_path), prompts)
    rounded = all_logits(load_model(tmp_path, torch.bfloat16), prompts, torch.bfloat16)
    for a, b in zip(exact, rounded, strict=True):
        assert (a - b).abs().max() < 0.1 * a.abs().max()
