"""Continuous batching over a paged KV cache: decide, then learn what came of it.

No phases: every sequence has *known* and *computed* tokens, and each step moves computed towards known within a
token budget. Decoding, chunked prefill, a cache hit and a resume are the same case. `schedule` makes the plan of
one step, `update` takes the worker's answer. No clock, no I/O, no randomness: the same calls give the same plans.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import numpy as np

from chatserve.cache.block_table import BlockTable
from chatserve.cache.kv_cache_manager import KVCacheManager
from chatserve.cache.match import Match
from chatserve.config import SchedulerConfig
from chatserve.errors import ContextLengthError
from chatserve.scheduler.batch import NEVER, Batch
from chatserve.scheduler.decode_run import Int32s
from chatserve.scheduler.fairness import Tenants
from chatserve.scheduler.output import ModelRunnerOutput, SampleLogprobs, SchedulerOutput, StepNews
from chatserve.scheduler.plan import Plan, RowChanges
from chatserve.scheduler.policy import Claims, PrefillBudget, pick_slot_victim, pick_unfair_victim, prefill_chunk
from chatserve.scheduler.request import Request, Sequence, Status
from chatserve.scheduler.request_book import Ending, RequestBook
from chatserve.scheduler.waiting_room import WaitingRoom

QUANTUM_STEPS = 32
"""Steps for which a resumed sequence is safe from losing its slot again."""

DECODED_RUN = 4
"""Whole blocks that a sequence decodes before it publishes them. Prompts are published as they are computed, for others
wait for them, and everything is when its sequence lets go; in between hardly anybody asks for half an answer, and
publishing is the dearest piece of bookkeeping in a step."""


_MANY = 8
"""Rows for which bringing everything up to date is cheaper than looking at each."""


class SchedulerCounters:
    """Monotone counts since start."""

    def __init__(self) -> None:
        self.preemptions = 0
        self.aborts = 0
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0
        self.prompt_tokens = 0
        self.computed_tokens = 0
        self.computed_prompt_tokens = 0
        self.generation_tokens = 0


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
        prefill_tokens_per_second: float = 0.0,
    ) -> None:
        """Args:
        prefill_tokens_per_second: measured by the worker; bounds the prefill beside decodes where the
            configuration leaves it open.
        """
        self.manager = manager
        self.step = 0
        self.counters = SchedulerCounters()
        self._config = config
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._eos = frozenset(eos_token_ids)
        self._prefill_chunk = config.long_prefill_token_threshold or prefill_chunk(prefill_tokens_per_second)
        self.tenants = Tenants()
        self.requests = RequestBook(self.tenants)
        self.waiting = WaitingRoom(config.ageing_steps, config.max_overtakes, self.tenants)
        self.batch = Batch(config.max_num_seqs, self.max_total_tokens())
        self._num_admissions = 0
        self._claims = Claims()
        self._changes = RowChanges()
        self._plan = Plan()

    # ------------------------------------------------------------------ requests

    def max_total_tokens(self) -> int:
        """Prompt and output tokens one sequence can ever have here."""
        slots = (self.manager.pool.num_blocks - self.manager.num_pinned) * self.manager.block_size
        return min(self._max_model_len, slots + 1)

    def blocks_to_spare(self) -> int:
        """Blocks of the pool that no accepted request needs for itself: so many may ever be pinned."""
        needed = max((request.max_total for request in self.requests), default=1)
        return self.manager.pool.num_blocks - -(-(needed - 1) // self.manager.block_size)

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
                f"at most {limit} fit here. Shorten the prompt or ask for fewer tokens."
            )
        request.max_total = limit if wanted is None else total
        self.waiting.push(self.requests.open(request, self.step))

    def abort(self, request_id: int) -> None:
        """End a request wherever it is. Unknown ids have just finished, which is fine."""
        request = self.requests.get(request_id)
        if request is not None:
            self.counters.aborts += 1
            self._end_request(request, Ending("abort"))

    def preempt_request(self, request_id: int) -> None:
        """Send the running sequences of a request back to the queue, as lack of memory would."""
        request = self.requests.get(request_id)
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
        self._plan = plan = Plan()
        self._claims.clear()
        batch = self.batch
        self._make_room()
        self._grow_running()

        decodes = batch.rows()
        if batch.prefilling or len(self.waiting):
            prefilling = sorted(batch.prefilling)
            if prefilling:
                decodes = np.array([row for row in decodes.tolist() if row not in batch.prefilling], np.int32)
            self._prefill(prefilling, len(decodes))
        return plan.build(self.step, batch, decodes, self._changes, self.manager)

    def update(self, output: ModelRunnerOutput) -> StepNews:
        """Take the worker's answer to the plan that `schedule` returned last; nothing may happen in between."""
        plan, batch, manager = self._plan, self.batch, self.manager
        manager.finish_step()
        ids = memoryview(output.tokens).cast("i").tolist()
        if len(ids) != len(plan.sample_rows):
            raise RuntimeError(f"The worker returned {len(ids)} tokens for {len(plan.sample_rows)} rows.")
        run = plan.run
        if run is not None and not output.failed and min(ids) >= 0 and max(ids) < self._vocab_size:
            # The usual step: what its rows have in common is known already.
            batch.advance(output.tokens)
            self.tenants.charge_generated(run.tenants)
            news = StepNews(run.request_ids, run.choices, output.tokens, output.logprobs)
            rows = run.rows
            publishing = run.publishing.take(run.num_steps)
            if len(publishing) > _MANY:
                batch.settle()
            self._publish_rows(publishing)
            if run.ending.take(run.num_steps) or self._may_stop(ids):
                batch.settle()
                self._finish_outputs(rows, ids)
        else:
            if run is not None:
                batch.end_run()
                plan.after = batch.computed[plan.rows] + 1
            batch.computed[plan.rows] = plan.after
            rows, ids, logprobs = self._fail_and_keep(output, ids)
            tokens = np.array(ids, np.int32)
            batch.append(rows, tokens)
            self.tenants.charge_generated(Counter(batch.tenants[rows].tolist()))
            news = StepNews(
                batch.request_ids[rows].tobytes(), batch.choices[rows].tobytes(), tokens.tobytes(), logprobs
            )
            self._publish(plan)
            self._finish_outputs(rows, ids)
        self.counters.generation_tokens += len(ids)
        if batch.prefilling:
            batch.prefilling -= {row for row in batch.prefilling if batch.next_is_decode(row)}
        return self.requests.tell(news)

    def _fail_and_keep(
        self, output: ModelRunnerOutput, ids: list[int]
    ) -> tuple[Int32s, list[int], tuple[SampleLogprobs | None, ...] | None]:
        """End what failed; rows, tokens and log-probabilities of the samples that are left."""
        rows, logprobs = self._plan.sample_rows, output.logprobs
        refused = self._fail_rows(output.failed)
        outside = [not 0 <= token < self._vocab_size for token in ids]
        refused |= self._fail_samples(rows[outside])
        kept = [i for i, row in enumerate(rows.tolist()) if row not in refused]
        return rows[kept], [ids[i] for i in kept], None if logprobs is None else tuple(logprobs[i] for i in kept)

    def _publish(self, plan: Plan) -> None:
        batch = self.batch
        self._publish_rows(plan.rows[plan.after >= batch.publish_at[plan.rows]].tolist())
        for parent_row, child_row in plan.forks:
            parent, child = batch.sequences[parent_row], batch.sequences[child_row]
            if parent is not None and parent.table and child is not None and child.table:
                self._changes.note(child_row, self.manager.follow(child.table, parent.table))
                batch.publish_at[child_row] = self._next_publication(child.table)

    def _publish_rows(self, rows: Iterable[int]) -> None:
        """Publish whole blocks of these rows, for which they are due."""
        batch = self.batch
        for row in rows:
            sequence = batch.sequences[row]
            if sequence is None or sequence.table is None:
                continue
            table = sequence.table
            changes = self.manager.publish(table, batch.known_tokens(row), batch.num_computed(row), self.step)
            self._changes.note(row, changes)
            batch.set_publication(row, self._next_publication(table, 1 if row in batch.prefilling else DECODED_RUN))

    def _next_publication(self, table: BlockTable, num_blocks: int = 1) -> int:
        return NEVER if table.detached else (table.num_published + num_blocks) * self.manager.block_size

    # ------------------------------------------------------------------ endings

    def _may_stop(self, ids: list[int]) -> bool:
        """Whether one of these tokens may be the end of its output."""
        own = self.batch.own_stop_ids
        return not self._eos.isdisjoint(ids) or (bool(own) and not own.keys().isdisjoint(ids))

    def _finish_outputs(self, rows: Int32s, ids: list[int]) -> None:
        """End what has come to its end with the tokens ``ids``."""
        batch = self.batch
        computed = batch.computed[rows]
        full = computed >= batch.end_at[rows]
        if not self._may_stop(ids) and not np.count_nonzero(full):
            return
        stopped = np.array([token in self._eos for token in ids], np.bool_) & batch.uses_eos[rows]
        for i in np.flatnonzero(batch.own_stops[rows]).tolist():
            sequence = batch.sequences[rows[i]]
            assert sequence is not None
            stopped[i] |= ids[i] in sequence.sampling.stop_token_ids
        stopped &= computed >= batch.stops_from[rows]
        for i in np.flatnonzero(stopped | full).tolist():
            sequence = batch.sequences[rows[i]]
            assert sequence is not None
            self._end(sequence, Ending("stop", stop_token=ids[i]) if stopped[i] else Ending("length"))

    def _fail_rows(self, failed: tuple[int, ...]) -> set[int]:
        """Numerical failure: what these rows' requests computed is unpublished, and they end in error."""
        gone: set[int] = set()
        for index in failed:
            sequence = self.batch.sequences[int(self._plan.rows[index])]
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
            sequence = self.batch.sequences[row]
            if sequence is not None:
                gone |= self._fail(sequence.request, "The worker returned a token outside the vocabulary.")
        return gone

    def _fail(self, request: Request, message: str) -> set[int]:
        rows = {s.row for s in request.sequences if s.row >= 0}
        self._end_request(request, Ending("error", error_code="internal_error", error_message=message))
        return rows

    def _end_request(self, request: Request, ending: Ending) -> None:
        for sequence in list(request.sequences):
            if sequence.status is not Status.FINISHED:
                self._end(sequence, ending)
        # Choices that were never forked have no sequence; they end all the same.
        for choice in range(len(request.sequences), request.sampling.n):
            self.requests.note_end(request, choice, ending)

    def _end(self, sequence: Sequence, ending: Ending) -> None:
        """The one way out of a sequence: blocks released, row freed, terminal event noted."""
        if sequence.status is Status.RUNNING:
            self._leave_batch(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.status = Status.FINISHED
        self.requests.note_end(sequence.request, sequence.choice, ending)

    def _leave_batch(self, sequence: Sequence) -> None:
        """Release blocks and row; a plan in the making must not mention the row any more."""
        assert sequence.table is not None
        batch, row = self.batch, sequence.row
        self.manager.release(sequence.table, batch.known_tokens(row), batch.num_computed(row), self.step)
        sequence.table = None
        self._changes.free(batch.free(sequence))

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue with every token it has; its blocks stay cached while space lasts."""
        self.counters.preemptions += 1
        sequence.num_preemptions += 1
        self._leave_batch(sequence)
        sequence.status = Status.WAITING
        self.waiting.push(sequence)

    # ------------------------------------------------------------------ room

    def _make_room(self) -> None:
        """Slots and memory for the next sequence, at the cost of a running one of a strictly worse class."""
        batch = self.batch
        if not len(self.waiting) or not len(batch):
            return
        worst = batch.order[-1].request.priority_class
        may_be_unfair = not batch.num_free_rows and len(self.tenants) > 2
        if not (may_be_unfair or self.waiting.best_class() < worst):
            return
        head = self.waiting.first(self.step)
        if head is None:
            return
        if head.request.priority_class >= worst:
            if may_be_unfair:
                self._make_room_for_fairness(head)
            return
        while not batch.num_free_rows or self._lacks_memory(head):
            victim = pick_slot_victim(batch.order, head.request.priority_class, self.step - QUANTUM_STEPS)
            if victim is None:
                return
            self._preempt(victim)

    def _make_room_for_fairness(self, head: Sequence) -> None:
        """A slot for the next sequence, at the cost of a tenant that is far ahead of its own."""
        victim = pick_unfair_victim(self.batch, self.tenants, head, self.step - QUANTUM_STEPS)
        if victim is not None:
            self._preempt(victim)

    def _lacks_memory(self, sequence: Sequence) -> bool:
        match = self._match(sequence)
        missing = self.manager.blocks_missing(match, len(sequence.tokens), sequence.request.max_total)
        return missing > 0

    def _match(self, sequence: Sequence) -> Match:
        return self.manager.match(sequence.tokens.tobytes(), sequence.request.scopes, self.step)

    def _num_cached(self, sequence: Sequence) -> int:
        return self._match(sequence).num_tokens

    def _in_order(self, rows: Iterable[int]) -> list[Sequence]:
        """The sequences of these rows, best class first, then in order of admission."""
        found = [sequence for row in rows if (sequence := self.batch.sequences[row]) is not None]
        return sorted(found, key=lambda s: (s.request.priority_class, s.admission))

    def _grow_running(self) -> None:
        """Give every row that is about to write past its capacity a block, preempting from the end if need be."""
        batch, manager, run = self.batch, self.manager, self.batch.run
        if run is not None:
            needing = run.growing.take(run.num_steps)
        else:
            rows = batch.rows()
            needing = rows[batch.computed[rows] >= batch.capacity[rows]].tolist()
        # Each takes one block; who goes first matters where they are scarce.
        scarce = len(needing) > manager.pool.num_free
        for sequence in self._in_order(needing) if scarce else [batch.sequences[row] for row in needing]:
            if sequence is None or sequence.row < 0 or sequence.table is None:
                continue  # a victim of one before it
            row = sequence.row
            while True:
                changes = manager.grow(sequence.table, batch.num_computed(row) + 1)
                if changes is not None:
                    self._changes.note(row, changes)
                    batch.set_capacity(row, len(sequence.table.blocks) * manager.block_size)
                    break
                victim = batch.order[-1]
                self._preempt(victim)
                if victim is sequence:
                    break

    # ------------------------------------------------------------------ prefill

    def _prefill(self, chunked: list[int], num_decodes: int) -> None:
        """Chunks of the rows ``chunked`` and of waiting sequences, within the step's budget."""
        batch, tokens, served = self.batch, self._config.max_num_batched_tokens - num_decodes, frozenset[int]()
        several = self.tenants.num_present > 1
        if num_decodes or several:
            # A tenant alone, with nothing to stall, may fill the step; else streams and newcomers wait for its end.
            tokens = min(tokens, self._prefill_chunk)
        if several:
            served = frozenset(batch.tenants[batch.index()].tolist())
        budget = PrefillBudget(tokens, served)
        if chunked:
            if len(self.waiting):
                # Whoever has been served less than those in the middle of their prefill goes before them.
                self._admit_waiting(
                    budget, min(self.tenants.counters[tenant] for tenant in batch.tenants[chunked].tolist())
                )
            for sequence in self._in_order(chunked):
                self._run_chunk(sequence, budget)
        if len(self.waiting):
            self._admit_waiting(budget)

    def _run_chunk(self, sequence: Sequence, budget: PrefillBudget) -> None:
        """Schedule the next chunk of a running sequence, unless it waits this step."""
        if not budget.left(sequence.request.tenant):
            return
        batch, row, table = self.batch, sequence.row, sequence.table
        assert table is not None
        tokens = batch.known_tokens(row).tobytes()
        computed, changes = self.manager.extend_match(table, tokens, int(batch.computed[row]), self.step)
        batch.computed[row] = computed
        if changes:
            batch.publish_at[row] = self._next_publication(table)
            self._changes.note(row, changes)
        if table.num_published == computed // self.manager.block_size:
            parent = table.blocks[table.num_published - 1] if table.num_published else -1
            if self._is_claimed(sequence, parent, table.num_published, tokens):
                return
        self._plan_chunk(sequence, computed, tokens, budget)

    def _is_claimed(self, sequence: Sequence, parent: int, index: int, tokens: bytes) -> bool:
        """Whether somebody whose result it may see computes its block ``index``, after ``parent``, in this step."""
        size = self.manager.block_size * 4
        block = tokens[index * size : (index + 1) * size]
        return len(block) == size and self._claims.visible(parent, block, sequence.request.scopes)

    def _claim(self, sequence: Sequence, end: int, tokens: bytes) -> None:
        """The first unpublished block of a sequence is complete after this step's tokens up to ``end``."""
        table, size = sequence.table, self.manager.block_size * 4
        assert table is not None
        index = table.num_published
        if (index + 1) * size <= end * 4:
            parent = table.blocks[index - 1] if index else -1
            block = tokens[index * size : (index + 1) * size]
            self._claims.add(parent, block, sequence.request.scopes[-1])

    def _plan_chunk(self, sequence: Sequence, computed: int, tokens: bytes, budget: PrefillBudget) -> None:
        tenant, missing = sequence.request.tenant, len(tokens) // 4 - computed
        size = min(budget.left(tenant), missing)
        budget.spend(tenant, size, completes=size == missing)
        self._plan.add_chunk(sequence.row, tokens[computed * 4 : (computed + size) * 4])
        self._claim(sequence, computed + size, tokens)
        self.counters.computed_tokens += size
        self.counters.computed_prompt_tokens += max(0, min(size, sequence.request.num_prompt - computed))
        self.tenants.charge_computed(tenant, size)
        if not sequence.request.forked and size == missing:
            self._fork(sequence)

    def _fork(self, parent: Sequence) -> None:
        """The prompt is complete after this step: the further choices draw their first token from it too."""
        request = parent.request
        request.forked = True
        batch = self.batch
        assert parent.table is not None
        for _ in range(1, request.sampling.n):
            child = self.requests.add_choice(request)
            if not batch.num_free_rows:
                self.waiting.push(child)
                continue
            child.table = self.manager.fork(parent.table, request.num_prompt)
            self._place(child, request.num_prompt)
            self._plan.forks.append((parent.row, child.row))
            batch.capacity[child.row] = request.num_prompt
        batch.capacity[parent.row] = request.num_prompt

    # ------------------------------------------------------------------ admission

    def _admit_waiting(self, budget: PrefillBudget, below: float = math.inf) -> None:
        """Admit waiting sequences, each with the first chunk of its prefill, while rows, tokens and blocks last.

        Args:
            below: only of tenants whose counter is lower.
        """
        batch, waiting, counters = self.batch, self.waiting, self.tenants.counters
        waiting.begin(self.step, self.manager.num_available, retry_all=not len(batch))
        while not budget.exhausted and batch.num_free_rows:
            first = waiting.first(self.step)
            if first is None or not budget.left(first.request.tenant):
                break
            if below < math.inf and counters[first.request.tenant] >= below:
                break
            is_tight = self.manager.pool.num_free * self.manager.block_size < len(first.tokens)
            sequence = waiting.next(self._num_cached if is_tight else None)
            if sequence is None:
                break
            if budget.left(sequence.request.tenant):
                self._try_admit(sequence, budget)
            else:
                waiting.deferred(sequence)
        waiting.end()

    def _try_admit(self, sequence: Sequence, budget: PrefillBudget) -> None:
        """Admit a candidate and schedule its first chunk, or put it back."""
        request, manager = sequence.request, self.manager
        tokens = sequence.tokens.tobytes()
        match = manager.match(tokens, request.scopes, self.step)
        # What follows a host block nobody can be computing: whoever began would have promoted it.
        parent = match.blocks[-1] if match.blocks else -1
        if not match.host_blocks and self._is_claimed(sequence, parent, match.num_blocks, tokens):
            self.waiting.deferred(sequence)
            return
        admission = manager.admit(match, request.scopes, len(sequence.tokens), request.max_total)
        if admission is None:
            missing = manager.blocks_missing(match, len(sequence.tokens), request.max_total)
            self.waiting.refused(sequence, manager.num_available + missing)
            return
        self.waiting.admitted(sequence)
        sequence.table = admission.table
        if not request.started:
            self.requests.note_start(request, admission.num_cached)
            self.counters.prompt_tokens += request.num_prompt
            self.counters.prefix_query_tokens += request.num_prompt
            self.counters.prefix_hit_tokens += admission.num_cached
        self._place(sequence, admission.num_cached)
        self._plan_chunk(sequence, admission.num_cached, tokens, budget)

    def _place(self, sequence: Sequence, num_computed: int) -> None:
        table = sequence.table
        assert table is not None
        sequence.status = Status.RUNNING
        sequence.admission = self._num_admissions
        sequence.admitted_step = self.step
        self._num_admissions += 1
        batch = self.batch
        row = batch.place(sequence, num_computed)
        batch.capacity[row] = len(table.blocks) * self.manager.block_size
        batch.publish_at[row] = self._next_publication(table)
        self._plan.add_sequence(sequence, batch.known_tokens(row))
