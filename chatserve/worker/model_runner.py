"""Turns one plan of the scheduler into one forward pass.

Mirrors the persistent batch (block tables and sampling state by row), owns the KV tensor, and builds the flat
tensors that the network takes. Decides nothing: what runs, where it is stored and what is copied all stand in the
plan. An executor is the caller.
"""

from __future__ import annotations

import math
import mmap

import numpy as np
import numpy.typing as npt
import torch
from chatserve_kernels.interface import AttentionMetadata, Backend, SharedRuns, kv_cache_shape
from torch import Tensor

from chatserve.model.transformer import Transformer
from chatserve.scheduler.output import ModelRunnerOutput, NewSequence, SchedulerOutput
from chatserve.scheduler.output import SharedRuns as PlannedRuns
from chatserve.worker.sampler import sample
from chatserve.worker.sampling_row import SamplingRow

_Int64 = npt.NDArray[np.int64]


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
        self._block_size = block_size
        self._eos_token_ids = eos_token_ids
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
        self._block_tables: _Int64 = np.zeros((max_num_seqs, max_blocks), dtype=np.int64)
        self._sampling: list[SamplingRow | None] = [None] * max_num_seqs

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Apply a plan in the order of its fields."""
        for row in _int32(plan.freed_rows):
            self._sampling[row] = None
        for sequence in plan.new_sequences:
            self._place(sequence)
        self._block_tables[_int32(plan.table_rows), _int32(plan.table_indices)] = _int32(plan.table_blocks)
        for tier, cleared in ((self.kv_cache, plan.clears), (self.host_kv_cache, plan.host_clears)):
            if cleared:
                tier[torch.from_numpy(_int64(cleared))] = 0.0
        _move_blocks(self.kv_cache, self.host_kv_cache, plan.demotions)
        _move_blocks(self.host_kv_cache, self.kv_cache, plan.promotions)
        if plan.copies:
            self._backend.copy_blocks(self.kv_cache, torch.from_numpy(_int64(plan.copies)).view(-1, 2))
        if not plan.rows:
            return ModelRunnerOutput(tokens=b"")
        return self._forward_and_sample(plan)

    def release_rows(self) -> None:
        """Forget every sequence. Block contents stay."""
        self._sampling = [None] * len(self._sampling)

    def _place(self, sequence: NewSequence) -> None:
        blocks = _int32(sequence.block_table)
        self._block_tables[sequence.row, : len(blocks)] = blocks
        self._sampling[sequence.row] = SamplingRow(
            sequence.sampling,
            _int32(sequence.token_ids),
            sequence.num_prompt_tokens,
            self._model.architecture.vocab_size,
            self._eos_token_ids,
        )

    def _forward_and_sample(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        num_new = _int64(plan.num_new)
        positions, metadata = self._describe(plan, num_new)
        attention = self._backend.begin_step(metadata, self.kv_cache)
        token_ids = torch.from_numpy(_int64(plan.token_ids))
        hidden = self._model.forward(token_ids, torch.from_numpy(positions), attention)

        # A sum is finite exactly where all its terms are; every token of a row counts, not only the last. By numpy:
        # waking torch's threads, while the kernels' own still spin, costs more than such a sum or a few copied rows.
        token_finite = np.isfinite(hidden.float().numpy().sum(-1))
        starts: _Int64 = metadata.query_start_loc.numpy()
        finite = np.logical_and.reduceat(token_finite, starts[:-1])
        if not finite.all():
            self._clear_slots(metadata.slot_mapping[torch.from_numpy(~np.repeat(finite, num_new))])

        sources = _int64(plan.sample_sources)
        tokens, logprobs = b"", None
        if len(sources):
            rows = self._sampled_rows(_int32(plan.sample_rows).tolist())
            logits = self._model.logits(_rows(hidden, starts[sources + 1] - 1))
            samples = sample(logits, rows, self._backend)
            for row, token in zip(rows, samples.tokens.tolist(), strict=True):
                row.append(token)
            finite[sources] &= samples.finite
            tokens, logprobs = samples.tokens.tobytes(), samples.logprobs
        failed = () if finite.all() else tuple(np.flatnonzero(~finite).tolist())
        return ModelRunnerOutput(tokens=tokens, failed=failed, logprobs=logprobs)

    def _describe(self, plan: SchedulerOutput, num_new: _Int64) -> tuple[_Int64, AttentionMetadata]:
        """Positions [T] and attention metadata of the step."""
        rows, num_computed = _int64(plan.rows), _int64(plan.num_computed)
        starts: _Int64 = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(num_new, out=starts[1:])
        positions = np.arange(starts[-1]) + np.repeat(num_computed - starts[:-1], num_new)
        seq_lens = num_computed + num_new
        tables = self._block_tables[rows, : -(-int(seq_lens.max()) // self._block_size)]
        block, offset = np.divmod(positions, self._block_size)
        slots = tables[np.repeat(np.arange(len(rows)), num_new), block] * self._block_size + offset
        return positions, AttentionMetadata(
            query_start_loc=torch.from_numpy(starts),
            seq_lens=torch.from_numpy(seq_lens),
            block_tables=torch.from_numpy(tables),
            slot_mapping=torch.from_numpy(slots),
            shared_runs=None if plan.shared_runs is None else _shared_runs(plan.shared_runs),
        )

    def _clear_slots(self, slots: Tensor) -> None:
        """Zero what a row that is not finite wrote, so that whoever gets its blocks next reads finite padding."""
        block = slots.div(self._block_size, rounding_mode="floor")
        self.kv_cache[block, :, :, :, slots % self._block_size] = 0.0

    def _sampled_rows(self, rows: list[int]) -> list[SamplingRow]:
        states = [self._sampling[row] for row in rows]
        found = [state for state in states if state is not None]
        if len(found) < len(rows):
            raise RuntimeError(f"The plan samples for row {rows[states.index(None)]}, which holds no sequence.")
        return found


def _shared_runs(runs: PlannedRuns) -> SharedRuns:
    return SharedRuns(*(torch.from_numpy(_int64(part)) for part in (runs.blocks, runs.starts, runs.members)))


def _rows(hidden: Tensor, rows: _Int64) -> Tensor:
    """Copies of some rows of [T, hidden_size], by numpy where it knows the dtype."""
    if hidden.dtype == torch.bfloat16:
        return hidden[torch.from_numpy(rows)]
    return torch.from_numpy(hidden.numpy()[rows])


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
    if pairs:
        there, here = (tier.view(torch.uint8).numpy() for tier in (source, destination))
        for block, target in _int32(pairs).reshape(-1, 2).tolist():
            here[target] = there[block]


def _int32(data: bytes) -> npt.NDArray[np.int32]:
    return np.frombuffer(data, dtype="<i4")


def _int64(data: bytes) -> _Int64:
    return np.frombuffer(data, dtype="<i4").astype(np.int64)
