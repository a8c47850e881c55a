"""``POST /v1/completions``: one or several prompts, each a text or token ids."""

from __future__ import annotations

import time
from array import array

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from chatserve.sampling_params import SamplingParams
from chatserve.server.body import read_json_body
from chatserve.server.completion import Outcome, collect, stream
from chatserve.server.context import ServerContext
from chatserve.server.encode import ChunkEncoder, completion_logprobs, fingerprint, response_id, usage_info
from chatserve.server.generation import GenerationRequest
from chatserve.server.middleware import request_info
from chatserve.server.parse import parse_prompts, parse_request, parse_sampling, parse_stop
from chatserve.server.routes.reply import json_response
from chatserve.server.wire import ChunkHead, CompletionRequest, StreamOptions, TextChoice, TextCompletion


class Completions:
    """Endpoint of the one model that is served."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def __call__(self, request: Request) -> Response:
        context, config = self._context, self._context.config.server
        info = request_info(request.scope)
        info.is_limited = True
        raw = await read_json_body(request, config)
        context.service.check_tenant(info.principal)
        body, info.ignored = parse_request(raw, CompletionRequest, context.model_name)
        engine = context.service.engine_info()
        sampling = parse_sampling(body, engine.vocab_size)
        template = GenerationRequest(
            prompt_ids=b"",
            sampling=sampling,
            principal=info.principal,
            scopes=context.scopes_for(info.principal, body.cache_salt or ""),
            stop=parse_stop(body, config),
            include_stop_str_in_output=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
            priority=body.priority or 0,
            flex=body.service_tier == "flex",
            patience=info.patience,
            continues_prompt=True,
        )
        requests = [
            msgspec.structs.replace(
                template, prompt_ids=await self._encode(prompt, body.add_special_tokens is not False)
            )
            for prompt in parse_prompts(body.prompt, engine.vocab_size)
        ]
        answer_id, created = response_id("cmpl"), int(time.time())
        system_fingerprint = fingerprint(engine.weights_revision)
        if body.stream:
            options = body.stream_options or StreamOptions()
            head = ChunkHead(
                id=answer_id,
                object="text_completion",
                created=created,
                model=context.model_name,
                system_fingerprint=system_fingerprint,
            )
            encoder = ChunkEncoder(head, sampling.n * len(requests), options=options, logprobs=sampling.logprobs)
            return stream(request, context.service.start_all(requests), encoder, config)
        generations = context.service.start_all(requests)
        outcomes = await collect(request, generations)
        return json_response(
            TextCompletion(
                id=answer_id,
                created=created,
                model=context.model_name,
                system_fingerprint=system_fingerprint,
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
