"""What sampling must remember about one sequence of the batch.

Knows the sequence's parameters, how many output tokens it has and, where penalties ask, which tokens it has seen;
turns them into changes of one row of logits. Knows no other row. `chatserve.worker.sampler` draws;
`chatserve.worker.model_runner` creates rows and reports their new tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from chatserve_kernels.interface import draw_options
from torch import Tensor

from chatserve.sampling_params import SamplingParams

# Below this temperature the softmax is one-hot but for exact ties, so the row is greedy.
_GREEDY_TEMPERATURE = 1e-5

# Lower than any logit, but finite: a row that masks its whole vocabulary is still a distribution.
_MASKED = float(torch.finfo(torch.float32).min)


class SamplingRow:
    """One sequence's sampling state.

    Attributes:
        adjusts: whether `adjust` changes the next logits; once false, it stays so.
        options: what its tokens are drawn with, as `Draws` has it.
        takes_best: whether the next token is the largest of the logits, and nothing more is asked.

    Args:
        params: of this one choice; ``seed`` is set.
        token_ids: int32 array of all known tokens, prompt first.
        eos_token_ids: the model's own end tokens.
    """

    def __init__(
        self,
        params: SamplingParams,
        token_ids: np.ndarray[tuple[int], np.dtype[np.int32]],
        num_prompt_tokens: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self.params = params
        self.seed = params.seed or 0
        self.num_output = len(token_ids) - num_prompt_tokens
        self.greedy = params.temperature < _GREEDY_TEMPERATURE
        self.logprobs = params.logprobs
        self.options = draw_options(params.temperature, params.min_p, params.top_k, params.top_p)
        self._bias_ids = torch.tensor([token for token, _ in params.logit_bias], dtype=torch.int64)
        self._bias = torch.tensor([bias for _, bias in params.logit_bias], dtype=torch.float32)
        self._stop_ids = torch.tensor(
            sorted({*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}), dtype=torch.int64
        )
        self._penalised = (
            params.presence_penalty != 0.0 or params.frequency_penalty != 0.0 or params.repetition_penalty != 1.0
        )
        if self._penalised:
            tokens = torch.from_numpy(token_ids.astype(np.int64))
            self._seen = torch.zeros(vocab_size, dtype=torch.bool)
            self._seen[tokens] = True
            self._output_counts = torch.bincount(tokens[num_prompt_tokens:], minlength=vocab_size).float()
        self.adjusts = self._adjusts_now()
        self.takes_best = self._takes_best_now()

    def append(self, token: int) -> None:
        """Note that ``token`` is now the sequence's last output token."""
        self.num_output += 1
        if self._penalised:
            self._seen[token] = True
            self._output_counts[token] += 1
        if self.adjusts:
            self.adjusts = self._adjusts_now()
            self.takes_best = self._takes_best_now()

    def _takes_best_now(self) -> bool:
        return self.greedy and not self.adjusts and self.logprobs is None

    def _adjusts_now(self) -> bool:
        return self._penalised or bool(self.params.logit_bias) or self._masks_stop_tokens

    @property
    def _masks_stop_tokens(self) -> bool:
        return self.num_output < self.params.min_tokens and len(self._stop_ids) > 0

    def adjust(self, logits: Tensor) -> None:
        """Apply penalties, then biases, then the mask of stop tokens to float32 [vocab_size], in place."""
        params = self.params
        if self._penalised:
            if params.repetition_penalty != 1.0:
                penalty = params.repetition_penalty
                penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
                torch.where(self._seen, penalised, logits, out=logits)
            logits.sub_(self._output_counts, alpha=params.frequency_penalty)
            logits.sub_(self._output_counts.clamp(max=1.0), alpha=params.presence_penalty)
        if self.params.logit_bias:
            logits.index_add_(0, self._bias_ids, self._bias)
        if self._masks_stop_tokens:
            logits.index_fill_(0, self._stop_ids, _MASKED)
