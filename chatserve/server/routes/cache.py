"""``/v1/cache``: what a tenant's own cache holds of a prompt, and how to empty it; ``/admin/prefixes``."""

from __future__ import annotations

from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from chatserve.errors import InvalidRequestError
from chatserve.server.body import decode, read_json_body
from chatserve.server.context import ServerContext
from chatserve.server.middleware import require_admin
from chatserve.server.parse import check_model, parse_messages
from chatserve.server.prefixes import PublishedPrefix
from chatserve.server.routes.prepare import count_request
from chatserve.server.routes.reply import json_response
from chatserve.server.wire import MessageParam

TEXT_AROUND = 12
"""Tokens shown on either side of the point where a prompt leaves what is cached."""


class ExplainRequest(msgspec.Struct):
    """Body of ``POST /v1/cache/explain``: a prompt or a conversation, as it would be sent."""

    model: str | None = None
    prompt: str | None = None
    messages: list[MessageParam] | None = None
    cache_salt: str | None = None


class Explanation(msgspec.Struct):
    """What a request with this prompt would find in its tenant's own and in published caches.

    Attributes:
        cached_tokens: by tier, the device part first.
        miss: why it ends there.
        differs_at: index of the first token that is not cached, where something is cached beyond with other tokens.
        around: the prompt's own text around that token.
        evicted_steps_ago: engine steps since the evicted part was last used.
    """

    prompt_tokens: int
    cached_tokens: dict[str, int]
    miss: Literal["complete", "differs", "evicted", "never_seen"]
    differs_at: int | None = None
    around: str | None = None
    evicted_steps_ago: int | None = None
    object: str = "cache.explanation"


class Purged(msgspec.Struct):
    """Answer to ``DELETE /v1/cache``."""

    device_blocks: int
    host_blocks: int
    object: str = "cache.purged"


class NewPrefix(msgspec.Struct, forbid_unknown_fields=True):
    """Body of ``POST /admin/prefixes``."""

    text: str
    group: str = ""


class PrefixList(msgspec.Struct):
    """All published prefixes."""

    data: list[PublishedPrefix]
    object: str = "list"


class CacheEndpoints:
    """For tenants: their own cache."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def explain(self, request: Request) -> Response:
        """A dry run: nothing is computed, and nothing is kept warm by asking."""
        context = self._context
        info = count_request(request, context)
        body = decode(await read_json_body(request, context.config.server), ExplainRequest)
        check_model(body.model, context.model_name)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequestError("Give either prompt or messages.", param="prompt")
        scopes = context.scopes_for(info.principal, body.cache_salt or "")
        if body.messages is not None:
            messages = parse_messages(body.messages, context.config.server)
            tokens = (await context.service.render_chat_off_loop(messages, scopes[-1])).token_ids
        else:
            tokens = await context.service.encode(body.prompt or "", add_special_tokens=True)
        reply = await context.engine.explain(tokens, scopes)
        answer = Explanation(
            prompt_tokens=reply.num_tokens,
            cached_tokens={"device": reply.device_tokens, "host": reply.host_tokens},
            miss=reply.miss,
            evicted_steps_ago=reply.steps_ago,
        )
        if reply.miss == "differs":
            at = reply.device_tokens + reply.host_tokens
            answer.differs_at = at
            near = tokens[4 * max(0, at - TEXT_AROUND) : 4 * (at + TEXT_AROUND)]
            answer.around = context.service.tokenizer.decode(near, skip_special_tokens=False)
        return json_response(answer)

    async def purge(self, request: Request) -> Response:
        """Forget everything the caller's tenant has cached, on both tiers, and zero the memory."""
        tenant = count_request(request, self._context).principal.tenant
        self._context.service.forget(tenant)
        reply = await self._context.engine.purge(tenant)
        return json_response(Purged(reply.device_blocks, reply.host_blocks))


class PrefixEndpoints:
    """For the operator: published system prompts."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def list(self, request: Request) -> Response:
        """All of them."""
        require_admin(request.scope)
        return json_response(PrefixList(self._context.prefixes.list()))

    async def publish(self, request: Request) -> Response:
        """Compute and pin one; 201 once it is there."""
        require_admin(request.scope)
        body = decode(await read_json_body(request, self._context.config.server), NewPrefix)
        return json_response(await self._context.prefixes.publish(body.text, body.group), 201)

    async def withdraw(self, request: Request) -> Response:
        """End a publication."""
        require_admin(request.scope)
        await self._context.prefixes.withdraw(request.path_params["prefix_id"])
        return Response(status_code=204)
