"""Requests and responses of the HTTP API, as typed data.

OpenAI's names first, then vLLM's. Decoding is strict (``true`` is no integer, ``"5"`` is no number) and every field
that is known is either listed here or refused by `chatserve.server.unsupported`; unknown fields are ignored.
Knows shapes only; `chatserve.server.parse` gives them meaning.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Salt = Annotated[str, Meta(min_length=1, max_length=1024)]

# -- requests -------------------------------------------------------------------------------------------------------


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """What both completion endpoints share. ``null`` always means "not given".

    ``user``, ``safety_identifier``, ``metadata``, ``store``, ``service_tier`` and ``prompt_cache_key`` are accepted
    and change nothing about the answer.
    """

    model: str | None = None
    n: Int64 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int64] | None = None
    min_tokens: Int64 | None = None
    max_tokens: Int64 | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Int64 | None = None
    cache_salt: Salt | None = None
    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None


class ContentPart(msgspec.Struct):
    """One part of a message. The last two fields are known only to be refused by name."""

    type: str
    text: str | None = None
    cache_control: Any = None
    prompt_cache_breakpoint: Any = None


class MessageParam(msgspec.Struct):
    """One message of a conversation. What follows ``name`` is known only to be refused by name."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: Any = None
    function_call: Any = None
    tool_call_id: Any = None
    audio: Any = None
    refusal: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    cache_control: Any = None


class ChatCompletionRequest(SamplingFields, kw_only=True):
    """``max_completion_tokens`` wins over ``max_tokens`` where both are given."""

    messages: list[MessageParam]
    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: Int64 | None = None


class CompletionRequest(SamplingFields, kw_only=True):
    """``prompt`` is a text, a list of texts, token ids, or a list of token-id lists."""

    prompt: str | list[str | Int64 | list[Int64]]
    logprobs: Int64 | None = None
    best_of: Int64 | None = None
    add_special_tokens: bool | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Either ``prompt`` or ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: list[MessageParam] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[Int64]


class LoginRequest(msgspec.Struct):
    key: str


# -- responses ------------------------------------------------------------------------------------------------------


class PromptTokensDetails(msgspec.Struct):
    """Prompt tokens whose KV was reused, and those that were computed and are cached from now on."""

    cached_tokens: int
    cache_write_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class UsageInfo(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TopLogprobEntry(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class LogprobEntry(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprobEntry]


class ChatLogprobs(msgspec.Struct):
    content: list[LogprobEntry]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """``text_offset`` counts code points from the start of the completion."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class AssistantMessage(msgspec.Struct):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: AssistantMessage
    finish_reason: str
    stop_reason: str | int | None
    logprobs: ChatLogprobs | None


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageInfo


class TextChoice(msgspec.Struct):
    index: int
    text: str
    finish_reason: str
    stop_reason: str | int | None
    logprobs: CompletionLogprobs | None


class TextCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: UsageInfo


class ChunkHead(msgspec.Struct, kw_only=True):
    """What every chunk of one stream starts with; the stream splices ``choices`` and ``usage`` behind it."""

    id: str
    object: Literal["chat.completion.chunk", "text_completion"]
    created: int
    model: str
    system_fingerprint: str


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "chatserve"
    root: str
    parent: None = None
    max_model_len: int | None


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class TokenizeResponse(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType | None = UNSET


class DetokenizeResponse(msgspec.Struct):
    prompt: str
