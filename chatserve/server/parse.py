"""From a decoded request body to what the generation service takes.

Gives the wire fields their meaning: defaults, aliases, limits, and which values are refused with which field's
name. Knows the server's limits but no HTTP; `chatserve.server.routes` calls it with bodies that were size- and
depth-checked.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import TypeVar

import msgspec

from chatserve.config import ServerConfig
from chatserve.errors import InvalidRequestError, NotFoundError, UnsupportedParameterError
from chatserve.sampling_params import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_TOKEN_IDS, SamplingParams
from chatserve.server.body import decode
from chatserve.server.sampling_defaults import SamplingDefaults
from chatserve.server.unsupported import refuse_unsupported
from chatserve.server.wire import ChatCompletionRequest, CompletionRequest, MessageParam, SamplingFields
from chatserve.text.chat_template import ChatMessage
from chatserve.text.stop_strings import StopAutomaton

MAX_STOP_CHARS = 4096
MAX_PROMPTS = 128
MAX_LOGPROB_VALUES = 2**19
"""In an answer that is not streamed: some 50 MB of JSON."""

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default of the completions endpoint."""

COMPLETION_FIELDS = frozenset(ChatCompletionRequest.__struct_fields__ + CompletionRequest.__struct_fields__)
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
MESSAGE_EXTRAS = tuple(name for name in MessageParam.__struct_fields__ if name not in ("role", "content", "name"))
"""Fields of a message that are known only to be refused by name."""

_TOKEN_ID = re.compile(r"-?[0-9]{1,19}")

R = TypeVar("R", ChatCompletionRequest, CompletionRequest)
T = TypeVar("T", bound=msgspec.Struct)


def parse_request(body: bytes, kind: type[R], served_model: str) -> tuple[R, tuple[str, ...]]:
    """Decode a completion request; beside it the names of the fields that nobody here knows.

    Raises, beside what `parse_fields` raises:
        InvalidRequestError: a field that contradicts another.
        NotFoundError: another model than the one that is served.
    """
    request, unknown = parse_fields(body, kind, elsewhere=COMPLETION_FIELDS)
    check_model(request.model, served_model)
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError("stream_options needs stream to be true.", param="stream_options")
    return request, unknown


def parse_fields(body: bytes, kind: type[T], *, elsewhere: Collection[str] = ()) -> tuple[T, tuple[str, ...]]:
    """Decode a body; beside it the names of its unknown fields.

    Raises:
        UnsupportedParameterError: a known field that is not implemented, or not at this endpoint (``elsewhere``).
        InvalidRequestError: malformed JSON, or a wrong type.
    """
    fields = decode(body, dict[str, msgspec.Raw])
    unknown = refuse_unsupported(fields, known=kind.__struct_fields__, elsewhere=elsewhere)
    return decode(body, kind), unknown


def check_model(model: str | None, served: str) -> None:
    """Raise `NotFoundError` for another model; no model at all means the one that is served."""
    if model is not None and model != served:
        shown = model if len(model) <= 80 else model[:80] + "…"
        raise NotFoundError(
            f"The model {shown!r} is not served here. This server has {served!r}.",
            code="model_not_found",
            param="model",
        )


