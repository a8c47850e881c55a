"""Turns the engine's tokens into text, stop strings into ends, and ends into exactly one reason per choice.

Synchronous and without I/O: events of the engine in, events for clients out. Does not know requests' transports,
the engine's client or the event loop; `chatserve.server.generation` drives one of these per request.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from chatserve.engine.client import Delta
from chatserve.engine.protocol import Finished, Started
from chatserve.errors import ChatserveError, ContextLengthError, EngineUnavailableError, GenerationFailedError
from chatserve.scheduler.output import SampleLogprobs
from chatserve.text.detokenizer import IncrementalDetokenizer
from chatserve.text.stop_strings import StopAutomaton, StopMatcher
from chatserve.text.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot carry."""


class Usage(msgspec.Struct):
    """Exact token counts: the prompt once, every sampled token of every choice (end tokens included)."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class TopLogprob(msgspec.Struct, frozen=True, gc=False):
    """One alternative: its text alone, its own bytes, its log-probability."""

    token: str
    raw: bytes
    logprob: float


class TokenLogprob(msgspec.Struct, frozen=True):
    """A sampled token and its alternatives, best first."""

    token: str
    raw: bytes
    logprob: float
    top: tuple[TopLogprob, ...] = ()


class PromptStarted(msgspec.Struct, frozen=True):
    """The engine admitted the request."""

    prompt_tokens: int
    cached_tokens: int


class TextDelta(msgspec.Struct):
    """New text of one choice, with the ids (and log-probabilities, where asked for) behind it."""

    choice: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]


class ChoiceDone(msgspec.Struct, frozen=True):
    """The one end of one choice.

    Attributes:
        stop_reason: the stop string or the requested stop token that matched; ``None`` for the model's own end.
        stop_token: the id that ended it, where one did.
    """

    choice: int
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None = None
    stop_token: int | None = None


Event = PromptStarted | TextDelta | ChoiceDone


class OutputOptions(msgspec.Struct, frozen=True):
    """How text is cut from tokens."""

    stop: StopAutomaton | None = None
    include_stop: bool = False
    skip_special_tokens: bool = True
    continues_text: bool = False
    stop_token_ids: frozenset[int] = frozenset()


class _Choice:
    """One choice while it grows: ``pending`` holds what came since the last delta went out."""

    __slots__ = ("detokenizer", "done", "ids", "last_token_at", "parts", "pending", "stops")

    def __init__(self, tokenizer: Tokenizer, options: OutputOptions, index: int) -> None:
        self.detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=options.skip_special_tokens, continues_text=options.continues_text
        )
        self.stops = None if options.stop is None else StopMatcher(options.stop, options.include_stop)
        self.ids = array("i")
        self.parts: list[str] = []
        self.pending = TextDelta(index, "", [], [])
        self.last_token_at = 0.0
        self.done: ChoiceDone | None = None

    def take(self) -> TextDelta:
        """What is pending, as a delta that goes out."""
        delta, self.pending = self.pending, TextDelta(self.pending.choice, "", [], [])
        self.parts.append(delta.text)
        return delta


class OutputProcessor:
    """All choices of one request.

    Attributes:
        usage: counts so far.
        num_open: choices that have no end yet.
        failure: set once when a choice cannot be finished; nothing after it counts.
    """

    __slots__ = ("_choices", "_observe_gap", "_options", "_tokenizer", "failure", "num_open", "usage")

    def __init__(
        self,
        tokenizer: Tokenizer,
        options: OutputOptions,
        *,
        num_choices: int,
        prompt_tokens: int,
        observe_gap: Callable[[float, int], None],
    ) -> None:
        """``observe_gap(seconds, tokens)`` is told the time per token of each group, after the one before."""
        self.usage = Usage(prompt_tokens=prompt_tokens)
        self.num_open = num_choices
        self.failure: ChatserveError | None = None
        self._tokenizer = tokenizer
        self._options = options
        self._observe_gap = observe_gap
        self._choices = [_Choice(tokenizer, options, i) for i in range(num_choices)]

    def token_ids(self, choice: int) -> array[int]:
        """Ids of a choice so far, without the token that ended it."""
        return self._choices[choice].ids

    def text(self, choice: int) -> str:
        """Text of a choice that `process` has returned so far."""
        return "".join(self._choices[choice].parts)

    def process(self, events: Sequence[Started | Delta | Finished], now: float) -> list[Event]:
        """Digest the engine's news in order: one delta per token that completes some text.

        A choice's end token and its `Finished` arrive in one call, which is how the token is known to be one.
        """
        if len(events) == 1 and type(event := events[0]) is Delta:  # nearly always
            return self._process_token(event, now)
        out: list[Event] = []
        done: list[Event] = []
        touched: dict[int, int] = {}  # choice -> tokens in this call
        stop_tokens = {e.choice: e.stop_token for e in events if type(e) is Finished and e.stop_token is not None}
        try:
            for event in events:
                if isinstance(event, Started):
                    self.usage.cached_tokens = event.cached_tokens
                    out.append(PromptStarted(event.prompt_tokens, event.cached_tokens))
                    continue
                choice = self._choices[event.choice]
                if choice.done is not None:
                    continue
                if isinstance(event, Delta):
                    touched[event.choice] = touched.get(event.choice, 0) + 1
                    self._push(choice, event, stop_tokens.get(event.choice))
                else:
                    self._finish(choice, event)
                if choice.pending.text or (choice.done is not None and choice.pending.logprobs):
                    out.append(choice.take())
                if choice.done is not None:
                    done.append(choice.done)
        except ChatserveError as error:
            self.failure = error
        for index, num_tokens in touched.items():
            choice = self._choices[index]
            if choice.last_token_at:
                self._observe_gap((now - choice.last_token_at) / num_tokens, num_tokens)
            choice.last_token_at = now
        self.num_open -= len(done)
        return out + done if done else out

    def _process_token(self, event: Delta, now: float) -> list[Event]:
        """`process` for one token and nothing else."""
        choice = self._choices[event.choice]
        if choice.done is not None:
            return []
        if choice.last_token_at:
            self._observe_gap(now - choice.last_token_at, 1)
        choice.last_token_at = now
        pending = choice.pending
        try:
            if choice.stops is not None or event.logprobs is not None or pending.token_ids:
                self._push(choice, event, None)
            else:
                self.usage.completion_tokens += 1
                token_id = event.token_id
                text = choice.detokenizer.push(token_id)
                choice.ids.append(token_id)
                if text:
                    choice.parts.append(text)
                    return [TextDelta(event.choice, text, [token_id], [])]
                pending.token_ids.append(token_id)
                return []
        except ChatserveError as error:
            self.failure = error
        out: list[Event] = []
        if pending.text or (choice.done is not None and pending.logprobs):
            out.append(choice.take())
        if choice.done is not None:
            self.num_open -= 1
            out.append(choice.done)
        return out

    def _push(self, choice: _Choice, event: Delta, stop_token: int | None) -> None:
        self.usage.completion_tokens += 1
        if event.token_id == stop_token:
            return
        text = choice.detokenizer.push(event.token_id)
        choice.ids.append(event.token_id)
        pending = choice.pending
        pending.token_ids.append(event.token_id)
        if event.logprobs is not None:
            pending.logprobs.append(self._logprob(event.token_id, event.logprobs))
        if choice.stops is None:
            pending.text += text
        elif text:
            pending.text += choice.stops.push(text)
            if choice.stops.matched is not None:
                self._end(choice, "stop", choice.stops.matched)

    def _finish(self, choice: _Choice, event: Finished) -> None:
        if event.reason == "error" or event.reason == "abort":
            raise _engine_error(event)
        stopped_by = event.stop_token if event.stop_token in self._options.stop_token_ids else None
        tail = choice.detokenizer.flush()
        if stopped_by is not None and self._options.include_stop:
            tail += self._tokenizer.decode([stopped_by], skip_special_tokens=self._options.skip_special_tokens)
        if choice.stops is not None:
            tail = choice.stops.push(tail) if tail else ""
            if choice.stops.matched is not None:
                choice.pending.text += tail
                self._end(choice, "stop", choice.stops.matched)
                return
            tail += choice.stops.flush()
        choice.pending.text += tail
        self._end(choice, event.reason, stopped_by, event.stop_token)

    def _end(
        self,
        choice: _Choice,
        reason: Literal["stop", "length"],
        stop_reason: str | int | None,
        stop_token: int | None = None,
    ) -> None:
        choice.done = ChoiceDone(choice.pending.choice, reason, stop_reason, stop_token)

    def _logprob(self, token_id: int, sample: SampleLogprobs) -> TokenLogprob:
        ids = array("i", sample.top_ids)
        values = array("f", sample.top_logprobs)
        top = tuple(
            TopLogprob(self._tokenizer.token_text(i), self._tokenizer.token_bytes(i), _finite(value))
            for i, value in zip(ids, values, strict=True)
        )
        text, raw = self._tokenizer.token_text(token_id), self._tokenizer.token_bytes(token_id)
        return TokenLogprob(text, raw, _finite(sample.chosen), top)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB


def _engine_error(event: Finished) -> ChatserveError:
    if event.error_code == ContextLengthError.default_code:
        # What is pinned for published prefixes may leave less room than the edge knows of.
        return ContextLengthError(event.error_message or "The request does not fit this server.")
    if event.error_code == EngineUnavailableError.default_code:
        message = event.error_message or "The engine stopped while it worked on this request. Send it again."
        return EngineUnavailableError(message, retry_after=2.0)
    if event.reason == "abort":
        return GenerationFailedError("The server ended this request early. Send it again.")
    return GenerationFailedError(
        event.error_message or "The engine could not finish this request. Send it again.", code=event.error_code
    )
