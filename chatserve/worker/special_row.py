"""What only some sequences ask of sampling: changed logits, and log-probabilities.

Knows one sequence's parameters and, where penalties ask, which tokens it has seen; turns them into changes of one row
of logits. Knows no other row and no drawing. `chatserve.worker.sampler` is the caller.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from chatserve.sampling_params import SamplingParams

# Lower than any logit, but finite: a row that masks its whole vocabulary is still a distribution.
_MASKED = np.finfo(np.float32).min

# Tokens that are new to a sequence for which memory is had at once, at least.
_ROOM = 64


class Changed(NamedTuple):
    """What was done to a row of logits: in this order, ids and what their logits were before."""

    logits: npt.NDArray[np.float32]
    before: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]]


def undo(changed: Changed) -> None:
    """Make the logits what they were."""
    for ids, values in reversed(changed.before):
        changed.logits[ids] = values


class SpecialRow:
    """One sequence's wishes beyond temperature and truncation.

    Attributes:
        adjusts: whether `adjust` changes the next logits; once false, it stays so.
        logprobs: alternatives whose log-probabilities are wanted; ``None`` for not even the token's own.

    Args:
        params: of this one choice.
        token_ids: int32, all known tokens, prompt first.
        eos_token_ids: the model's own end tokens.
    """

    __slots__ = (
        "_bias",
        "_bias_ids",
        "_num_guarded",
        "_params",
        "_penalised",
        "_seen",
        "_stop_ids",
        "adjusts",
        "logprobs",
    )

    def __init__(
        self,
        params: SamplingParams,
        token_ids: npt.NDArray[np.int32],
        num_prompt_tokens: int,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self.logprobs = params.logprobs
        self._params = params
        stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
        num_output = len(token_ids) - num_prompt_tokens
        # Tokens to come among which no stop token may be.
        self._num_guarded = max(0, params.min_tokens - num_output) if stop_ids else 0
        self._penalised = (
            params.presence_penalty != 0.0 or params.frequency_penalty != 0.0 or params.repetition_penalty != 1.0
        )
        self.adjusts = self._adjusts_now()
        if not self.adjusts:
            return
        self._stop_ids = np.array(sorted(stop_ids), np.int64)
        biases: dict[int, float] = {}
        for token, bias in params.logit_bias:
            biases[token] = biases.get(token, 0.0) + bias
        self._bias_ids = np.array(list(biases), np.int64)
        self._bias = np.array(list(biases.values()), np.float32)
        if self._penalised:
            self._seen = _Seen(params, token_ids, num_prompt_tokens)

    @property
    def is_over(self) -> bool:
        """Whether nothing special is left to do, from now on."""
        return not self.adjusts and self.logprobs is None

    def append(self, token: int) -> None:
        """Note that ``token`` is now the sequence's last output token."""
        if self._penalised:
            self._seen.append(token)
        if self._num_guarded:
            self._num_guarded -= 1
            self.adjusts = self._adjusts_now()

    def _adjusts_now(self) -> bool:
        return self._penalised or bool(self._params.logit_bias) or self._num_guarded > 0

    def adjust(self, logits: npt.NDArray[np.float32]) -> Changed:
        """Apply penalties, then biases, then the mask of stop tokens to logits [vocab_size], in place.

        Returns:
            What `undo` takes.
        """
        params = self._params
        changed = Changed(logits, [])
        before = changed.before
        if self._penalised:
            ids, values = self._seen.ids, logits[self._seen.ids]
            before.append((ids, values))
            if params.repetition_penalty != 1.0:
                penalty = params.repetition_penalty
                values = np.where(values > 0, values / penalty, values * penalty)
            logits[ids] = values - self._seen.offsets
        if params.logit_bias:
            before.append((self._bias_ids, logits[self._bias_ids]))
            logits[self._bias_ids] += self._bias
        if self._num_guarded:
            before.append((self._stop_ids, logits[self._stop_ids]))
            logits[self._stop_ids] = _MASKED
        return changed


class _Seen:
    """Which tokens a sequence has seen, few of a vocabulary, and what that takes from their logits."""

    def __init__(self, params: SamplingParams, token_ids: npt.NDArray[np.int32], num_prompt_tokens: int) -> None:
        self._presence, self._frequency = params.presence_penalty, params.frequency_penalty
        # The prompt counts as seen for repetition alone.
        skipped = num_prompt_tokens if params.repetition_penalty == 1.0 else 0
        ids, index = np.unique(token_ids[skipped:], return_inverse=True)
        counts = np.bincount(index[num_prompt_tokens - skipped :], minlength=len(ids))
        self._ids = ids.astype(np.int64)
        self._offsets = (self._frequency * counts + self._presence * (counts > 0)).astype(np.float32)
        self._counts = counts.tolist()
        self._place_of = {token: place for place, token in enumerate(ids.tolist())}

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """[t], each once."""
        return self._ids[: len(self._counts)]

    @property
    def offsets(self) -> npt.NDArray[np.float32]:
        """[t], of presence and frequency in the output."""
        return self._offsets[: len(self._counts)]

    def append(self, token: int) -> None:
        """The output has one more token."""
        place = self._place_of.setdefault(token, len(self._counts))
        if place == len(self._counts):
            if place == len(self._ids):
                self._ids = np.resize(self._ids, 2 * place + _ROOM)
                self._offsets = np.resize(self._offsets, 2 * place + _ROOM)
            self._ids[place] = token
            self._counts.append(0)
        self._counts[place] += 1
        self._offsets[place] = self._frequency * self._counts[place] + self._presence
