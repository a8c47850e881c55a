"""Fields that chatserve knows but does not implement: refused by name, never dropped in silence.

One table for both completion endpoints. A value that asks for nothing (``null``, or the default that describes what
happens anyway) is accepted. Fields that are neither here nor in the wire types are unknown and ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec
import structlog

from chatserve.errors import UnsupportedParameterError
from chatserve.server.body import decode

NO_OPS: dict[str, tuple[object, ...]] = {
    # OpenAI
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "reasoning_effort": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    "moderation": (),
    "prompt_cache_retention": ("in_memory",),
    "prompt_cache_options": (),
    "suffix": ("",),
    "echo": (False,),
    # vLLM: sampling
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "prompt_logprobs": (),
    "logprob_token_ids": ([],),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "thinking_token_budget": (),
    "repetition_detection": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "logits_processors": ([],),
    "logit_processors": ([],),
    # vLLM: everything else
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "documents": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "include_reasoning": (True, False),
    "request_id": (),
    "session_id": (),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "return_prompt_text": (False,),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    "stream_interval": (1,),
    # SGLang
    "rid": (),
    "extra_key": (),
    "regex": (),
    "ebnf": (),
    "stop_regex": ([],),
    "no_stop_trim": (False,),
    "separate_reasoning": (True, False),
    "session_params": (),
    "return_cached_tokens_details": (False,),
    # llama.cpp
    "cache_prompt": (True,),
    "n_predict": (),
    "n_cmpl": (),
    "grammar": ("",),
    "json_schema": (),
    "id_slot": (-1,),
    "return_progress": (False,),
    "timings_per_token": (False,),
    "sse_ping_interval": (),
    # Anthropic
    "cache_control": (),
}
"""Field to the values, beside ``null``, that ask for nothing beyond what happens anyway."""

INSTEAD = {
    "request_id": "send the X-Request-Id header",
    "rid": "send the X-Request-Id header",
    "extra_key": "use cache_salt",
    "n_predict": "use max_tokens",
    "n_cmpl": "use n",
    "no_stop_trim": "use include_stop_str_in_output",
}

ELSEWHERE_NO_OPS: dict[str, tuple[object, ...]] = {"best_of": (1,), "add_special_tokens": (False,)}
"""The same for fields that only the other completion endpoint has."""


def refuse_unsupported(
    fields: Mapping[str, msgspec.Raw], *, known: Collection[str], elsewhere: Collection[str] = ()
) -> tuple[str, ...]:
    """Look at every top-level field of a request body; the names of those that are unknown, and so ignored.

    Args:
        fields: the body, one level deep.
        known: fields the endpoint implements.
        elsewhere: fields that another endpoint implements and this one does not.

    Raises:
        UnsupportedParameterError: naming the first field that asks for something that is not there.
    """
    unknown: list[str] = []
    for name in sorted(fields.keys() - set(known)):
        if name in NO_OPS:
            no_ops = NO_OPS[name]
        elif name in elsewhere:
            no_ops = ELSEWHERE_NO_OPS.get(name, ())
        else:
            unknown.append(name)
            continue
        value: Any = decode(fields[name], object)
        if value is None or any(value == allowed and type(value) is type(allowed) for allowed in no_ops):
            continue
        hint = INSTEAD.get(name, "remove it from the request")
        raise UnsupportedParameterError(f"{name} is not supported here; {hint}.", param=name)
    if unknown:
        # Their number only: the names are the client's text.
        structlog.get_logger("chatserve.request").debug("unknown_fields_ignored", count=len(unknown))
    return tuple(unknown)