def parse_messages(messages: Sequence[MessageParam], config: ServerConfig) -> list[ChatMessage]:
    """Check roles and contents; text parts are joined, ``developer`` is ``system``.

    Raises `InvalidRequestError` naming the message and field at fault.
    """
    if not messages:
        raise InvalidRequestError("messages must hold at least one message.", param="messages")
    if len(messages) > config.max_messages:
        raise InvalidRequestError(
            f"messages has {len(messages)} entries, the limit is {config.max_messages}.", param="messages"
        )
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: MessageParam, path: str) -> ChatMessage:
    for field in MESSAGE_EXTRAS:
        if getattr(message, field) not in (None, [], ""):
            raise UnsupportedParameterError(f"{path}.{field} is not supported here.", param=f"{path}.{field}")
    if message.role in ("tool", "function"):
        raise UnsupportedParameterError(f"{path}.role: tool messages are not supported here.", param=f"{path}.role")
    role = ROLES.get(message.role)
    if role is None:
        raise InvalidRequestError(f"{path}.role must be one of {', '.join(ROLES)}.", param=f"{path}.role")
    content = message.content
    if content is None:
        raise InvalidRequestError(f"{path}.content must be a text or a list of text parts.", param=f"{path}.content")
    if not isinstance(content, str):
        for index, part in enumerate(content):
            for field in ("cache_control", "prompt_cache_breakpoint"):
                if getattr(part, field) is not None:
                    where = f"{path}.content[{index}].{field}"
                    raise UnsupportedParameterError(
                        f"{where} is not supported; prefixes are cached anyway.", param=where
                    )
            if part.type != "text" or part.text is None:
                raise InvalidRequestError(
                    f"{path}.content[{index}]: only parts of type text, with a text, are understood here.",
                    param=f"{path}.content[{index}].type" if part.type != "text" else f"{path}.content[{index}].text",
                )
        content = "".join(part.text or "" for part in content)
    return ChatMessage(role=role, content=content, name=message.name)


def parse_prompts(prompt: str | list[str | int | list[int]], vocab_size: int) -> list[str | list[int]]:
    """The prompts of a completions request: each a text or a list of token ids in ``[0, vocab_size)``."""
    prompts: list[str | list[int]]
    if isinstance(prompt, str):
        prompts = [prompt]
    elif prompt and all(isinstance(item, int) for item in prompt):
        prompts = [[item for item in prompt if isinstance(item, int)]]
    else:
        prompts = [item for item in prompt if not isinstance(item, int)]
        if len(prompts) != len(prompt) or len({type(item) for item in prompts}) > 1:
            raise InvalidRequestError("prompt must not mix texts, token ids and lists of token ids.", param="prompt")
    if not prompts:
        raise InvalidRequestError("prompt must not be an empty list.", param="prompt")
    if len(prompts) > MAX_PROMPTS:
        raise InvalidRequestError(f"prompt has {len(prompts)} entries, the limit is {MAX_PROMPTS}.", param="prompt")
    for item in prompts:
        if not item:
            raise InvalidRequestError("prompt must not be empty.", param="prompt")
        if isinstance(item, list):
            wrong = next((token for token in item if not 0 <= token < vocab_size), None)
            if wrong is not None:
                raise InvalidRequestError(
                    f"prompt: token ids must lie in [0, {vocab_size}); got {wrong}.", param="prompt"
                )
    return prompts


def parse_sampling(
    request: ChatCompletionRequest | CompletionRequest, vocab_size: int, defaults: SamplingDefaults
) -> SamplingParams:
    """Validated sampling settings, the model's ``defaults`` where nothing is given; the seed may stay unset."""
    seed = request.seed
    params = SamplingParams(
        n=_or(request.n, 1),
        max_tokens=_max_tokens(request),
        min_tokens=_or(request.min_tokens, 0),
        temperature=_or(request.temperature, defaults.temperature),
        top_k=0 if request.top_k == -1 else _or(request.top_k, defaults.top_k),
        top_p=_or(request.top_p, defaults.top_p),
        min_p=_or(request.min_p, defaults.min_p),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        repetition_penalty=_or(request.repetition_penalty, defaults.repetition_penalty),
        logit_bias=_logit_bias(request.logit_bias),
        stop_token_ids=_stop_token_ids(request.stop_token_ids),
        ignore_eos=bool(request.ignore_eos),
        seed=None if seed is None else seed % 2**63,
        logprobs=_logprobs(request),
    )
    params.validate(vocab_size)
    if isinstance(request, CompletionRequest) and request.best_of not in (None, params.n):
        raise UnsupportedParameterError("best_of is supported only where it equals n.", param="best_of")
    return params


