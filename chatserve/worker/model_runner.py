"""Turns one plan of the scheduler into one forward pass.

Mirrors the persistent batch (block tables and sampling state by row) and owns the KV tensors. Decides nothing: what
runs, where it is stored and what is copied all stand in the plan. An executor is the caller.
"""

from __future__ import annotations

import math
import mmap

import numpy as np
import numpy.typing as npt
import torch
from chatserve_kernels.interface import Backend, SharedRuns, StepBatch, kv_cache_shape
from torch import Tensor

from chatserve.model.step_layout import int64
from chatserve.model.transformer import Transformer
from chatserve.scheduler.output import ModelRunnerOutput, NewSequence, SchedulerOutput
from chatserve.scheduler.output import SharedRuns as PlannedRuns
from chatserve.worker.sampler import Sampler


class ModelRunner:
    """One rank's model, KV memory and view of the batch.

    Args:
        num_host_blocks: size of the host tier.
        max_blocks: blocks of the longest sequence.
        eos_token_ids: the model's own end tokens, for ``min_tokens``.
    """

    def __init__(
        self,
        model: Transformer,
        backend: Backend,
        *,
        num_blocks: int,
        num_host_blocks: int = 0,
        block_size: int,
        max_num_seqs: int,
        max_blocks: int,
        eos_token_ids: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:
        self._model = model
        self._backend = backend
        architecture = model.architecture
        self.kv_cache, self.host_kv_cache = (
            _lazily_zeroed(
                kv_cache_shape(
                    count, architecture.num_layers, architecture.num_kv_heads, block_size, architecture.head_dim
                ),
                dtype,
            )
            for count in (num_blocks, num_host_blocks)
        )
        self._block_tables: npt.NDArray[np.int64] = np.zeros((max_num_seqs, max_blocks), dtype=np.int64)
        self._sampler = Sampler(max_num_seqs, eos_token_ids, backend)

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Apply a plan in the order of its fields."""
        if plan.freed_rows:
            for row in _ints(plan.freed_rows):
                self._sampler.free(row)
        for sequence in plan.new_sequences:
            self._place(sequence)
        # Few as a rule, and numpy's way to write many costs more than these: see `scheduler.decode_run`.
        for row, index, block in zip(
            *map(_ints, (plan.table_rows, plan.table_indices, plan.table_blocks)), strict=True
        ):
            self._block_tables[row, index] = block
        if plan.clears:
            self.kv_cache[torch.from_numpy(int64(plan.clears))] = 0.0
        if plan.host_clears:
            self.host_kv_cache[torch.from_numpy(int64(plan.host_clears))] = 0.0
        if plan.demotions:
            _move_blocks(self.kv_cache, self.host_kv_cache, plan.demotions)
        if plan.promotions:
            _move_blocks(self.host_kv_cache, self.kv_cache, plan.promotions)
        if plan.copies:
            self._backend.copy_blocks(self.kv_cache, torch.from_numpy(int64(plan.copies)).view(-1, 2))
        if not plan.rows:
            return ModelRunnerOutput(tokens=b"")
        return self._forward_and_sample(plan)

    def _place(self, sequence: NewSequence) -> None:
        blocks = _int32(sequence.block_table)
        self._block_tables[sequence.row, : len(blocks)] = blocks
        self._sampler.place(sequence.row, sequence.sampling, _int32(sequence.token_ids), sequence.num_prompt_tokens)

    def _forward_and_sample(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        batch = StepBatch(
            *(self._block_tables, plan.rows, plan.num_computed, plan.num_new, plan.token_ids, plan.sample_sources),
            _shared_runs(plan.shared_runs),
        )
        result = self._model.run(batch, self.kv_cache)
        if not plan.sample_sources:
            return ModelRunnerOutput(b"", result.failed)
        samples = self._sampler.sample(result, plan.sample_rows)
        return ModelRunnerOutput(samples.tokens.tobytes(), result.failed, samples.logprobs)


def _shared_runs(runs: PlannedRuns | None) -> SharedRuns | None:
    return None if runs is None else SharedRuns(runs.blocks, runs.starts, runs.members)


def _lazily_zeroed(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros whose pages the system hands out only when they are first written (`torch.zeros` writes them all).

    Huge pages where it has them: a step reads a few kilobytes here and there, and looking up small pages for them costs
    it a tenth of its attention.
    """
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    pages = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def _move_blocks(source: Tensor, destination: Tensor, pairs: bytes) -> None:
    """Copy whole blocks from one tier's tensor to the other's, one by one; ``pairs`` is int32 [k, 2].

    Gathering them first would write and read everything once more.
    """
    there, here = (tier.view(torch.uint8).numpy() for tier in (source, destination))
    for block, target in _int32(pairs).reshape(-1, 2).tolist():
        here[target] = there[block]


def _ints(data: bytes) -> memoryview[int]:
    return memoryview(data).cast("i")


def _int32(data: bytes) -> npt.NDArray[np.int32]:
    return np.frombuffer(data, dtype="<i4")
