"""The ``params`` of a `chat.send`: the fields of a chat completion, with the same meaning and the same refusals.

Knows which of those fields make no sense on a WebSocket; everything else is `chatserve.server.parse`, so that the two
transports cannot drift apart. Every refusal names the field as ``params.…``. `ws_hub` is its caller.
"""

from __future__ import annotations

import msgspec

from chatserve.config import ServerConfig
from chatserve.errors import InvalidRequestError, NotFoundError, UnsupportedParameterError
from chatserve.sampling_params import SamplingParams
from chatserve.server.body import decode
from chatserve.server.parse import COMPLETION_FIELDS, check_model, max_tokens_field, parse_sampling, parse_stop
from chatserve.server.sampling_defaults import SamplingDefaults
from chatserve.server.unsupported import refuse_unsupported
from chatserve.server.wire import ChatCompletionRequest, MessageParam
from chatserve.text.stop_strings import StopAutomaton

_INSTEAD = {
    "messages": "the conversation is kept by the server; send content",
    "logprobs": "use /v1/chat/completions",
    "top_logprobs": "use /v1/chat/completions",
    "stream_options": "usage comes with gen.done",
}


class _Fields(ChatCompletionRequest, kw_only=True):
    messages: list[MessageParam] = msgspec.field(default_factory=list)


class TurnParams(msgspec.Struct, frozen=True):
    """How one turn is to be answered, validated."""

    sampling: SamplingParams
    stop: StopAutomaton | None
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    priority: int
    flex: bool
    cache_salt: str
    max_tokens_field: str


def parse_params(
    raw: msgspec.Raw, model_name: str, vocab_size: int, config: ServerConfig, defaults: SamplingDefaults
) -> TurnParams:
    """Decode and validate; the model's ``defaults`` stand where nothing is given.

    Raises:
        ChatserveError: with ``param`` naming the field at fault.
    """
    try:
        given = decode(raw, dict[str, msgspec.Raw])
        fields = decode(raw, _Fields)
        for name, instead in _INSTEAD.items():
            if getattr(fields, name):
                raise UnsupportedParameterError(f"{name} is not for WebSockets; {instead}.", param=name)
        if fields.stream is False:
            raise UnsupportedParameterError("A WebSocket always streams; leave stream out.", param="stream")
        refuse_unsupported(given, known=_Fields.__struct_fields__, elsewhere=COMPLETION_FIELDS)
        check_model(fields.model, model_name)
        sampling = parse_sampling(fields, vocab_size, defaults)
        stop = parse_stop(fields, config)
    except (InvalidRequestError, NotFoundError) as error:
        error.param = "params" if error.param is None else f"params.{error.param}"
        raise
    return TurnParams(
        sampling,
        stop,
        bool(fields.include_stop_str_in_output),
        fields.skip_special_tokens is not False,
        fields.priority or 0,
        fields.service_tier == "flex",
        fields.cache_salt or "",
        f"params.{max_tokens_field(fields)}",
    )
