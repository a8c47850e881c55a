"""The invariant mode: what a sequence gets depends on nothing but itself."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from chatserve_kernels.cpu.backend import NativeBackend
from chatserve_kernels.cpu.build import supported_isas
from chatserve_kernels.interface import SharedRuns, StepBatch, kv_cache_shape
from torch import Tensor

from chatserve.model.architecture import Architecture
from chatserve.model.native import Quantization
from chatserve.model.transformer import Transformer
from tests.kernels.native import library
from tests.model.tiny import error, int32, write_model

BLOCK_SIZE = 16
LENGTHS = (300, 130, 17, 150, 260, 41, 16)
SHARED_BLOCKS = 7
SHARED_END = SHARED_BLOCKS * BLOCK_SIZE


@torch.inference_mode()
def logits_of(model: Transformer, prompts: list[list[int]], rng: random.Random) -> list[Tensor]:
    """Logits at every position of every prompt, computed in chunks and batches of ``rng``'s choice; prompts long enough
    begin with the same blocks, which the first of them computes."""
    architecture = model.architecture
    tables = np.arange(len(prompts) * 32).reshape(-1, 32)
    sharing = [i for i, prompt in enumerate(prompts) if len(prompt) > SHARED_END]
    computed = [0] * len(prompts)
    for i in sharing[1:]:
        tables[i, :SHARED_BLOCKS] = tables[sharing[0], :SHARED_BLOCKS]
    cache = torch.zeros(
        kv_cache_shape(tables.size, architecture.num_layers, architecture.num_kv_heads, BLOCK_SIZE, 32),
        dtype=torch.bfloat16,
    )
    found: list[list[Tensor]] = [[] for _ in prompts]
    while any(len(prompt) > done for prompt, done in zip(prompts, computed, strict=True)):
        ready = [i for i in range(len(prompts)) if computed[i] < len(prompts[i])]
        chosen = rng.sample(ready, rng.randint(1, len(ready)))
        counts = []
        for i in chosen:
            # Every other chunk ends where the shared part does at the latest, so that there are steps that share it.
            end = rng.choice([SHARED_END, LENGTHS[0]]) if computed[i] < SHARED_END else LENGTHS[0]
            counts.append(min(len(prompts[i]) - computed[i], end - computed[i], rng.choice([1, 2, 8, 33, 64, 300])))
        ends = [computed[i] + c for i, c in zip(chosen, counts, strict=True)]
        members = [k for k, i in enumerate(chosen) if i in sharing and computed[i] >= SHARED_END]
        batch = StepBatch(
            block_tables=tables,
            rows=int32(chosen),
            num_computed=int32(computed[i] for i in chosen),
            num_new=int32(counts),
            token_ids=int32(
                token for i, end in zip(chosen, ends, strict=True) for token in prompts[i][computed[i] : end]
            ),
            sources=None,
            shared_runs=SharedRuns(int32([SHARED_BLOCKS]), int32([0, len(members)]), int32(members))
            if len(members) > 1
            else None,
        )
        for i, logits in zip(chosen, model.run(batch, cache).logits.clone().split(counts), strict=True):
            found[i].append(logits)
        for i, end in zip(chosen, ends, strict=True):
            computed[i] = end
    return [torch.cat(parts) for parts in found]


@pytest.mark.parametrize(
    ("variant", "quantization"), [("llama", "q4_1"), ("mistral-window", "q8_0"), ("llama-biased", "none")]
)
@pytest.mark.parametrize("isa", supported_isas())
def test_logits_are_bit_equal_in_any_batch_and_chunking(
    tmp_path: Path, isa: str, variant: str, quantization: Quantization
) -> None:
    """Alone and in one piece, or in whatever batches and chunks: every logit has the same bits. Without the mode and
    without a window, which forbids sharing, they differ, by rounding: there is something to see."""
    write_model(tmp_path, variant, **SIZES)
    rng = random.Random(7)
    beginning = [rng.randrange(3, 100) for _ in range(SHARED_END)]
    prompts = [(beginning + [rng.randrange(3, 100) for _ in range(300)])[:n] for n in LENGTHS]
    backends = [NativeBackend(library(isa, 2, deterministic)) for deterministic in (True, False)]
    differences = []
    for backend in backends:
        model = Transformer(tmp_path, Architecture.from_folder(tmp_path), backend, torch.bfloat16, 512, quantization)
        assert model.is_native
        alone = [logits_of(model, [prompt], WholePrompts())[0] for prompt in prompts]
        differences.append(0)
        for seed in range(3):
            together = logits_of(model, prompts, random.Random(seed))
            differences[-1] += sum(not torch.equal(a, b) for a, b in zip(alone, together, strict=True))
            assert max(error([b], [a]) for a, b in zip(alone, together, strict=True)) < 0.02
    assert differences[0] == 0
    assert differences[1] > 0 or variant == "mistral-window"


SIZES = {"hidden_size": 96, "intermediate_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32}


class WholePrompts(random.Random):
    """Always all there is."""

    def choice(self, options):  # type: ignore[no-untyped-def]
        return max(options)
