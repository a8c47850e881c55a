"""What only some sequences ask of sampling: changed logits, and log-probabilities.

Knows one sequence's parameters and, where penalties ask, which tokens it has seen; turns them into changes of one row
of logits. Knows no other row and no drawing. `chatserve.worker.sampler` is the caller.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chatserve.sampling_params import SamplingParams

# Lower than any logit, but finite: a row that masks its whole vocabulary is still a distribution.
_MASKED = float(torch.finfo(torch.float32).min)


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
        "_output_counts",
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
        vocab_size: int,
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
        self._stop_ids = torch.tensor(sorted(stop_ids), dtype=torch.int64)
        self._bias_ids = torch.tensor([token for token, _ in params.logit_bias], dtype=torch.int64)
        self._bias = torch.tensor([bias for _, bias in params.logit_bias], dtype=torch.float32)
        if self._penalised:
            tokens = torch.from_numpy(token_ids.astype(np.int64))
            self._seen = torch.zeros(vocab_size, dtype=torch.bool)
            self._seen[tokens] = True
            self._output_counts = torch.bincount(tokens[num_prompt_tokens:], minlength=vocab_size).float()

    @property
    def is_over(self) -> bool:
        """Whether nothing special is left to do, from now on."""
        return not self.adjusts and self.logprobs is None

    def append(self, token: int) -> None:
        """Note that ``token`` is now the sequence's last output token."""
        if self._penalised:
            self._seen[token] = True
            self._output_counts[token] += 1
        if self._num_guarded:
            self._num_guarded -= 1
            self.adjusts = self._adjusts_now()

    def _adjusts_now(self) -> bool:
        return self._penalised or bool(self._params.logit_bias) or self._num_guarded > 0

    def adjust(self, logits: Tensor) -> None:
        """Apply penalties, then biases, then the mask of stop tokens to float32 [vocab_size], in place."""
        params = self._params
        if self._penalised:
            if params.repetition_penalty != 1.0:
                penalty = params.repetition_penalty
                penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
                torch.where(self._seen, penalised, logits, out=logits)
            logits.sub_(self._output_counts, alpha=params.frequency_penalty)
            logits.sub_(self._output_counts.clamp(max=1.0), alpha=params.presence_penalty)
        if params.logit_bias:
            logits.index_add_(0, self._bias_ids, self._bias)
        if self._num_guarded:
            logits.index_fill_(0, self._stop_ids, _MASKED)
