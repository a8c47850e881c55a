"""Who waits, and whom the scheduler should try to admit next.

The queue keeps the order; beside it stand the few that were tried and did not fit. They hold nothing, are tried
again when there is room for them, and let a bounded number of others pass; then they hold the door. Per step the
scheduler calls `begin`, then `next` until it is ``None``, answering each candidate with `admitted`, `refused` or
`deferred`, then `end`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from chatserve.scheduler.fairness import Tenants
from chatserve.scheduler.queue import WaitingQueue
from chatserve.scheduler.request import Sequence

LOOKAHEAD = 4
"""Sequences that may stand aside, not fitting, while later ones are tried."""

MAX_DEFERRED = 16
"""Candidates of one step that may turn out to depend on a block which this step computes, before the search ends."""

RETRY_STEPS = 64
"""A refused sequence is tried again after this many steps even if no room appeared: what it needs may have been
published meanwhile."""


class WaitingRoom:
    """Every waiting sequence is in exactly one of: the queue, the refused, the deferred of the current step."""

    def __init__(self, ageing_steps: int, max_overtakes: int, tenants: Tenants) -> None:
        self._queue = WaitingQueue(ageing_steps, tenants)
        self._max_overtakes = max_overtakes
        self._refused: list[Sequence] = []
        self._deferred: list[Sequence] = []
        self._retries: list[Sequence] = []
        self._step = 0

    def __len__(self) -> int:
        return len(self._queue) + len(self._refused) + len(self._deferred)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._queue
        yield from self._refused
        yield from self._deferred

    def push(self, sequence: Sequence) -> None:
        """Somebody new, or somebody who was preempted and takes its old place."""
        self._queue.push(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Somebody who will not come in any more."""
        if sequence in self._refused:
            self._refused.remove(sequence)
        else:
            self._queue.remove(sequence)

    def best_class(self) -> int:
        """The lowest class that may be waiting; very high if nobody waits."""
        return min([self._queue.best_class(), *(s.request.priority_class for s in self._refused)])

    def first(self, step: int) -> Sequence | None:
        """The one that should run next, whether it fits or not."""
        head = self._queue.peek(step)
        if not self._refused:
            return head
        refused = self._refused[0]
        if head is None or self._queue.rank(refused, step) < self._queue.rank(head, step):
            return refused
        return head

    def begin(self, step: int, num_available: int, *, retry_all: bool) -> None:
        """A step's admissions begin with this many blocks available."""
        self._step = step
        if len(self._refused) > 1:
            # Tenants' counters have moved since.
            self._sort_refused()
        self._retries = [
            s for s in self._refused if retry_all or num_available >= s.missing or step - s.tried_step >= RETRY_STEPS
        ]

    def next(self, num_cached: Callable[[Sequence], int] | None = None) -> Sequence | None:
        """The next candidate, taken out of the room until it is answered for; ``None`` if nobody may be tried.

        Args:
            num_cached: given when admitting somebody will cost others' cached blocks: of those who may go next
                within fairness, the one with most tokens in the cache does, before it is they that are lost.
        """
        while self._retries:
            sequence = self._retries.pop(0)
            if self._may_pass(sequence, len(self._refused)):
                self._refused.remove(sequence)
                return sequence
            self._retries.clear()
        if len(self._deferred) >= MAX_DEFERRED:
            return None
        head = self._queue.peek(self._step)
        if head is None or not self._may_pass(head, LOOKAHEAD - 1):
            return None
        if num_cached is not None and head.num_overtaken < self._max_overtakes:
            head = self._longest_prefix(head, num_cached)
        self._queue.take(head)
        return head

    def _longest_prefix(self, head: Sequence, num_cached: Callable[[Sequence], int]) -> Sequence:
        best, most = head, num_cached(head)
        for sequence in self._queue.contenders(head, LOOKAHEAD):
            cached = num_cached(sequence)
            if cached > most and self._may_pass(sequence, LOOKAHEAD - 1):
                best, most = sequence, cached
        if best is not head:
            head.num_overtaken += 1
        return best

    def _may_pass(self, candidate: Sequence, most_ahead: int) -> bool:
        """Whether those who stand aside and rank before ``candidate`` are few enough and let it pass."""
        if not self._refused:
            return True
        rank = self._queue.rank(candidate, self._step)
        ahead = [s for s in self._refused if self._queue.rank(s, self._step) < rank]
        return len(ahead) <= most_ahead and all(s.num_overtaken < self._max_overtakes for s in ahead)

    def admitted(self, sequence: Sequence) -> None:
        """The candidate runs; those who rank before it have been overtaken once more."""
        sequence.num_overtaken = 0
        if self._refused:
            rank = self._queue.rank(sequence, self._step)
            for other in self._refused:
                if self._queue.rank(other, self._step) < rank:
                    other.num_overtaken += 1

    def refused(self, sequence: Sequence, num_needed: int) -> None:
        """The candidate does not fit until ``num_needed`` blocks are available; it stands aside."""
        sequence.missing = num_needed
        sequence.tried_step = self._step
        self._refused.append(sequence)
        self._sort_refused()
        if len(self._refused) > LOOKAHEAD:
            self._queue.push(self._refused.pop())

    def _sort_refused(self) -> None:
        self._refused.sort(key=lambda s: self._queue.rank(s, self._step))

    def deferred(self, sequence: Sequence) -> None:
        """The candidate waits for the next step: for a block that this one computes, or for its turn."""
        self._deferred.append(sequence)

    def end(self) -> None:
        """The step's admissions are over."""
        for sequence in self._deferred:
            self._queue.push(sequence)
        self._deferred.clear()
        self._retries.clear()
