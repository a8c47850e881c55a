"""The open requests, and what their clients have not been told yet.

Every accepted request gets exactly one terminal event per choice; this is where they are counted.
"""

from __future__ import annotations

from collections.abc import Iterator

from chatserve.scheduler.fairness import Tenants
from chatserve.scheduler.output import Finished, FinishReason, Started, StepNews
from chatserve.scheduler.request import Request, Sequence


class Ending:
    """How choices end: reason, and the stop token or the error that belongs to it."""

    __slots__ = ("error_code", "error_message", "reason", "stop_token")

    def __init__(
        self,
        reason: FinishReason,
        *,
        stop_token: int | None = None,
        error_code: str | None = None,
        error_message: str | None = None,
    ) -> None:
        self.reason = reason
        self.stop_token = stop_token
        self.error_code = error_code
        self.error_message = error_message


class RequestBook:
    """Requests from acceptance to their last terminal event."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._open: dict[int, Request] = {}
        self._num_arrivals = 0
        self._started: list[Started] = []
        self._finished: list[Finished] = []

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._open.values())

    @property
    def has_news(self) -> bool:
        """Events that nobody has been told yet."""
        return bool(self._started or self._finished)

    def get(self, request_id: int) -> Request | None:
        """The open request of this id."""
        return self._open.get(request_id)

    def open(self, request: Request, step: int) -> Sequence:
        """Accept a request at logical time ``step``; returns its first choice."""
        request.arrival = self._num_arrivals
        request.arrival_step = step
        self._num_arrivals += 1
        self._open[request.request_id] = request
        self._tenants.arrive(request.tenant)
        return self.add_choice(request)

    def add_choice(self, request: Request) -> Sequence:
        """The next choice of a request becomes a sequence of its own."""
        sequence = Sequence(request, len(request.sequences))
        request.sequences.append(sequence)
        return sequence

    def note_start(self, request: Request, num_cached: int) -> None:
        """A request was admitted for the first time."""
        request.started = True
        self._tenants.charge_cached(request.tenant, request.num_prompt, num_cached)
        self._started.append(Started(request.request_id, request.num_prompt, num_cached))

    def note_end(self, request: Request, choice: int, ending: Ending) -> None:
        """The terminal event of one choice; after the last one the request is closed."""
        self._finished.append(
            Finished(
                request.request_id,
                choice,
                ending.reason,
                ending.stop_token,
                ending.error_code,
                ending.error_message,
            )
        )
        request.num_open -= 1
        if request.num_open == 0:
            del self._open[request.request_id]
            self._tenants.leave(request.tenant)

    def take_started(self) -> list[Started]:
        """The untold starts, ahead of the step's other news."""
        started, self._started = self._started, []
        return started

    def tell(self, news: StepNews) -> StepNews:
        """Put the untold events into ``news``."""
        news.started, news.finished = tuple(self.take_started()), tuple(self._finished)
        self._finished.clear()
        return news
