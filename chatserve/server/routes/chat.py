"""``POST /v1/chat/completions``."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from chatserve.server.completion import collect, stream
from chatserve.server.context import ServerContext
from chatserve.server.encode import ChunkEncoder, chat_logprobs, usage_info
from chatserve.server.parse import check_logprobs_size, parse_messages
from chatserve.server.routes.prepare import answer_head, prepare
from chatserve.server.routes.reply import json_response
from chatserve.server.wire import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionRequest,
    StreamOptions,
)


class ChatCompletions:
    """Endpoint of the one model that is served."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def __call__(self, request: Request) -> Response:
        context, config = self._context, self._context.config.server
        body, template = await prepare(request, context, ChatCompletionRequest)
        prompt = await context.service.render_chat_off_loop(parse_messages(body.messages, config), template.scopes[-1])
        generation_request = msgspec.structs.replace(template, prompt_ids=prompt.token_ids, prompt_field="messages")
        sampling = template.sampling
        head = answer_head(context, "chatcmpl", "chat.completion.chunk")
        if body.stream:
            options = body.stream_options or StreamOptions()
            encoder = ChunkEncoder(head, sampling.n, options=options, logprobs=sampling.logprobs)
            return stream(request, [context.service.start(generation_request)], encoder, config)
        check_logprobs_size(sampling, 1, context.service.context_length())
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
                id=head.id,
                created=head.created,
                model=head.model,
                system_fingerprint=head.system_fingerprint,
                choices=choices,
                usage=usage_info([generation.usage]),
            )
        )
