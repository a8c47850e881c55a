"""Who waits, and who is next.

Order: priority class with ageing, then priority within the class with ageing, then arrival. Ageing makes every
step of waiting count like a fraction of a level, for everybody at the same rate; within a class that leaves the
order of two waiting sequences fixed, so a heap with static keys is enough. Ageing reorders and never preempts.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from chatserve.scheduler.request import Request, Sequence

Rank = tuple[int, int, int, int]
"""Smaller runs first: (aged class, aged priority, arrival, choice)."""


class WaitingQueue:
    """Waiting sequences by class; every operation is O(log n) in the length of one class."""

    def __init__(self, ageing_steps: int) -> None:
        self._ageing_steps = ageing_steps
        self._heaps: dict[int, list[tuple[int, int, int, Sequence]]] = {}
        self._waiting: set[int] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        for heap in self._heaps.values():
            for _, _, _, sequence in heap:
                if id(sequence) in self._waiting:
                    yield sequence

    def best_class(self) -> int:
        """The lowest class that may have a waiting sequence; very high if nobody waits."""
        return min(self._heaps, default=2**63)

    def push(self, sequence: Sequence) -> None:
        """Enqueue; a sequence that comes back keeps the place of its request's arrival."""
        request = sequence.request
        if id(sequence) in self._waiting:
            raise RuntimeError("a sequence was enqueued twice")
        self._waiting.add(id(sequence))
        heap = self._heaps.setdefault(request.priority_class, [])
        heapq.heappush(heap, (self._aged_priority(request), request.arrival, sequence.choice, sequence))

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence wherever it stands; its heap entry is skipped later."""
        self._waiting.discard(id(sequence))
        heap = self._heaps.get(sequence.request.priority_class)
        # The entry holds the object, so its id cannot be reused while the entry exists. Rebuild when most
        # entries are dead, so that a flood of aborted requests holds no memory.
        if heap is not None and len(heap) > 64 and len(heap) > 4 * len(self._waiting):
            live = [entry for entry in heap if id(entry[3]) in self._waiting]
            heapq.heapify(live)
            self._heaps[sequence.request.priority_class] = live

    def peek(self, step: int) -> Sequence | None:
        """The sequence that should run next at logical time ``step``."""
        best: Sequence | None = None
        best_rank: Rank | None = None
        for level in list(self._heaps):
            heap = self._heaps[level]
            while heap and id(heap[0][3]) not in self._waiting:
                heapq.heappop(heap)
            if not heap:
                del self._heaps[level]
                continue
            rank = self.rank(heap[0][3], step)
            if best_rank is None or rank < best_rank:
                best, best_rank = heap[0][3], rank
        return best

    def pop(self, step: int) -> Sequence | None:
        """Remove and return what `peek` shows."""
        sequence = self.peek(step)
        if sequence is not None:
            heapq.heappop(self._heaps[sequence.request.priority_class])
            self._waiting.discard(id(sequence))
        return sequence

    def rank(self, sequence: Sequence, step: int) -> Rank:
        """Where a waiting sequence stands at ``step``."""
        request = sequence.request
        aged_class = request.priority_class - (step - request.arrival_step) // self._ageing_steps
        return aged_class, self._aged_priority(request), request.arrival, sequence.choice

    def _aged_priority(self, request: Request) -> int:
        return request.priority * self._ageing_steps + request.arrival_step
