"""``POST /v1/completions``: one or several prompts, each a text or token ids."""

from __future__ import annotations

from array import array

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from chatserve.sampling_params import SamplingParams
from chatserve.server.completion import Outcome, collect, stream
from chatserve.server.context import ServerContext
from chatserve.server.encode import ChunkEncoder, completion_logprobs, usage_info
from chatserve.server.parse import check_logprobs_size, parse_prompts
from chatserve.server.routes.prepare import answer_head, prepare
from chatserve.server.routes.reply import json_response
from chatserve.server.wire import CompletionRequest, StreamOptions, TextChoice, TextCompletion


class Completions:
    """Endpoint of the one model that is served."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def __call__(self, request: Request) -> Response:
        context, config = self._context, self._context.config.server
        body, template = await prepare(request, context, CompletionRequest)
        template = msgspec.structs.replace(template, continues_prompt=True)
        sampling = template.sampling
        requests = [
            msgspec.structs.replace(
                template, prompt_ids=await self._encode(prompt, body.add_special_tokens is not False)
            )
            for prompt in parse_prompts(body.prompt, context.service.engine_info().vocab_size)
        ]
        head = answer_head(context, "cmpl", "text_completion")
        if body.stream:
            options = body.stream_options or StreamOptions()
            encoder = ChunkEncoder(head, sampling.n * len(requests), options=options, logprobs=sampling.logprobs)
            return stream(request, context.service.start_all(requests), encoder, config)
        check_logprobs_size(sampling, len(requests), context.service.context_length())
        generations = context.service.start_all(requests)
        outcomes = await collect(request, generations)
        return json_response(
            TextCompletion(
                id=head.id,
                created=head.created,
                model=head.model,
                system_fingerprint=head.system_fingerprint,
                choices=[_choice(index, outcome, sampling) for index, outcome in enumerate(outcomes)],
                usage=usage_info([generation.usage for generation in generations]),
            )
        )

    async def _encode(self, prompt: str | list[int], add_special_tokens: bool) -> bytes:
        if isinstance(prompt, str):
            await self._context.service.refuse_oversized(len(prompt))
            return await self._context.service.encode(prompt, add_special_tokens=add_special_tokens)
        return array("i", prompt).tobytes()


def _choice(index: int, outcome: Outcome, sampling: SamplingParams) -> TextChoice:
    logprobs = None
    if sampling.logprobs is not None:
        logprobs = completion_logprobs(outcome.logprobs, offset=0, with_top=sampling.logprobs > 0)
    return TextChoice(index, outcome.text, outcome.finish_reason, outcome.stop_reason, logprobs)
