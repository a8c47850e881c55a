"""Small decisions of the scheduler that stand on their own: claims and victims."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from chatserve.scheduler.batch import Batch
from chatserve.scheduler.fairness import QUANTUM_TOKENS, Tenants
from chatserve.scheduler.request import Sequence

STALL_SECONDS = 0.06
"""How long one step's prefill may keep streams waiting for their next token, and newcomers for their turn."""


def prefill_chunk(tokens_per_second: float) -> int:
    """Prompt tokens per step that stay within `STALL_SECONDS`; 512 where the speed is unknown."""
    if not tokens_per_second:
        return 512
    return max(64, min(2048, int(tokens_per_second * STALL_SECONDS)))


EFFICIENT_PREFILL = 64
"""Prompt tokens that one pass over the weights serves at nearly full speed; splitting beyond it costs little."""


class PrefillBudget:
    """How many prompt tokens a step may still run, and for whom.

    A step in which a newcomer, a tenant with nothing running, completes its prompt is kept short: what those who are
    being served already want to prefill waits for the next step, except for what `EFFICIENT_PREFILL` leaves. Their
    work is put off, not lost, and the newcomer's first token does not wait for it.

    Args:
        tokens: for the whole step.
        served: tenants with running sequences when the step began.
    """

    def __init__(self, tokens: int, served: frozenset[int] = frozenset()) -> None:
        self._tokens = tokens
        self._spent = 0
        self._served = served
        self._newcomer_done = False

    @property
    def exhausted(self) -> bool:
        """Whether nobody may run any more."""
        return self._spent >= self._tokens

    def left(self, tenant: int) -> int:
        """Tokens that a sequence of ``tenant`` may run now."""
        limit = self._tokens
        if self._newcomer_done and tenant in self._served:
            limit = min(limit, EFFICIENT_PREFILL)
        return max(0, limit - self._spent)

    def spend(self, tenant: int, size: int, *, completes: bool) -> None:
        """A chunk of ``size`` was planned, to the end of the prompt or not."""
        self._spent += size
        self._newcomer_done |= completes and bool(self._served) and tenant not in self._served


class Claims:
    """Which blocks are being computed in this very step, and for whom.

    A sequence whose next block is claimed by one whose result it may see waits a step and then finds the block
    in the tree, so that identical cold prompts cost one. Claims live one step: a leader that is lost blocks
    nobody.
    """

    def __init__(self) -> None:
        self._owners: dict[tuple[int, bytes], set[int]] = {}

    def clear(self) -> None:
        """A new step begins."""
        self._owners.clear()

    def visible(self, parent: int, tokens: bytes, scopes: tuple[int, ...]) -> bool:
        """Whether the block of ``tokens`` after block ``parent`` (-1 at the root) is claimed for one of ``scopes``."""
        owners = self._owners.get((parent, tokens))
        return owners is not None and not owners.isdisjoint(scopes)

    def add(self, parent: int, tokens: bytes, scope: int) -> None:
        """This step computes that block to its end, for ``scope``."""
        self._owners.setdefault((parent, tokens), set()).add(scope)


def pick_unfair_victim(batch: Batch, tenants: Tenants, head: Sequence, admitted_before: int) -> Sequence | None:
    """The running sequence that loses its slot to ``head`` of the same class, because its tenant is far ahead.

    The tenant must be more than a quantum of virtual tokens ahead of the waiting one; of its sequences the last
    admitted goes, unless it was resumed after step ``admitted_before``.
    """
    counters = tenants.counters
    tenant = max((sequence.request.tenant for sequence in batch.order), key=counters.__getitem__)
    if counters[tenant] <= counters[head.request.tenant] + QUANTUM_TOKENS:
        return None
    for sequence in reversed(batch.order):
        if sequence.request.priority_class < head.request.priority_class:
            return None
        if sequence.request.tenant == tenant and _may_lose(sequence, admitted_before):
            return sequence
    return None


def pick_slot_victim(order: SequenceOf[Sequence], better_than: int, admitted_before: int) -> Sequence | None:
    """The running sequence that loses its slot to a waiting one of class ``better_than``, if any may.

    Only a strictly worse class loses; within the worst class the last admitted goes first, but never one that
    was resumed after step ``admitted_before``: it is safe for a quantum.
    """
    candidates: Iterable[Sequence] = reversed(order)
    for sequence in candidates:
        if sequence.request.priority_class <= better_than:
            return None
        if _may_lose(sequence, admitted_before):
            return sequence
    return None


def _may_lose(sequence: Sequence, admitted_before: int) -> bool:
    return not sequence.num_preemptions or sequence.admitted_step <= admitted_before
