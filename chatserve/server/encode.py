"""Encodes answers of the completion endpoints, whole or as stream chunks.

A chunk costs one JSON encoding of its text: everything around it is encoded once per stream and spliced. Knows
OpenAI's response shapes; does not know where the events come from.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from typing import Literal

import msgspec

from chatserve.server.output_processor import ChoiceDone, TextDelta, TokenLogprob, Usage
from chatserve.server.sse import event
from chatserve.server.wire import (
    ChatLogprobs,
    ChunkHead,
    CompletionLogprobs,
    CompletionTokensDetails,
    LogprobEntry,
    PromptTokensDetails,
    StreamOptions,
    TopLogprobEntry,
    UsageInfo,
)

_encode = msgspec.json.Encoder().encode


def response_id(prefix: Literal["chatcmpl", "cmpl"]) -> str:
    """A fresh id with 128 random bits."""
    return f"{prefix}-{secrets.token_hex(16)}"


def fingerprint(weights_revision: str) -> str:
    """OpenAI's ``system_fingerprint``: changes with the weights."""
    return "fp_" + hashlib.sha256(weights_revision.encode()).hexdigest()[:10]


def usage_info(usages: Sequence[Usage]) -> UsageInfo:
    """The sum over one response's prompts."""
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    cached = sum(usage.cached_tokens for usage in usages)
    details = PromptTokensDetails(cached, prompt - cached)
    return UsageInfo(prompt, completion, prompt + completion, details, CompletionTokensDetails())


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> ChatLogprobs:
    """OpenAI's chat shape."""
    return ChatLogprobs(
        [
            LogprobEntry(
                t.token, t.logprob, list(t.raw), [TopLogprobEntry(o.token, o.logprob, list(o.raw)) for o in t.top]
            )
            for t in tokens
        ]
    )


def completion_logprobs(tokens: Sequence[TokenLogprob], *, offset: int, with_top: bool) -> CompletionLogprobs:
    """OpenAI's completions shape; ``offset`` is where the first token starts in the text."""
    out = CompletionLogprobs([], [], [] if with_top else None, [])
    for token in tokens:
        out.tokens.append(token.token)
        out.token_logprobs.append(token.logprob)
        out.text_offset.append(offset)
        offset += len(token.token)
        if out.top_logprobs is not None:
            out.top_logprobs.append({other.token: other.logprob for other in token.top})
    return out


class ChunkEncoder:
    """Frames of one stream.

    Attributes:
        is_chat: choices open with a role.
        is_plain: nothing but its text differs from one delta of a choice to the next.
        include_usage: other chunks say ``"usage": null`` and the last one tells the counts.
    """

    __slots__ = (
        "_after",
        "_after_text",
        "_before",
        "_head",
        "_logprobs",
        "_offsets",
        "_tail",
        "continuous_usage",
        "include_usage",
        "is_chat",
        "is_plain",
    )

    def __init__(self, head: ChunkHead, num_choices: int, *, options: StreamOptions, logprobs: int | None) -> None:
        """
        Args:
            num_choices: over all prompts.
            options: with ``continuous_usage_stats`` every chunk tells its prompt's counts so far.
            logprobs: alternatives asked for; ``None`` for no log-probabilities.
        """
        self.is_chat = head.object == "chat.completion.chunk"
        self.include_usage = bool(options.include_usage)
        self.continuous_usage = bool(options.continuous_usage_stats)
        self.is_plain = logprobs is None and not self.continuous_usage
        self._head = _encode(head)[:-1]
        self._logprobs = logprobs
        opening = b'"delta":{"content":' if self.is_chat else b'"text":'
        self._before = [
            b'data: %s,"choices":[{"index":%d,%s' % (self._head, index, opening) for index in range(num_choices)
        ]
        self._after_text = b"}" if self.is_chat else b""
        self._tail = b',"usage":null}\n\n' if self.include_usage else b"}\n\n"
        self._after = self._after_text + b',"logprobs":null,"finish_reason":null}]' + self._tail
        self._offsets = [0] * num_choices

    def role(self, index: int, usage: Usage) -> bytes:
        """The first chunk of a chat choice."""
        choice = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' % index
        return self._chunk(choice, usage)

    def text(self, index: int, text: str) -> bytes:
        """New text of a choice, where `is_plain`."""
        return self._before[index] + _encode(text) + self._after

    def delta(self, index: int, delta: TextDelta, usage: Usage) -> bytes:
        """New text of a choice, with whatever else was asked for."""
        if self.is_plain:
            return self.text(index, delta.text)
        logprobs = b"null"
        if self._logprobs is not None:
            if self.is_chat:
                logprobs = _encode(chat_logprobs(delta.logprobs))
            else:
                offset = self._offsets[index]
                logprobs = _encode(completion_logprobs(delta.logprobs, offset=offset, with_top=self._logprobs > 0))
                self._offsets[index] += len(delta.text)
        middle = self._after_text + b',"logprobs":' + logprobs + b',"finish_reason":null}]'
        return self._before[index] + _encode(delta.text) + middle + self._usage_tail(usage)

    def done(self, index: int, done: ChoiceDone, usage: Usage) -> bytes:
        """The last chunk of a choice: no text, and the one finish reason."""
        choice = b'{"index":%d,%s,"logprobs":null,"finish_reason":%s,"stop_reason":%s}' % (
            index,
            b'"delta":{}' if self.is_chat else b'"text":""',
            _encode(done.finish_reason),
            _encode(done.stop_reason),
        )
        return self._chunk(choice, usage)

    def final_usage(self, usages: Sequence[Usage]) -> bytes:
        """The chunk after the last choice's end: no choices, all counts."""
        return event(self._head + b',"choices":[],"usage":' + _encode(usage_info(usages)) + b"}")

    def _chunk(self, choice: bytes, usage: Usage) -> bytes:
        return b"data: " + self._head + b',"choices":[' + choice + b"]" + self._usage_tail(usage)

    def _usage_tail(self, usage: Usage) -> bytes:
        if self.continuous_usage:
            return b',"usage":' + _encode(usage_info([usage])) + b"}\n\n"
        return self._tail
