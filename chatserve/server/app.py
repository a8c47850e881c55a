"""The application: one explicit table of routes behind one wall of pure ASGI middleware.

`create_app` is given a finished `ServerContext`; it builds nothing else and starts nothing. There is no endpoint
that is not in this file (the WebSocket's come from `chatserve.server.websocket`).
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from chatserve.errors import InvalidRequestError, NotFoundError
from chatserve.server.context import ServerContext
from chatserve.server.errors import error_response
from chatserve.server.middleware import EdgeMiddleware
from chatserve.server.routes.admin import Admin
from chatserve.server.routes.cache import CacheEndpoints, PrefixEndpoints
from chatserve.server.routes.chat import ChatCompletions
from chatserve.server.routes.completions import Completions
from chatserve.server.routes.models import Models
from chatserve.server.routes.operations import Operations
from chatserve.server.routes.ui import Page, load_files, web_folder
from chatserve.server.routes.usage import OwnUsageEndpoint
from chatserve.server.websocket import websocket_routes


def create_app(context: ServerContext) -> Starlette:
    """The ASGI application over one engine and one model."""
    models, operations, cache = Models(context), Operations(context), CacheEndpoints(context)
    files = load_files(web_folder()) if context.config.server.ui else {}
    page = Page(context, files)
    routes = [
        Route("/v1/chat/completions", ChatCompletions(context).__call__, methods=["POST"]),
        Route("/v1/completions", Completions(context).__call__, methods=["POST"]),
        Route("/v1/models", models.list, methods=["GET"]),
        Route("/v1/models/{model:path}", models.retrieve, methods=["GET"]),
        Route("/v1/usage", OwnUsageEndpoint(context).__call__, methods=["GET"]),
        Route("/v1/cache/explain", cache.explain, methods=["POST"]),
        Route("/v1/cache", cache.purge, methods=["DELETE"]),
        Route("/tokenize", models.tokenize, methods=["POST"]),
        Route("/detokenize", models.detokenize, methods=["POST"]),
        Route("/livez", operations.livez, methods=["GET"]),
        Route("/readyz", operations.readyz, methods=["GET"]),
        Route("/health", operations.health, methods=["GET"]),
        Route("/version", operations.version, methods=["GET"]),
        Route("/metrics", operations.metrics, methods=["GET"]),
        Route("/ui/login", page.log_in, methods=["POST"]),
        Route("/ui/logout", page.log_out, methods=["POST"]),
    ]
    if context.config.tenancy.admin_api_key is not None:
        routes += _admin_routes(Admin(context), PrefixEndpoints(context))
    paths = {route.endpoint: route.path for route in routes}
    app = Starlette(
        routes=[
            *routes,
            *(Route(path, page.file, methods=["GET"]) for path in files),
            *websocket_routes(context),
        ],
        middleware=[Middleware(EdgeMiddleware, context=context, paths=paths, files=files.keys())],
        exception_handlers={HTTPException: _http_error},
    )
    app.router.redirect_slashes = False
    return app


def _admin_routes(admin: Admin, prefixes: PrefixEndpoints) -> list[Route]:
    return [
        Route("/admin/tenants", admin.list_tenants, methods=["GET"]),
        Route("/admin/tenants", admin.create_tenant, methods=["POST"]),
        Route("/admin/tenants/{name}", admin.tenant, methods=["GET"]),
        Route("/admin/tenants/{name}", admin.update_tenant, methods=["PATCH"]),
        Route("/admin/tenants/{name}", admin.delete_tenant, methods=["DELETE"]),
        Route("/admin/keys", admin.list_keys, methods=["GET"]),
        Route("/admin/keys", admin.create_key, methods=["POST"]),
        Route("/admin/keys/{key_id}", admin.revoke_key, methods=["DELETE"]),
        Route("/admin/usage", admin.usage, methods=["GET"]),
        Route("/admin/prefixes", prefixes.list, methods=["GET"]),
        Route("/admin/prefixes", prefixes.publish, methods=["POST"]),
        Route("/admin/prefixes/{prefix_id}", prefixes.withdraw, methods=["DELETE"]),
    ]


async def _http_error(request: Request, error: Exception) -> Response:
    """What the router itself refuses: unknown paths and wrong methods."""
    status = error.status_code if isinstance(error, HTTPException) else 404
    if status == 405:
        refusal = error_response(InvalidRequestError("This path does not take that method.", code="method_not_allowed"))
        refusal.status_code = 405
        allow = error.headers.get("Allow") if isinstance(error, HTTPException) and error.headers else None
        if allow:
            refusal.headers["allow"] = allow
        return refusal
    return error_response(NotFoundError("There is nothing at this path."))
