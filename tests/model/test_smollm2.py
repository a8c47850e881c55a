"""The model we ship with, converted from its GGUF, against transformers on the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from chatserve.model import store
from tests.model.tiny import all_logits, load_model

PROMPTS = [
    [1, 4093, 198, 2683, 359, 253, 5356, 5646, 11173, 2, 198, 1, 4093, 198, 19556, 17, 2],
    list(range(500, 540)),
]


@pytest.fixture(scope="module")
def folder() -> Path:
    return store.pull("smollm2-135m").path


def test_logits_and_greedy_tokens_equal_those_of_transformers(folder: Path) -> None:
    """In float32, logits agree to rounding, and so 16 greedy tokens are the best ones up to rounding."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ours = load_model(folder)
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        continued = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, min_new_tokens=16, do_sample=False
        )[0].tolist()
        with torch.no_grad():
            expected = theirs(torch.tensor([continued])).logits[0]
        logits = all_logits(ours, [continued])[0].clone()
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=5e-3)
        # `min_new_tokens` masks the end token in generate, so the same is done here.
        logits[:, 2] = -torch.inf
        made = logits[len(prompt) - 1 : -1]
        chosen = made.gather(1, torch.tensor(continued[len(prompt) :])[:, None])[:, 0]
        assert (made.amax(-1) - chosen).max() < 1e-2


def test_bfloat16_picks_the_same_tokens_but_for_near_ties(folder: Path) -> None:
    """In the dtype that serves on CPUs, a different best token was never better by more than rounding."""
    exact = all_logits(load_model(folder), PROMPTS)
    rounded = all_logits(load_model(folder, torch.bfloat16), PROMPTS, torch.bfloat16)
    for a, b in zip(exact, rounded, strict=True):
        chosen = a.gather(1, b.argmax(-1, keepdim=True))[:, 0]
        assert (a.amax(-1) - chosen).max() < 0.5
        assert (a.argmax(-1) == b.argmax(-1)).float().mean() > 0.6  # of random tokens, whose distributions are flat
