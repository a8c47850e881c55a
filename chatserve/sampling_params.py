"""How one request wants its tokens chosen.

Frozen and validated once, at the edge; the scheduler and the worker trust it. Knows token ids only: stop
*strings* are text and live with the detokeniser in the API process.
"""

from __future__ import annotations

import math

import msgspec

from chatserve.errors import InvalidRequestError

MAX_N = 16
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 128


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Sampling settings of one request (OpenAI's names, then vLLM's).

    Attributes:
        n: independent choices sampled from one prompt. Choice ``i`` draws as a single request with
            ``seed + i`` would.
        max_tokens: output tokens at most; ``None`` means as many as fit.
        min_tokens: stop tokens are masked until this many output tokens exist.
        temperature: 0 is greedy.
        top_k: 0 is off.
        top_p: nucleus mass in (0, 1].
        min_p: floor relative to the most likely token, in [0, 1].
        presence_penalty: subtracted once from the logit of each token already in the output.
        frequency_penalty: subtracted per occurrence in the output.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output.
        logit_bias: token id to additive bias in [-100, 100].
        stop_token_ids: further ids that end the output, beside the model's own end tokens.
        ignore_eos: the model's own end tokens do not end the output.
        seed: root of the counter-based generator in [0, 2**63); always set by the time a request
            reaches the engine.
        logprobs: ``None`` for off; otherwise how many alternatives to report beside the chosen token.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None

    def validate(self, vocab_size: int) -> None:
        """Raise `InvalidRequestError` naming the first field that is out of range.

        Args:
            vocab_size: ids in ``logit_bias`` and ``stop_token_ids`` must lie in ``[0, vocab_size)``.
        """
        _check(1 <= self.n <= MAX_N, "n", f"must be between 1 and {MAX_N}", self.n)
        if self.max_tokens is not None:
            _check(self.max_tokens >= 1, "max_tokens", "must be at least 1", self.max_tokens)
        _check(self.min_tokens >= 0, "min_tokens", "must not be negative", self.min_tokens)
        if self.max_tokens is not None:
            rule = f"must not exceed the {self.max_tokens} tokens that the output may have"
            _check(self.min_tokens <= self.max_tokens, "min_tokens", rule, self.min_tokens)
        _range("temperature", self.temperature, 0.0, 2.0)
        _check(0 <= self.top_k < 2**31, "top_k", "must be 0 or -1 (off) or a positive integer", self.top_k)
        _range("top_p", self.top_p, 0.0, 1.0)
        _check(self.top_p > 0.0, "top_p", "must be greater than 0", self.top_p)
        _range("min_p", self.min_p, 0.0, 1.0)
        _range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _range("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _check(
            len(self.logit_bias) <= MAX_LOGIT_BIAS,
            "logit_bias",
            f"must have at most {MAX_LOGIT_BIAS} entries",
            len(self.logit_bias),
        )
        for token, bias in self.logit_bias:
            _check(0 <= token < vocab_size, "logit_bias", f"token ids must lie in [0, {vocab_size})", token)
            _range("logit_bias", bias, -100.0, 100.0)
        _check(
            len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
            "stop_token_ids",
            f"must have at most {MAX_STOP_TOKEN_IDS} entries",
            len(self.stop_token_ids),
        )
        for token in self.stop_token_ids:
            _check(0 <= token < vocab_size, "stop_token_ids", f"token ids must lie in [0, {vocab_size})", token)
        if self.seed is not None:
            _check(0 <= self.seed < 2**63, "seed", "must lie in [0, 2**63)", self.seed)
        if self.logprobs is not None:
            _check(0 <= self.logprobs <= MAX_LOGPROBS, "top_logprobs", f"must be 0 to {MAX_LOGPROBS}", self.logprobs)

    def for_choice(self, index: int) -> SamplingParams:
        """The parameters of choice ``index``: a single-choice request whose seed is shifted by it."""
        seed = 0 if self.seed is None else self.seed
        return msgspec.structs.replace(self, n=1, seed=(seed + index) % 2**63)


def _check(ok: bool, param: str, rule: str, value: object) -> None:
    if not ok:
        raise InvalidRequestError(f"{param} {rule}; got {value!r}.", param=param)


def _range(param: str, value: float, low: float, high: float) -> None:
    ok = math.isfinite(value) and low <= value <= high
    _check(ok, param, f"must be a finite number between {low:g} and {high:g}", value)
