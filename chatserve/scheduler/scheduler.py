"""Continuous batching over a paged KV cache: decide, then learn what came of it.

No phases: every sequence has *known* and *computed* tokens, and each step moves computed towards known within a
token budget. Decoding, chunked prefill, a cache hit and a resume are the same case. `schedule` makes the plan of
one step, `update` takes the worker's answer. No clock, no I/O, no randomness: the same calls give the same plans.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from chatserve.cache.kv_cache_manager import BlockTable, KVCacheManager, TableChange
from chatserve.cache.radix_tree import Match
from chatserve.config import SchedulerConfig
from chatserve.errors import ContextLengthError
from chatserve.scheduler.batch import NEVER, Batch, Int32s
from chatserve.scheduler.output import (
    Finished,
    FinishReason,
    ModelRunnerOutput,
    NewSequence,
    SchedulerOutput,
    Started,
    StepNews,
)
from chatserve.scheduler.policy import Claims, pick_slot_victim
from chatserve.scheduler.queue import WaitingQueue
from chatserve.scheduler.request import Request, Sequence, Status

LOOKAHEAD = 4
"""Waiting sequences that may stand aside, not fitting, while later ones are tried."""

MAX_DEFERRED = 16
"""Waiting sequences found in one step to depend on a block that this step computes, before the search ends."""

RETRY_STEPS = 64
"""A sequence that did not fit is tried again after this many steps even if no room appeared: what it needs may
have been published meanwhile."""

QUANTUM_STEPS = 32
"""Steps for which a sequence is safe from losing its slot after an admission."""

DEFAULT_PREFILL_CHUNK = 512


class SchedulerCounters:
    """Monotone counts since start."""

    def __init__(self) -> None:
        self.preemptions = 0
        self.aborts = 0
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0
        self.prompt_tokens = 0
        self.computed_prompt_tokens = 0
        self.generation_tokens = 0


class _Plan:
    """The step under construction and, until `update`, in flight."""

    def __init__(self) -> None:
        self.new: list[NewSequence] = []
        self.chunk_rows: list[int] = []
        self.chunk_sizes: list[int] = []
        self.chunk_tokens: list[bytes] = []
        self.fork_samples: list[tuple[int, int]] = []
        self.rows: Int32s = np.empty(0, np.int32)
        self.num_new: Int32s = np.empty(0, np.int32)
        self.after: Int32s = np.empty(0, np.int32)
        self.sample_rows: Int32s = np.empty(0, np.int32)


class Scheduler:
    """Single writer of every request's status, tokens and counters."""

    def __init__(
        self,
        config: SchedulerConfig,
        manager: KVCacheManager,
        *,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: Iterable[int],
    ) -> None:
        self.manager = manager
        self.step = 0
        self.counters = SchedulerCounters()
        self._config = config
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._is_eos = np.zeros(vocab_size, np.bool_)
        self._is_eos[list(eos_token_ids)] = True
        self._prefill_chunk = config.long_prefill_token_threshold or DEFAULT_PREFILL_CHUNK
        self._requests: dict[int, Request] = {}
        self._queue = WaitingQueue(config.ageing_steps)
        self._blocked: list[Sequence] = []
        self._batch = Batch(config.max_num_seqs)
        self._num_arrivals = 0
        self._num_admissions = 0
        self._claims = Claims()
        self._table_changes: list[tuple[int, int, int]] = []
        self._freed_rows: list[int] = []
        self._started: list[Started] = []
        self._finished: list[Finished] = []
        self._plan = _Plan()
        self._ones = np.ones(config.max_num_seqs, np.int32)
        self._indices = np.arange(config.max_num_seqs, dtype=np.int32)

    # ------------------------------------------------------------------ requests

    @property
    def num_running(self) -> int:
        """Sequences in the batch."""
        return len(self._batch)

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no row and no blocks."""
        return len(self._queue) + len(self._blocked)

    @property
    def num_requests(self) -> int:
        """Requests without their last terminal event."""
        return len(self._requests)

    @property
    def has_news(self) -> bool:
        """Events that no `update` has reported yet."""
        return bool(self._started or self._finished)

    def max_total_tokens(self) -> int:
        """Prompt and output tokens one sequence can ever have here."""
        return min(self._max_model_len, self.manager.pool.num_blocks * self.manager.block_size + 1)

    def add(self, request: Request) -> None:
        """Accept a request, or raise `ContextLengthError` with the true numbers if it can never fit."""
        limit = self.max_total_tokens()
        wanted = request.sampling.max_tokens
        # With max_tokens absent the output takes what fits, which must be at least one token.
        total = request.num_prompt + (1 if wanted is None else wanted)
        if total > limit:
            output = "no room for output" if wanted is None else f"{wanted} output tokens"
            raise ContextLengthError(
                f"The prompt has {request.num_prompt} tokens and {output} asked for, {total} in all; "
                f"at most {limit} fit here. Shorten the prompt or lower max_tokens.",
                param="max_tokens",
            )
        request.max_total = limit if wanted is None else total
        request.arrival = self._num_arrivals
        request.arrival_step = self.step
        self._num_arrivals += 1
        self._requests[request.request_id] = request
        self._add_sequence(request, 0)

    def _add_sequence(self, request: Request, choice: int) -> Sequence:
        sequence = Sequence(request, choice)
        request.sequences.append(sequence)
        if choice == 0:
            self._queue.push(sequence)
        return sequence

    def abort(self, request_id: int) -> None:
        """End a request wherever it is. Unknown ids have just finished, which is fine."""
        request = self._requests.get(request_id)
        if request is not None:
            self.counters.aborts += 1
            self._end_request(request, "abort")

    def preempt_request(self, request_id: int) -> None:
        """Send the running sequences of a request back to the queue, as lack of memory would."""
        request = self._requests.get(request_id)
        for sequence in list(request.sequences) if request is not None else []:
            if sequence.status is Status.RUNNING:
                self._preempt(sequence)

    # ------------------------------------------------------------------ one step

    def schedule(self) -> SchedulerOutput | None:
        """Plan the next step, or return ``None`` if nothing can run.

        Order: victims of a better class make room; running sequences get the blocks they must write, the best
        first, at the cost of the last; all decodes run; then prefill chunks of running and of waiting sequences.
        """
        self.step += 1
        self._plan = plan = _Plan()
        self._claims.clear()
        batch = self._batch
        self._make_room_for_better_class()
        self._grow_running()

        rows = batch.order_rows()
        known = batch.known[rows]
        chunked = (known - batch.computed[rows] > 1) | (known == batch.num_prompt[rows])
        num_chunked = np.count_nonzero(chunked)
        decodes = rows[~chunked] if num_chunked else rows
        budget = self._config.max_num_batched_tokens - len(decodes)
        if len(decodes):
            budget = min(budget, self._prefill_chunk)
        for row in rows[chunked].tolist() if num_chunked else ():
            if budget <= 0:
                break
            sequence = batch.sequences[row]
            assert sequence is not None
            budget -= self._run_chunk(sequence, budget)
        if self._blocked or len(self._queue):
            self._admit_waiting(budget)
        return self._finish_plan(plan, decodes)

    def _finish_plan(self, plan: _Plan, decodes: Int32s) -> SchedulerOutput | None:
        batch = self._batch
        if plan.chunk_rows:
            plan.rows = np.concatenate((decodes, np.array(plan.chunk_rows, np.int32)))
            plan.num_new = np.concatenate((self._ones[: len(decodes)], np.array(plan.chunk_sizes, np.int32)))
            computed = batch.computed[plan.rows]
            plan.after = computed + plan.num_new
            sources = np.flatnonzero(plan.after == batch.known[plan.rows]).astype(np.int32)
            plan.sample_rows = plan.rows[sources]
            if plan.fork_samples:
                index_of = {row: index for index, row in enumerate(plan.rows.tolist())}
                forked = np.array([(index_of[parent], child) for parent, child in plan.fork_samples], np.int32)
                sources = np.concatenate((sources, forked[:, 0]))
                plan.sample_rows = np.concatenate((plan.sample_rows, forked[:, 1]))
        elif len(decodes):
            plan.rows = plan.sample_rows = decodes
            plan.num_new = self._ones[: len(decodes)]
            sources = self._indices[: len(decodes)]
            computed = batch.computed[decodes]
            plan.after = computed + 1
        else:
            return None
        changes = np.array(self._table_changes, np.int32).reshape(-1, 3)
        freed = np.array(self._freed_rows, np.int32).tobytes()
        self._table_changes.clear()
        self._freed_rows.clear()
        return SchedulerOutput(
            step=self.step,
            freed_rows=freed,
            new_sequences=tuple(plan.new),
            table_rows=changes[:, 0].tobytes(),
            table_indices=changes[:, 1].tobytes(),
            table_blocks=changes[:, 2].tobytes(),
            copies=self.manager.take_copies(),
            rows=plan.rows.tobytes(),
            num_computed=computed.tobytes(),
            num_new=plan.num_new.tobytes(),
            token_ids=batch.last_token[decodes].tobytes() + b"".join(plan.chunk_tokens),
            sample_sources=sources.tobytes(),
            sample_rows=plan.sample_rows.tobytes(),
        )

    def update(self, output: ModelRunnerOutput) -> StepNews:
        """Take the worker's answer to the plan that `schedule` returned last."""
        plan, batch, manager = self._plan, self._batch, self.manager
        manager.finish_step()
        batch.computed[plan.rows] = plan.after
        tokens = np.frombuffer(output.tokens, np.int32)
        rows = plan.sample_rows
        logprobs = output.logprobs
        refused: set[int] = set()
        if output.failed:
            refused = self._fail_rows(output.failed)
        # As unsigned numbers, negative ids are beyond the vocabulary too.
        invalid = tokens.view(np.uint32) >= self._vocab_size
        if np.count_nonzero(invalid):
            refused |= self._fail_samples(rows[invalid])
        if refused:
            keep = [i for i, row in enumerate(rows.tolist()) if row not in refused]
            rows, tokens = rows[keep], tokens[keep]
            if logprobs is not None:
                logprobs = tuple(logprobs[i] for i in keep)

        known = batch.known[rows] + 1
        batch.known[rows] = known
        batch.last_token[rows] = tokens
        row_tokens = batch.tokens
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            row_tokens[row].append(token)
        self.counters.generation_tokens += len(rows)
        self._publish(plan)

        news = StepNews(batch.request_ids[rows].tobytes(), batch.choices[rows].tobytes(), tokens.tobytes(), logprobs)
        self._finish_outputs(rows, tokens, known)
        self._report(news)
        return news

    def flush_news(self) -> StepNews:
        """Events that came about between steps (aborts, for example)."""
        news = StepNews()
        self._report(news)
        return news

    def _report(self, news: StepNews) -> None:
        news.started, news.finished = tuple(self._started), tuple(self._finished)
        self._started.clear()
        self._finished.clear()

    def _publish(self, plan: _Plan) -> None:
        batch = self._batch
        due = plan.rows[plan.after >= batch.publish_at[plan.rows]]
        for row in due.tolist():
            sequence = batch.sequences[row]
            if sequence is None or sequence.table is None:
                continue
            table = sequence.table
            changes = self.manager.publish(table, sequence.tokens, int(batch.computed[row]), self.step)
            self._note_changes(row, changes)
            batch.publish_at[row] = self._next_publication(table)
        for parent_row, child_row in plan.fork_samples:
            parent, child = batch.sequences[parent_row], batch.sequences[child_row]
            if parent is not None and parent.table and child is not None and child.table:
                self._note_changes(child_row, self.manager.follow(child.table, parent.table))
                batch.publish_at[child_row] = self._next_publication(child.table)

    def _next_publication(self, table: BlockTable) -> int:
        return NEVER if table.detached else (table.num_published + 1) * self.manager.block_size

    def _note_changes(self, row: int, changes: list[TableChange]) -> None:
        for index, block in changes:
            self._table_changes.append((row, index, block))

    # ------------------------------------------------------------------ endings

    def _finish_outputs(self, rows: Int32s, tokens: Int32s, known: Int32s) -> None:
        batch = self._batch
        stopped = self._is_eos[tokens] & batch.uses_eos[rows]
        if batch.num_own_stops:
            for i in np.flatnonzero(batch.own_stops[rows]).tolist():
                sequence = batch.sequences[rows[i]]
                assert sequence is not None
                stopped[i] |= int(tokens[i]) in sequence.sampling.stop_token_ids
        if np.count_nonzero(stopped):
            stopped &= known > batch.stop_after[rows]
        ended = stopped | (known >= batch.max_total[rows])
        for i in np.flatnonzero(ended).tolist():
            sequence = batch.sequences[rows[i]]
            assert sequence is not None
            if stopped[i]:
                self._end(sequence, "stop", stop_token=int(tokens[i]))
            else:
                self._end(sequence, "length")

    def _fail_rows(self, failed: tuple[int, ...]) -> set[int]:
        """Numerical failure: what these rows' requests computed is unpublished, and they end in error."""
        gone: set[int] = set()
        for index in failed:
            sequence = self._batch.sequences[int(self._plan.rows[index])]
            if sequence is None:
                continue
            for each in sequence.request.sequences:
                if each.table is not None:
                    self.manager.discard(each.table)
            gone |= self._fail(sequence.request, "The model produced numbers that are not finite for this request.")
        return gone

    def _fail_samples(self, rows: Int32s) -> set[int]:
        gone: set[int] = set()
        for row in rows.tolist():
            sequence = self._batch.sequences[row]
            if sequence is not None:
                gone |= self._fail(sequence.request, "The worker returned a token outside the vocabulary.")
        return gone

    def _fail(self, request: Request, message: str) -> set[int]:
        rows = {s.row for s in request.sequences if s.row >= 0}
        self._end_request(request, "error", error_code="internal_error", error_message=message)
        return rows

    def _end_request(
        self,
        request: Request,
        reason: FinishReason,
        *,
        error_code: str | None = None,
        error_message: str | None = None,
    ) -> None:
        for sequence in list(request.sequences):
            if sequence.status is not Status.FINISHED:
                self._end(sequence, reason, error_code=error_code, error_message=error_message)
        # Choices that were never forked have no sequence; they end all the same.
        for choice in range(len(request.sequences), request.sampling.n):
            self._finish_choice(request, choice, reason, None, error_code, error_message)

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        stop_token: int | None = None,
        error_code: str | None = None,
        error_message: str | None = None,
    ) -> None:
        """The one way out of a sequence: blocks released, row freed, terminal event noted."""
        if sequence.status is Status.RUNNING:
            self._leave_batch(sequence)
        elif sequence in self._blocked:
            self._blocked.remove(sequence)
        else:
            self._queue.remove(sequence)
        sequence.status = Status.FINISHED
        self._finish_choice(sequence.request, sequence.choice, reason, stop_token, error_code, error_message)

    def _finish_choice(
        self,
        request: Request,
        choice: int,
        reason: FinishReason,
        stop_token: int | None,
        error_code: str | None,
        error_message: str | None,
    ) -> None:
        self._finished.append(Finished(request.request_id, choice, reason, stop_token, error_code, error_message))
        request.num_open -= 1
        if request.num_open == 0:
            del self._requests[request.request_id]

    def _leave_batch(self, sequence: Sequence) -> None:
        """Release blocks and row; a plan in the making must not mention the row any more."""
        assert sequence.table is not None
        self.manager.release(sequence.table, sequence.tokens, int(self._batch.computed[sequence.row]), self.step)
        sequence.table = None
        row = self._batch.free(sequence)
        self._freed_rows.append(row)
        if self._table_changes:
            self._table_changes = [change for change in self._table_changes if change[0] != row]

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue with every token it has; its blocks stay cached while space lasts."""
        self.counters.preemptions += 1
        self._leave_batch(sequence)
        sequence.status = Status.WAITING
        self._queue.push(sequence)

    # ------------------------------------------------------------------ room

    def _make_room_for_better_class(self) -> None:
        """Slots and memory for the next sequence, at the cost of a running one of a strictly worse class."""
        batch = self._batch
        if not len(batch) or not (self._blocked or len(self._queue)):
            return
        worst = batch.order[-1].request.priority_class
        best = min(self._queue.best_class(), *(s.request.priority_class for s in self._blocked), worst)
        head = self._next_waiting() if best < worst else None
        if head is None or head.request.priority_class >= worst:
            return
        while not batch.num_free_rows or self._lacks_memory(head):
            victim = pick_slot_victim(batch.order, head.request.priority_class, self.step - QUANTUM_STEPS)
            if victim is None:
                return
            self._preempt(victim)

    def _next_waiting(self) -> Sequence | None:
        head = self._queue.peek(self.step)
        if not self._blocked:
            return head
        first = self._blocked[0]
        if head is None or self._queue.rank(first, self.step) < self._queue.rank(head, self.step):
            return first
        return head

    def _lacks_memory(self, sequence: Sequence) -> bool:
        match = self._match(sequence)
        missing = self.manager.blocks_missing(match, len(sequence.tokens), sequence.request.max_total)
        return missing > 0

    def _match(self, sequence: Sequence) -> Match:
        return self.manager.match(sequence.tokens.tobytes(), sequence.request.scopes, self.step)

    def _grow_running(self) -> None:
        """Give every row that is about to write past its capacity a block, preempting from the end if need be."""
        batch, manager = self._batch, self.manager
        rows = batch.order_rows()
        for row in rows[batch.computed[rows] >= batch.capacity[rows]].tolist():
            sequence = batch.sequences[row]
            if sequence is None or sequence.table is None:
                continue
            while True:
                changes = manager.grow(sequence.table, int(batch.computed[row]) + 1)
                if changes is not None:
                    self._note_changes(row, changes)
                    batch.capacity[row] = len(sequence.table.blocks) * manager.block_size
                    break
                victim = batch.order[-1]
                self._preempt(victim)
                if victim is sequence:
                    break

    # ------------------------------------------------------------------ prefill

    def _run_chunk(self, sequence: Sequence, budget: int) -> int:
        """Schedule the next chunk of a running sequence; returns its tokens, 0 if it waits this step."""
        batch, row, table = self._batch, sequence.row, sequence.table
        assert table is not None
        tokens = sequence.tokens.tobytes()
        computed, changes = self.manager.extend_match(table, tokens, int(batch.computed[row]), self.step)
        batch.computed[row] = computed
        if changes:
            batch.publish_at[row] = self._next_publication(table)
            self._note_changes(row, changes)
        if table.num_published == computed // self.manager.block_size and not self._claim(
            sequence, table.blocks[: table.num_published], computed, tokens, budget
        ):
            return 0
        return self._plan_chunk(sequence, computed, tokens, budget)

    def _claim(self, sequence: Sequence, prefix: list[int], computed: int, tokens: bytes, budget: int) -> bool:
        """Claim the next whole block for this step; False if somebody whose result it may see computes it now."""
        size = self.manager.block_size * 4
        start = len(prefix) * size
        block = tokens[start : start + size]
        if len(block) < size:
            return True
        completes = computed * 4 + budget * 4 >= start + size
        return self._claims.claim(prefix[-1] if prefix else -1, block, sequence.request.scopes, completes)

    def _plan_chunk(self, sequence: Sequence, computed: int, tokens: bytes, budget: int) -> int:
        plan, row = self._plan, sequence.row
        size = min(budget, len(sequence.tokens) - computed)
        plan.chunk_rows.append(row)
        plan.chunk_sizes.append(size)
        plan.chunk_tokens.append(tokens[computed * 4 : (computed + size) * 4])
        self.counters.computed_prompt_tokens += max(0, min(size, sequence.request.num_prompt - computed))
        if not sequence.request.forked and computed + size == len(sequence.tokens):
            self._fork(sequence)
        return size

    def _fork(self, parent: Sequence) -> None:
        """The prompt is complete after this step: the further choices draw their first token from it too."""
        request = parent.request
        request.forked = True
        batch = self._batch
        assert parent.table is not None
        for choice in range(1, request.sampling.n):
            child = self._add_sequence(request, choice)
            if not batch.num_free_rows:
                self._queue.push(child)
                continue
            child.table = self.manager.fork(parent.table, request.num_prompt)
            self._place(child, request.num_prompt)
            self._plan.fork_samples.append((parent.row, child.row))
            batch.capacity[child.row] = request.num_prompt
        batch.capacity[parent.row] = request.num_prompt

    # ------------------------------------------------------------------ admission

    def _admit_waiting(self, budget: int) -> None:
        """Admit waiting sequences in order while rows, tokens and blocks last.

        One that does not fit stands aside, holding nothing, and lets a bounded number pass; then it holds the
        door until it fits.
        """
        batch = self._batch
        deferred: list[Sequence] = []
        for sequence in list(self._blocked):
            if budget <= 0 or not batch.num_free_rows:
                break
            if self._worth_a_try(sequence):
                used = self._try_admit(sequence, budget)
                if used is None:
                    self._stand_aside(sequence)
                elif used:
                    self._blocked.remove(sequence)
                    self._count_overtaken(sequence)
                    budget -= used
            if sequence.status is Status.WAITING and self._holds_door(sequence):
                break
        while budget > 0 and batch.num_free_rows and len(deferred) < MAX_DEFERRED:
            head = self._queue.peek(self.step)
            if head is None or not self._may_pass(head):
                break
            self._queue.pop(self.step)
            used = self._try_admit(head, budget)
            if used is None:
                self._stand_aside(head)
            elif used:
                self._count_overtaken(head)
                budget -= used
            else:
                deferred.append(head)
        for sequence in deferred:
            self._queue.push(sequence)

    def _worth_a_try(self, sequence: Sequence) -> bool:
        return (
            self.manager.num_available >= sequence.missing
            or self.step - sequence.tried_step >= RETRY_STEPS
            or not len(self._batch)
        )

    def _holds_door(self, sequence: Sequence) -> bool:
        return sequence.num_overtaken >= self._config.max_overtakes

    def _may_pass(self, head: Sequence) -> bool:
        """Whether ``head`` may be tried, given those that stand aside."""
        if not self._blocked:
            return True
        rank = self._queue.rank(head, self.step)
        ahead = [s for s in self._blocked if self._queue.rank(s, self.step) < rank]
        return len(ahead) < LOOKAHEAD and not any(self._holds_door(s) for s in ahead)

    def _count_overtaken(self, admitted: Sequence) -> None:
        rank = self._queue.rank(admitted, self.step)
        for sequence in self._blocked:
            if self._queue.rank(sequence, self.step) < rank:
                sequence.num_overtaken += 1

    def _stand_aside(self, sequence: Sequence) -> None:
        if sequence not in self._blocked:
            self._blocked.append(sequence)
            self._blocked.sort(key=lambda s: self._queue.rank(s, self.step))
            if len(self._blocked) > LOOKAHEAD:
                self._queue.push(self._blocked.pop())

    def _try_admit(self, sequence: Sequence, budget: int) -> int | None:
        """Admit and schedule the first chunk; returns its tokens, 0 to wait this step, ``None`` for *not now*."""
        request, manager = sequence.request, self.manager
        tokens = sequence.tokens.tobytes()
        match = manager.match(tokens, request.scopes, self.step)
        if not self._claim(sequence, match.blocks, match.num_tokens, tokens, budget):
            return 0
        admission = manager.admit(match, request.scopes, len(sequence.tokens), request.max_total)
        if admission is None:
            missing = manager.blocks_missing(match, len(sequence.tokens), request.max_total)
            sequence.missing = manager.num_available + missing
            sequence.tried_step = self.step
            return None
        sequence.table = admission.table
        sequence.num_overtaken = 0
        if not request.started:
            request.started = True
            self._started.append(Started(request.request_id, request.num_prompt, admission.num_cached))
            self.counters.prompt_tokens += request.num_prompt
            self.counters.prefix_query_tokens += request.num_prompt
            self.counters.prefix_hit_tokens += admission.num_cached
        self._place(sequence, admission.num_cached)
        return self._plan_chunk(sequence, admission.num_cached, tokens, budget)

    def _place(self, sequence: Sequence, num_computed: int) -> None:
        table = sequence.table
        assert table is not None
        sequence.status = Status.RUNNING
        sequence.admission = self._num_admissions
        sequence.admitted_step = self.step
        self._num_admissions += 1
        batch = self._batch
        row = batch.place(sequence, num_computed)
        batch.capacity[row] = len(table.blocks) * self.manager.block_size
        batch.publish_at[row] = self._next_publication(table)
        self._plan.new.append(
            NewSequence(
                row=row,
                token_ids=sequence.tokens.tobytes(),
                num_prompt_tokens=sequence.request.num_prompt,
                block_table=np.array(table.blocks, np.int32).tobytes(),
                sampling=sequence.sampling,
                scopes=sequence.request.scopes,
            )
        )

    # ------------------------------------------------------------------ proof

    def check(self) -> None:
        """Raise on the first contradiction between requests, queue, batch and KV memory. For tests."""
        running = [s for s in self._batch.sequences if s is not None]
        waiting = [*self._queue, *self._blocked]
        open_sequences = [s for r in self._requests.values() for s in r.sequences if s.status is not Status.FINISHED]
        if {id(s) for s in running} | {id(s) for s in waiting} != {id(s) for s in open_sequences}:
            raise RuntimeError("a sequence is in no place, or in one too many")
        if len(running) + len(waiting) != len(open_sequences) or len(running) != len(self._batch.order):
            raise RuntimeError("a sequence is in two places")
        if any(s.table is not None for s in waiting):
            raise RuntimeError("a waiting sequence holds blocks")
        tables = [s.table for s in running if s.table is not None]
        self.manager.check(tables)
        for sequence in running:
            row, table = sequence.row, sequence.table
            known, computed = int(self._batch.known[row]), int(self._batch.computed[row])
            if table is None or known != len(sequence.tokens) or not computed < known <= sequence.request.max_total:
                raise RuntimeError("a running sequence's counters are wrong")
            if table.num_published * self.manager.block_size > computed:
                raise RuntimeError("published more than was computed")
