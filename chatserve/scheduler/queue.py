"""Who waits, and who is next.

Order: priority class with ageing, then the tenant with the lowest virtual token counter, then within the tenant
priority with ageing and arrival. Ageing makes every step of waiting count like a fraction of a level, for everybody
at the same rate, so within a tenant the order of two waiting sequences never changes and a heap with static keys is
enough. Ageing reorders and never preempts. Counters only rise, so the heap of tenants may hold old values: they are
early, never late, and corrected when they surface.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any, TypeVar

from chatserve.scheduler.fairness import SLACK_TOKENS, Tenants
from chatserve.scheduler.request import Request, Sequence

_Entry = TypeVar("_Entry", bound=tuple[Any, ...])

Rank = tuple[int, float, int, int, int]
"""Smaller runs first: (aged class, tenant's counter, aged priority, arrival, choice)."""


class _ClassQueue:
    """The waiting sequences of one priority class."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._heaps: dict[int, list[tuple[int, int, int, Sequence]]] = {}
        self._order: list[tuple[float, int]] = []

    def __iter__(self) -> Iterator[Sequence]:
        for heap in self._heaps.values():
            for _, _, _, sequence in heap:
                yield sequence

    def push(self, sequence: Sequence, aged_priority: int) -> None:
        request = sequence.request
        heap = self._heaps.get(request.tenant)
        if heap is None:
            heap = self._heaps[request.tenant] = []
            heapq.heappush(self._order, (self._tenants.counters[request.tenant], request.tenant))
        heapq.heappush(heap, (aged_priority, request.arrival, sequence.choice, sequence))

    def peek(self, waiting: set[Sequence]) -> Sequence | None:
        order = self._order
        while order:
            counter, tenant = order[0]
            heap = self._heaps[tenant]
            while heap and heap[0][3] not in waiting:
                heapq.heappop(heap)
            if not heap:
                heapq.heappop(order)
                del self._heaps[tenant]
                continue
            now = self._tenants.counters[tenant]
            if now > counter:
                heapq.heapreplace(order, (now, tenant))
                continue
            return heap[0][3]
        return None

    def take(self, sequence: Sequence) -> None:
        heap = self._heaps[sequence.request.tenant]
        if heap[0][3] is sequence:
            heapq.heappop(heap)
        else:
            heap[:] = [entry for entry in heap if entry[3] is not sequence]
            heapq.heapify(heap)

    def contenders(self, head: Sequence, most: int, waiting: set[Sequence]) -> list[Sequence]:
        counters = self._tenants.counters
        limit = counters[head.request.tenant] + SLACK_TOKENS
        found: list[Sequence] = []
        for _, tenant in _smallest(self._order, most):
            if counters[tenant] > limit:
                continue
            priority: int | None = None
            for *_, sequence in _smallest(self._heaps[tenant], most + 1):
                if sequence is head or sequence not in waiting:
                    continue
                if priority is None:
                    priority = head.request.priority if tenant == head.request.tenant else sequence.request.priority
                if sequence.request.priority == priority:
                    found.append(sequence)
            if len(found) >= most:
                break
        return found[:most]

    def compact(self, waiting: set[Sequence]) -> None:
        for heap in self._heaps.values():
            heap[:] = [entry for entry in heap if entry[3] in waiting]
            heapq.heapify(heap)


class WaitingQueue:
    """Waiting sequences by class and tenant; every operation is O(log n), amortised."""

    def __init__(self, ageing_steps: int, tenants: Tenants) -> None:
        self._ageing_steps = ageing_steps
        self._tenants = tenants
        self._classes: dict[int, _ClassQueue] = {}
        self._waiting: set[Sequence] = set()
        self._num_removed = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)

    def best_class(self) -> int:
        """The lowest class that may have a waiting sequence; very high if nobody waits."""
        return min(self._classes, default=2**63)

    def push(self, sequence: Sequence) -> None:
        """Enqueue; a sequence that comes back keeps the place of its request's arrival."""
        if sequence in self._waiting:
            raise RuntimeError("a sequence was enqueued twice")
        self._waiting.add(sequence)
        level = sequence.request.priority_class
        queue = self._classes.get(level)
        if queue is None:
            queue = self._classes[level] = _ClassQueue(self._tenants)
        queue.push(sequence, self._aged_priority(sequence.request))

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence wherever it stands; its entry is skipped, or swept when most entries are dead."""
        self._waiting.discard(sequence)
        self._num_removed += 1
        if self._num_removed > 64 and self._num_removed > 4 * len(self._waiting):
            self._num_removed = 0
            for queue in self._classes.values():
                queue.compact(self._waiting)

    def peek(self, step: int) -> Sequence | None:
        """The sequence that should run next at logical time ``step``."""
        best: Sequence | None = None
        best_rank: Rank | None = None
        for level in list(self._classes):
            head = self._classes[level].peek(self._waiting)
            if head is None:
                del self._classes[level]
                continue
            if len(self._classes) == 1:
                return head
            rank = self.rank(head, step)
            if best_rank is None or rank < best_rank:
                best, best_rank = head, rank
        return best

    def take(self, sequence: Sequence) -> None:
        """Remove a waiting sequence that is about to be tried."""
        self._classes[sequence.request.priority_class].take(sequence)
        self._waiting.discard(sequence)

    def contenders(self, head: Sequence, most: int) -> list[Sequence]:
        """Up to ``most`` sequences that could run before ``head`` at little cost to it.

        They are of its class, of tenants no more than `SLACK_TOKENS` ahead of its own, and of no worse priority
        within their tenant than those they would pass.

        Args:
            head: what `peek` shows.
        """
        return self._classes[head.request.priority_class].contenders(head, most, self._waiting)

    def rank(self, sequence: Sequence, step: int) -> Rank:
        """Where a waiting sequence stands at ``step``."""
        request = sequence.request
        aged_class = request.priority_class - (step - request.arrival_step) // self._ageing_steps
        counter = self._tenants.counters[request.tenant]
        return aged_class, counter, self._aged_priority(request), request.arrival, sequence.choice

    def _aged_priority(self, request: Request) -> int:
        return request.priority * self._ageing_steps + request.arrival_step


def _smallest(heap: list[_Entry], most: int) -> Iterator[_Entry]:
    """The ``most`` least entries of a heap in order, in O(most · log most)."""
    frontier = [(heap[0], 0)] if heap else []
    while frontier and most:
        entry, at = heapq.heappop(frontier)
        most -= 1
        for child in (2 * at + 1, 2 * at + 2):
            if child < len(heap):
                heapq.heappush(frontier, (heap[child], child))
        yield entry
