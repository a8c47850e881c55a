"""WaitingQueue: class, then priority, then arrival, with ageing; aborted entries are gone."""

from __future__ import annotations

import heapq

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from chatserve.sampling_params import SamplingParams
from chatserve.scheduler.fairness import SLACK_TOKENS, Tenants
from chatserve.scheduler.queue import WaitingQueue, _smallest
from chatserve.scheduler.request import Request, Sequence


class Line:
    """A queue and requests arriving at it one after the other."""

    def __init__(self, ageing_steps: int = 100) -> None:
        self.tenants = Tenants()
        self.queue = WaitingQueue(ageing_steps, self.tenants)
        self.count = 0

    def arrive(
        self, *, step: int = 0, priority: int = 0, priority_class: int = 0, n: int = 1, tenant: str = ""
    ) -> Sequence:
        self.count += 1
        request = Request(
            self.count,
            np.array([1], np.int32).tobytes(),
            SamplingParams(n=n, seed=0),
            (0,),
            tenant=self.tenants.index(tenant),
            priority=priority,
            priority_class=priority_class,
        )
        request.arrival, request.arrival_step = self.count, step
        sequence = Sequence(request, 0)
        self.queue.push(sequence)
        return sequence

    def pop(self, step: int = 0) -> Sequence | None:
        sequence = self.queue.peek(step)
        if sequence is not None:
            self.queue.take(sequence)
        return sequence

    def drain(self, step: int = 0) -> list[Sequence]:
        order = []
        while (sequence := self.pop(step)) is not None:
            order.append(sequence)
        return order


def test_lower_class_then_lower_priority_then_arrival() -> None:
    """Lower values run first, as in vLLM."""
    line = Line()
    last = line.arrive(priority_class=1, priority=-5)
    third = line.arrive(priority=1)
    first = line.arrive(priority=-1)
    second = line.arrive(priority=-1)
    assert line.drain() == [first, second, third, last]


def test_waiting_long_enough_beats_a_better_class_and_a_better_priority() -> None:
    """Nobody starves: every ``ageing_steps`` of waiting count one level."""
    line = Line(ageing_steps=100)
    old = line.arrive(step=0, priority_class=1)
    better = line.arrive(step=50, priority_class=0)
    assert line.pop(99) is better
    line.arrive(step=250, priority_class=0)
    assert line.queue.peek(250) is old
    by_priority = Line(ageing_steps=100)
    patient = by_priority.arrive(step=0, priority=2)
    eager = by_priority.arrive(step=201, priority=0)
    assert by_priority.drain(201) == [patient, eager]


def test_a_preempted_sequence_comes_back_to_its_old_place() -> None:
    """It resumes before any later arrival of its priority (vllm#41951)."""
    line = Line()
    early = line.arrive()
    later = line.arrive()
    assert line.pop(0) is early
    line.queue.push(early)
    assert line.drain() == [early, later]


def test_choices_of_one_request_do_not_need_to_be_comparable() -> None:
    """Same class, priority and arrival (vllm#21519)."""
    line = Line()
    first = line.arrive(n=3)
    others = [Sequence(first.request, choice) for choice in (2, 1)]
    for each in others:
        line.queue.push(each)
    assert [s.choice for s in line.drain()] == [0, 1, 2]


def test_removed_sequences_hold_no_memory_and_no_place() -> None:
    """A flood of aborted requests leaves neither entries nor length."""
    line = Line()
    keep = line.arrive()
    for _ in range(1000):
        line.queue.remove(line.arrive())
    assert len(line.queue) == 1
    assert sum(1 for queue in line.queue._classes.values() for _ in queue) < 200
    assert line.drain() == [keep]


def test_contenders_hurt_nobody() -> None:
    """Only who is of the head's class, of a tenant within the slack, and of no worse priority may go before it."""
    line = Line()
    head = line.arrive(tenant="a")
    own = [line.arrive(tenant="a") for _ in range(3)]
    line.arrive(tenant="a", priority=1)
    near = line.arrive(tenant="b")
    line.arrive(tenant="far")
    line.arrive(tenant="a", priority_class=1)
    tenants = line.tenants
    tenants.charge_computed(tenants.index("b"), int(SLACK_TOKENS))
    tenants.charge_computed(tenants.index("far"), int(SLACK_TOKENS) + 1)
    assert line.queue.peek(0) is head
    assert line.queue.contenders(head, 8) == [*own, near]
    assert line.queue.contenders(head, 2) == own[:2]
    line.queue.take(own[1])
    line.queue.remove(near)
    assert line.queue.contenders(head, 8) == [own[0], own[2]]
    line.queue.push(own[1])
    assert line.queue.contenders(head, 8) == own


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(0, 50))
def test_the_smallest_of_a_heap_come_in_order(values: list[int], most: int) -> None:
    """Without taking the heap apart."""
    heap = [(value,) for value in values]
    heapq.heapify(heap)
    before = list(heap)
    assert list(_smallest(heap, most)) == sorted(before)[:most]
    assert heap == before
