"""``GET /v1/models``, ``GET /v1/models/{model}``, ``POST /tokenize`` and ``POST /detokenize``."""

from __future__ import annotations

from array import array

from starlette.requests import Request
from starlette.responses import Response

from chatserve.errors import InvalidRequestError, UnsupportedParameterError
from chatserve.server.body import read_json_body
from chatserve.server.context import ServerContext
from chatserve.server.parse import check_model, parse_fields, parse_messages
from chatserve.server.routes.prepare import count_request
from chatserve.server.routes.reply import json_response
from chatserve.server.wire import (
    DetokenizeRequest,
    DetokenizeResponse,
    ModelCard,
    ModelList,
    TokenizeRequest,
    TokenizeResponse,
)


class Models:
    """Endpoints about the model itself."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def list(self, _: Request) -> Response:
        """The one model that is served."""
        return json_response(ModelList([self._card()]))

    async def retrieve(self, request: Request) -> Response:
        """The model of that name; names may hold slashes, escaped or not."""
        check_model(request.path_params["model"], self._context.model_name)
        return json_response(self._card())

    def _card(self) -> ModelCard:
        """The served model; ``max_model_len`` is null while it loads."""
        context = self._context
        length = context.service.context_length() if context.engine.ready else None
        name = context.model_name
        return ModelCard(id=name, created=context.created, root=name, max_model_len=length)

    async def tokenize(self, request: Request) -> Response:
        """vLLM's: the ids of a text, or of a conversation as the model would see it."""
        context, config = self._context, self._context.config.server
        info = count_request(request, context)
        body, info.ignored = parse_fields(await read_json_body(request, config), TokenizeRequest)
        check_model(body.model, context.model_name)
        length = context.service.context_length()
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequestError("Give either prompt or messages.", param="prompt")
        if body.messages is not None and body.add_special_tokens:
            raise UnsupportedParameterError(
                "add_special_tokens does not go with messages: the chat template says what surrounds them.",
                param="add_special_tokens",
            )
        if body.prompt is not None:
            ids = await context.service.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
        else:
            scope = context.scopes_for(info.principal)[-1]
            messages = parse_messages(body.messages or [], config)
            add_generation_prompt = body.add_generation_prompt is not False
            ids = (
                await context.service.render_chat_off_loop(messages, scope, add_generation_prompt=add_generation_prompt)
            ).token_ids
        tokens = array("i", ids).tolist()
        response = TokenizeResponse(len(tokens), length, tokens)
        if body.return_token_strs:
            response.token_strs = [context.service.tokenizer.token_text(token) for token in tokens]
        return json_response(response)

    async def detokenize(self, request: Request) -> Response:
        """vLLM's: the text of ids, control tokens included."""
        context = self._context
        info = count_request(request, context)
        body, info.ignored = parse_fields(await read_json_body(request, context.config.server), DetokenizeRequest)
        check_model(body.model, context.model_name)
        tokenizer = context.service.tokenizer
        wrong = next((token for token in body.tokens if not 0 <= token < tokenizer.vocab_size), None)
        if wrong is not None:
            raise InvalidRequestError(
                f"tokens: ids must lie in [0, {tokenizer.vocab_size}); got {wrong}.", param="tokens"
            )
        return json_response(DetokenizeResponse(tokenizer.decode(body.tokens, skip_special_tokens=False)))
