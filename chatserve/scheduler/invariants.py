"""What must be true of a scheduler between two steps. Full recounts, for tests."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from chatserve.cache.block_table import BlockTable
from chatserve.cache.invariants import check_manager, require
from chatserve.scheduler.request import Status
from chatserve.scheduler.scheduler import Scheduler


def check_scheduler(scheduler: Scheduler, pinned: Iterable[BlockTable] = ()) -> None:
    """Every open sequence is in one place, only running ones hold blocks, and counters fit the tokens.

    Args:
        pinned: tables of published prefixes, which hold blocks too.
    """
    batch, manager = scheduler.batch, scheduler.manager
    running = [s for s in batch.sequences if s is not None]
    waiting = list(scheduler.waiting)
    open_sequences = [s for r in scheduler.requests for s in r.sequences if s.status is not Status.FINISHED]
    places = {id(s) for s in running} | {id(s) for s in waiting}
    require(places == {id(s) for s in open_sequences}, "a sequence is in no place, or in one too many")
    require(len(running) + len(waiting) == len(open_sequences), "a sequence is in two places")
    require(len(running) == len(batch.order), "rows and order disagree")
    require(all(s.table is None for s in waiting), "a waiting sequence holds blocks")
    check_manager(manager, [*pinned, *(s.table for s in running if s.table is not None)])
    for sequence in running:
        row, table = sequence.row, sequence.table
        known, computed = batch.num_known(row), batch.num_computed(row)
        prompt = np.frombuffer(sequence.request.prompt, np.int32)
        own = np.array_equal(batch.known_tokens(row)[: len(prompt)], prompt) and not len(sequence.tokens)
        require(table is not None and known >= len(prompt) and own, "a row has another's tokens")
        require(computed < known <= sequence.request.max_total, "computed tokens are miscounted")
        decodes = known - computed == 1 and known > sequence.request.num_prompt
        require((row in batch.prefilling) != decodes, "a row that decodes is taken for one that prefills, or reversed")
        require(table is None or table.num_published * manager.block_size <= computed, "published before computed")
