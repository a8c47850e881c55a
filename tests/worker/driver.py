"""Drives a `ModelRunner` by hand-made plans, so that tests choose chunks, blocks, rows and batches themselves."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from chatserve_kernels.cpu.backend import NativeBackend
from chatserve_kernels.interface import Backend
from chatserve_kernels.torch_backend import TorchBackend

from chatserve.model.architecture import Architecture
from chatserve.model.transformer import Transformer
from chatserve.sampling_params import SamplingParams
from chatserve.scheduler.output import ModelRunnerOutput, NewSequence, SchedulerOutput
from chatserve.worker.model_runner import ModelRunner
from tests.kernels.native import library

GREEDY = SamplingParams(temperature=0.0, seed=0)


def int32(values: list[int]) -> bytes:
    return np.array(values, dtype="<i4").tobytes()


def make_runner(
    folder: Path, kernels: str = "torch", *, num_blocks: int = 64, block_size: int = 4, max_num_seqs: int = 8
) -> ModelRunner:
    """By torch in float32, or by the compiled kernels of one instruction set in their invariant mode: either way a
    sequence's numbers do not depend on its chunks and batches."""
    backend: Backend = TorchBackend()
    dtype = torch.float32
    if kernels != "torch":
        backend, dtype = NativeBackend(library(kernels, deterministic=True)), torch.bfloat16
    model = Transformer(folder, Architecture.from_folder(folder), backend, dtype, 256)
    assert model.is_native == (kernels != "torch")
    return ModelRunner(
        model,
        backend,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_blocks=64,
        eos_token_ids=(2,),
        dtype=dtype,
    )


@dataclass
class Run:
    """One sequence's part in a step: its ``num_new`` tokens after ``num_computed``; samples if ``samples``."""

    row: int
    tokens: list[int]
    num_computed: int
    num_new: int
    samples: bool = True


@dataclass
class Plan:
    """A `SchedulerOutput` in the making."""

    runs: list[Run]
    new: list[NewSequence] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    table: list[tuple[int, int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)

    def build(self) -> SchedulerOutput:
        sampling = [i for i, run in enumerate(self.runs) if run.samples]
        return SchedulerOutput(
            step=1,
            freed_rows=int32(self.freed),
            new_sequences=tuple(self.new),
            table_rows=int32([row for row, _, _ in self.table]),
            table_indices=int32([index for _, index, _ in self.table]),
            table_blocks=int32([block for _, _, block in self.table]),
            clears=b"",
            host_clears=b"",
            demotions=b"",
            promotions=b"",
            copies=int32([block for pair in self.copies for block in pair]),
            rows=int32([run.row for run in self.runs]),
            num_computed=int32([run.num_computed for run in self.runs]),
            num_new=int32([run.num_new for run in self.runs]),
            token_ids=int32(
                [t for run in self.runs for t in run.tokens[run.num_computed : run.num_computed + run.num_new]]
            ),
            sample_sources=int32(sampling),
            sample_rows=int32([self.runs[i].row for i in sampling]),
        )


def sequence(
    row: int, tokens: list[int], blocks: list[int], params: SamplingParams = GREEDY, num_prompt: int | None = None
) -> NewSequence:
    prompt = len(tokens) if num_prompt is None else num_prompt
    return NewSequence(row, int32(tokens), prompt, int32(blocks), params)


def tokens_of(output: ModelRunnerOutput) -> list[int]:
    return np.frombuffer(output.tokens, dtype="<i4").tolist()


def generate(
    runner: ModelRunner,
    prompt: list[int],
    num_tokens: int,
    *,
    row: int = 0,
    blocks: list[int] | None = None,
    chunk: int = 10**9,
    num_computed: int = 0,
    params: SamplingParams = GREEDY,
    num_prompt: int | None = None,
) -> list[int]:
    """Generate alone in the batch: prefill in chunks from ``num_computed``, then decode. Returns new tokens."""
    table = blocks or list(range(32))
    tokens = list(prompt)
    new = [sequence(row, tokens, table, params, num_prompt)]
    while len(tokens) - len(prompt) < num_tokens:
        num_new = min(chunk, len(tokens) - num_computed)
        samples = num_computed + num_new == len(tokens)
        output = runner.execute(Plan([Run(row, tokens, num_computed, num_new, samples)], new).build())
        assert not output.failed
        new = []
        num_computed += num_new
        tokens += tokens_of(output)
    return tokens[len(prompt) :]
