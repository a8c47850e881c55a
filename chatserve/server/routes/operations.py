"""Health, version and metrics: what supervisors, routers and scrapers ask for."""

from __future__ import annotations

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import Response

import chatserve
from chatserve.server.context import ServerContext
from chatserve.server.routes.reply import json_response

RETRY = {"retry-after": "2"}


class Operations:
    """Endpoints without a body; none of them touches the engine process."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def livez(self, _: Request) -> Response:
        """200 while this process answers at all."""
        return json_response({"status": "ok"})

    async def readyz(self, _: Request) -> Response:
        """200 while new work is welcome; else 503 with the reason."""
        context = self._context
        status = "ok"
        if context.lifecycle.draining:
            status = "draining"
        elif not context.engine.ready:
            status = "loading"
        elif context.service.queue_is_full:
            status = "queue_full"
        return self._state(status)

    async def health(self, _: Request) -> Response:
        """vLLM's: 200 while the engine is alive."""
        return self._state("ok" if self._context.engine.ready else "loading")

    async def version(self, _: Request) -> Response:
        """The program's version."""
        return json_response({"version": chatserve.__version__})

    async def metrics(self, _: Request) -> Response:
        """Prometheus text exposition."""
        context = self._context
        info = {"block_size": "", "num_gpu_blocks": "", "cache_dtype": ""}
        if context.engine.ready:
            engine = context.engine.info
            info = {
                "block_size": str(engine.block_size),
                "num_gpu_blocks": str(engine.num_blocks),
                "cache_dtype": engine.dtype,
            }
        text = context.metrics.render(
            context.engine.stats,
            context.tenants.ledger.totals(),
            restarts=context.engine.restarts,
            model_name=context.model_name,
            config_info=info,
        )
        return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)

    def _state(self, status: str) -> Response:
        response = json_response({"status": status}, 200 if status == "ok" else 503)
        if status != "ok":
            response.headers.update(RETRY)
        return response