def check_logprobs_size(sampling: SamplingParams, num_prompts: int, context_length: int) -> None:
    """Refuse a whole answer whose log-probabilities could fill memory, however that is spelt.

    Raises `InvalidRequestError`; a stream has no such limit, since it keeps nothing.
    """
    if sampling.logprobs is None:
        return
    tokens = num_prompts * sampling.n * min(sampling.max_tokens or context_length, context_length)
    if tokens * (1 + sampling.logprobs) > MAX_LOGPROB_VALUES:
        raise InvalidRequestError(
            f"Up to {tokens} tokens with {sampling.logprobs} alternatives each are more log-probabilities than one "
            f"answer may hold ({MAX_LOGPROB_VALUES}). Stream it, or lower max_tokens, n or the alternatives.",
            param="logprobs",
        )


def parse_stop(request: SamplingFields, config: ServerConfig) -> StopAutomaton | None:
    """The stop strings, none of them empty, compiled; ``None`` where there are none."""
    stop = request.stop
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > config.max_stop_strings:
        raise InvalidRequestError(
            f"stop has {len(stops)} entries, the limit is {config.max_stop_strings}.", param="stop"
        )
    for text in stops:
        if not 0 < len(text) <= MAX_STOP_CHARS:
            raise InvalidRequestError(f"stop strings must have 1 to {MAX_STOP_CHARS} characters.", param="stop")
    return StopAutomaton(stops) if stops else None


def max_tokens_field(request: ChatCompletionRequest | CompletionRequest) -> str:
    """The field that limits the output: chats have two."""
    chat = isinstance(request, ChatCompletionRequest) and request.max_completion_tokens is not None
    return "max_completion_tokens" if chat else "max_tokens"


def _max_tokens(request: ChatCompletionRequest | CompletionRequest) -> int | None:
    name = max_tokens_field(request)
    value: int | None = getattr(request, name)
    if value is None:
        return COMPLETION_MAX_TOKENS if isinstance(request, CompletionRequest) else None
    if value < 1:
        raise InvalidRequestError(f"{name} must be at least 1; got {value}.", param=name)
    return value


def _logprobs(request: ChatCompletionRequest | CompletionRequest) -> int | None:
    if isinstance(request, CompletionRequest):
        if request.logprobs is not None and not 0 <= request.logprobs <= MAX_LOGPROBS:
            raise InvalidRequestError(f"logprobs must be 0 to {MAX_LOGPROBS}.", param="logprobs")
        return request.logprobs
    if request.top_logprobs is not None:
        if not 0 <= request.top_logprobs <= MAX_LOGPROBS:
            raise InvalidRequestError(f"top_logprobs must be 0 to {MAX_LOGPROBS}.", param="top_logprobs")
        if not request.logprobs and request.top_logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs to be true.", param="top_logprobs")
    return _or(request.top_logprobs, 0) if request.logprobs else None


def _logit_bias(bias: dict[str, float] | None) -> tuple[tuple[int, float], ...]:
    if not bias:
        return ()
    if len(bias) > MAX_LOGIT_BIAS:
        raise InvalidRequestError(
            f"logit_bias has {len(bias)} entries, the limit is {MAX_LOGIT_BIAS}.", param="logit_bias"
        )
    for key in bias:
        if not _TOKEN_ID.fullmatch(key):
            raise InvalidRequestError("logit_bias: keys must be token ids.", param="logit_bias")
    return tuple((int(key), value) for key, value in bias.items())


def _stop_token_ids(ids: list[int] | None) -> tuple[int, ...]:
    if ids is not None and len(ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequestError(
            f"stop_token_ids has {len(ids)} entries, the limit is {MAX_STOP_TOKEN_IDS}.", param="stop_token_ids"
        )
    return tuple(ids or ())


N = TypeVar("N", int, float)


def _or(value: N | None, default: N) -> N:
    return default if value is None else value
