"""What endpoints do alike before their ways part: limits, and from a completion's body to a request without its prompt.

Reads and checks in the order that costs least first. Knows the fields both completions' bodies share; what is a prompt,
and what an answer looks like, is each endpoint's own.
"""

from __future__ import annotations

import time
from typing import Literal, TypeVar

from starlette.requests import Request

from chatserve.server.body import read_json_body
from chatserve.server.context import ServerContext
from chatserve.server.encode import fingerprint, response_id
from chatserve.server.generation import GenerationRequest
from chatserve.server.middleware import RequestInfo, request_info
from chatserve.server.parse import max_tokens_field, parse_request, parse_sampling, parse_stop
from chatserve.server.wire import ChatCompletionRequest, ChunkHead, CompletionRequest

R = TypeVar("R", ChatCompletionRequest, CompletionRequest)


def count_request(request: Request, context: ServerContext) -> RequestInfo:
    """What is known of a request that works without generating, once it is counted against its tenant's limit.

    Raises:
        RateLimitError: it is one too many.
    """
    info = request_info(request.scope)
    info.is_limited = True
    context.service.count_request(info.principal)
    return info


async def prepare(request: Request, context: ServerContext, kind: type[R]) -> tuple[R, GenerationRequest]:
    """The decoded body, and all of the generation request but its prompt.

    Raises:
        ChatserveError: the body is refused, or its tenant may not send more now.
    """
    config, service = context.config.server, context.service
    info = request_info(request.scope)
    info.is_limited = True
    raw = await read_json_body(request, config)
    service.check_tenant(info.principal)
    body, info.ignored = parse_request(raw, kind, context.model_name)
    return body, GenerationRequest(
        prompt_ids=b"",
        sampling=parse_sampling(body, service.engine_info().vocab_size, context.sampling_defaults),
        scopes=context.scopes_for(info.principal, body.cache_salt or ""),
        principal=info.principal,
        stop=parse_stop(body, config),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        priority=body.priority or 0,
        flex=body.service_tier == "flex",
        patience=info.patience,
        max_tokens_field=max_tokens_field(body),
    )


def answer_head(
    context: ServerContext,
    prefix: Literal["chatcmpl", "cmpl"],
    kind: Literal["chat.completion.chunk", "text_completion"],
) -> ChunkHead:
    """Id, time and names of a new answer; a whole answer has the same as the chunks of a streamed one."""
    return ChunkHead(
        id=response_id(prefix),
        object=kind,
        created=int(time.time()),
        model=context.model_name,
        system_fingerprint=fingerprint(context.service.engine_info().weights_revision),
    )
