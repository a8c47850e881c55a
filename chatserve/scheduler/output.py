"""The plan: where the two halves of the engine meet.

`SchedulerOutput` is everything a worker needs for one step and `ModelRunnerOutput` is everything the scheduler
gets back. Both are plain data, columnar (int32 arrays as bytes, little-endian), cheap to encode and possible to
replay. A *row* is a slot of the persistent batch: a sequence keeps its row from its `NewSequence` until the row
appears in `freed_rows`.
"""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from chatserve.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


class NewSequence(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """First appearance of a sequence in the batch (also after a preemption, with its output so far).

    Attributes:
        row: batch row in ``[0, max_num_seqs)``.
        token_ids: int32, every known token; the first ``num_prompt_tokens`` are the prompt.
        block_table: int32, physical block of each ``block_size`` tokens.
        sampling: parameters of this one choice; ``seed`` is set.
        scopes: interned ids of the scopes it may see, its own last. Only the oracle model reads them.
    """

    row: int
    token_ids: bytes
    num_prompt_tokens: int
    block_table: bytes
    sampling: SamplingParams
    scopes: tuple[int, ...] = ()


class SharedRuns(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Runs of blocks that several rows of a step begin with; a longer one comes after those that it continues.

    A fact about block tables, which attention may use to read a run once for all its members.

    Attributes:
        blocks: int32 [r], blocks of each run, all full of computed tokens.
        starts: int32 [r + 1]; members of run i are ``[starts[i], starts[i + 1])``.
        members: int32, indices into the plan's ``rows``.
    """

    blocks: bytes
    starts: bytes
    members: bytes


class SchedulerOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One step's work, applied by a worker in the order of the fields.

    Attributes:
        step: logical time, rises by one.
        freed_rows: int32 [f]; forget what these rows held.
        new_sequences: place these in their rows.
        table_rows, table_indices, table_blocks: int32 [t] each; ``block_table[row][index] = block``, where an
            index equal to the table's length appends.
        clears, host_clears: int32, purged blocks of either tier; zeroed, first of all.
        demotions: int32 [d, 2], (device, host) blocks; copied whole, next.
        promotions: int32 [p, 2], (host, device) blocks; copied whole, next.
        copies: int32 [c, 2], (source, destination) device blocks; copied whole, next, before the forward. Within
            each of the three, sources and destinations are disjoint.
        rows: int32 [n], rows that run in this step.
        num_computed: int32 [n], tokens of that row already in the cache; position of its first new token.
        num_new: int32 [n], tokens of that row run in this step (>= 1).
        token_ids: int32 [sum(num_new)], those tokens, rows concatenated in order.
        sample_sources: int32 [s], index into ``rows``: logits of that row's last new token.
        sample_rows: int32 [s], the row that draws from those logits and whose sequence the token extends. It
            differs from ``rows[source]`` only in the step where a prompt forks into several choices.
        shared_runs: leading blocks that several rows have in common, if any.
    """

    step: int
    freed_rows: bytes
    new_sequences: tuple[NewSequence, ...]
    table_rows: bytes
    table_indices: bytes
    table_blocks: bytes
    clears: bytes
    host_clears: bytes
    demotions: bytes
    promotions: bytes
    copies: bytes
    rows: bytes
    num_computed: bytes
    num_new: bytes
    token_ids: bytes
    sample_sources: bytes
    sample_rows: bytes
    shared_runs: SharedRuns | None = None


class SampleLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities of one sampled token under the unmodified distribution.

    Attributes:
        chosen: natural logarithm of the chosen token's probability.
        top_ids: int32, the most likely tokens, best first.
        top_logprobs: float32, theirs.
    """

    chosen: float
    top_ids: bytes
    top_logprobs: bytes


class ModelRunnerOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a worker answers to one `SchedulerOutput`.

    Attributes:
        tokens: int32 [s], one sampled token per entry of ``sample_rows``.
        failed: indices into ``rows`` whose activations were not finite: nothing they computed may be used,
            and tokens sampled from them are meaningless.
        logprobs: one entry per sample, or ``None`` where no row asked.
    """

    tokens: bytes
    failed: tuple[int, ...] = ()
    logprobs: tuple[SampleLogprobs | None, ...] | None = None


class Started(msgspec.Struct, frozen=True, array_like=True):
    """A request was admitted for the first time.

    Attributes:
        cached_tokens: prompt tokens whose KV was reused.
    """

    request_id: int
    prompt_tokens: int
    cached_tokens: int


class Finished(msgspec.Struct, frozen=True, array_like=True):
    """The one terminal event of one choice; it comes after that choice's last token.

    Attributes:
        stop_token: the id that ended the output where one did; it is the choice's last token in the frame, and
            no text is shown for it.
        error_code, error_message: set with reason ``error``.
    """

    request_id: int
    choice: int
    reason: FinishReason
    stop_token: int | None = None
    error_code: str | None = None
    error_message: str | None = None


class StepNews(msgspec.Struct, array_like=True, gc=False):
    """What one step brought for the streams, in the order in which it happened per choice.

    Attributes:
        request_ids: int64 [m]; choices: int32 [m]; tokens: int32 [m]: one new token each.
        logprobs: aligned with ``tokens`` where any sequence asked for them.
        started: requests admitted for the first time.
        finished: choices that ended; after their last token.
    """

    request_ids: bytes = b""
    choices: bytes = b""
    tokens: bytes = b""
    logprobs: tuple[SampleLogprobs | None, ...] | None = None
    started: tuple[Started, ...] = ()
    finished: tuple[Finished, ...] = ()


class Executor(Protocol):
    """The only door from the engine to the worker."""

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step. Synchronous; raises only when the executor as a whole is unusable."""
        ...

    def shutdown(self) -> None:
        """Release processes and memory. Idempotent."""
        ...
