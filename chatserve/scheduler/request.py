"""A request and its sequences, as the scheduler sees them.

A request is what a client sent; a *sequence* is one choice of it with its own tokens and block table. Both are
written by `Scheduler` alone. While a sequence runs, its tokens and counters live in its row of `Batch`, not here.
"""

from __future__ import annotations

from enum import Enum

import numpy as np
import numpy.typing as npt

from chatserve.cache.block_table import BlockTable
from chatserve.sampling_params import SamplingParams


class Status(Enum):
    """Where a sequence is. It leaves ``FINISHED`` never."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """One accepted request.

    Attributes:
        prompt: int32 token ids.
        scopes: interned, widest first; the last one is its own.
        tenant: index of who is served and charged.
        arrival: rises with every accepted request; ties are impossible.
        arrival_step: logical time of acceptance; ageing counts from it.
        max_total: prompt and output tokens a choice may reach; fits the model and an empty pool.
        num_open: choices without a terminal event.
        started: it has been admitted once.
        forked: its further choices exist as sequences of their own.
    """

    __slots__ = (
        "arrival",
        "arrival_step",
        "forked",
        "max_total",
        "num_open",
        "num_prompt",
        "priority",
        "priority_class",
        "prompt",
        "request_id",
        "sampling",
        "scopes",
        "sequences",
        "started",
        "tenant",
    )

    def __init__(
        self,
        request_id: int,
        prompt: bytes,
        sampling: SamplingParams,
        scopes: tuple[int, ...],
        *,
        tenant: int = 0,
        priority: int = 0,
        priority_class: int = 0,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.num_prompt = len(prompt) // 4
        self.sampling = sampling
        self.scopes = scopes
        self.tenant = tenant
        self.priority = priority
        self.priority_class = priority_class
        self.arrival = 0
        self.arrival_step = 0
        self.max_total = 0
        self.num_open = sampling.n
        self.started = False
        self.forked = sampling.n == 1
        self.sequences: list[Sequence] = []


class Sequence:
    """One choice of a request.

    Attributes:
        tokens: int32, every known token, prompt first, while it waits; none while it runs, then its row has them.
        table: its block table while it runs.
        row: its batch row while it runs, else -1.
        admission: rises with every admission; the last admitted is the first victim.
        admitted_step: logical time of the last admission.
        num_preemptions: how often it was sent back to the queue.
        missing: blocks it lacked when it was last refused; tried_step: when that was.
        num_overtaken: admissions that passed it, because it did not fit or they had more in the cache.
    """

    __slots__ = (
        "admission",
        "admitted_step",
        "choice",
        "missing",
        "num_overtaken",
        "num_preemptions",
        "request",
        "row",
        "sampling",
        "status",
        "table",
        "tokens",
        "tried_step",
    )

    def __init__(self, request: Request, choice: int) -> None:
        self.request = request
        self.choice = choice
        self.sampling = request.sampling.for_choice(choice)
        self.tokens: npt.NDArray[np.int32] = np.frombuffer(request.prompt, np.int32)
        self.table: BlockTable | None = None
        self.row = -1
        self.status = Status.WAITING
        self.admission = 0
        self.admitted_step = 0
        self.missing = 0
        self.tried_step = 0
        self.num_overtaken = 0
        self.num_preemptions = 0
