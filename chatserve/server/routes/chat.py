"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from chatserve.server.body import read_json_body
from chatserve.server.completion import collect, stream
from chatserve.server.context import ServerContext
from chatserve.server.encode import ChunkEncoder, chat_logprobs, fingerprint, response_id, usage_info
from chatserve.server.generation import GenerationRequest
from chatserve.server.middleware import request_info
from chatserve.server.parse import parse_messages, parse_request, parse_sampling, parse_stop
from chatserve.server.routes.reply import json_response
from chatserve.server.wire import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionRequest,
    ChunkHead,
    StreamOptions,
)


class ChatCompletions:
    """Endpoint of the one model that is served."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def __call__(self, request: Request) -> Response:
        context, config = self._context, self._context.config.server
        info = request_info(request.scope)
        info.is_limited = True
        raw = await read_json_body(request, config)
        context.service.check_tenant(info.principal)
        body, info.ignored = parse_request(raw, ChatCompletionRequest, context.model_name)
        engine = context.service.engine_info()
        sampling = parse_sampling(body, engine.vocab_size)
        stop = parse_stop(body, config)
        messages = parse_messages(body.messages, config)
        scopes = context.scopes_for(info.principal, body.cache_salt or "")
        prompt = await context.service.render_chat_off_loop(messages, scopes[-1])
        generation_request = GenerationRequest(
            prompt_ids=prompt.token_ids,
            sampling=sampling,
            scopes=scopes,
            principal=info.principal,
            stop=stop,
            include_stop_str_in_output=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
            priority=body.priority or 0,
            flex=body.service_tier == "flex",
            patience=info.patience,
        )
        answer_id, created = response_id("chatcmpl"), int(time.time())
        system_fingerprint = fingerprint(engine.weights_revision)
        if body.stream:
            options = body.stream_options or StreamOptions()
            head = ChunkHead(
                id=answer_id,
                object="chat.completion.chunk",
                created=created,
                model=context.model_name,
                system_fingerprint=system_fingerprint,
            )
            encoder = ChunkEncoder(head, sampling.n, options=options, logprobs=sampling.logprobs)
            return stream(request, [context.service.start(generation_request)], encoder, config)
        generation = context.service.start(generation_request)
        outcomes = await collect(request, [generation])
        choices = [
            ChatChoice(
                index,
                AssistantMessage(outcome.text),
                outcome.finish_reason,
                outcome.stop_reason,
                chat_logprobs(outcome.logprobs) if sampling.logprobs is not None else None,
            )
            for index, outcome in enumerate(outcomes)
        ]
        return json_response(
            ChatCompletion(
                id=answer_id,
                created=created,
                model=context.model_name,
                system_fingerprint=system_fingerprint,
                choices=choices,
                usage=usage_info([generation.usage]),
            )
        )
