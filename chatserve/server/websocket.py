"""`/v1/ws`: who may open a WebSocket, and under which terms.

Decides before accepting: subprotocol (400), credentials (401; a browser cannot read that status, so a page is
accepted, told, and closed with 4401), number of sockets (429). Host and Origin were checked by the middleware. Then
hands the socket to `ws_connection`. The application includes `websocket_routes`.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import structlog
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from chatserve.errors import AuthenticationError, ChatserveError, InvalidRequestError, QueueFullError, RateLimitError
from chatserve.server import ws_protocol as wire
from chatserve.server.errors import error_response
from chatserve.server.origin import header
from chatserve.server.ws_connection import Connection, ConnectionLimits
from chatserve.server.ws_hub import ChatHub
from chatserve.server.ws_transport import fail_function
from chatserve.sessions.memory_store import MemoryStore

if TYPE_CHECKING:
    from chatserve.server.auth import Principal
    from chatserve.server.context import ServerContext
    from chatserve.sessions.store import ConversationStore


def websocket_routes(
    context: ServerContext,
    *,
    store: ConversationStore | None = None,
    limits: ConnectionLimits | None = None,
) -> list[WebSocketRoute]:
    """The WebSocket part of the route table; conversations live in memory unless ``store`` says otherwise."""
    if store is None:
        store = MemoryStore(max_messages=context.config.server.max_messages)
    hub = ChatHub(context, store)
    context.tenant_sync.on_deleted(hub.forget)
    endpoint = _Endpoint(context, hub, limits or ConnectionLimits())
    return [WebSocketRoute("/v1/ws", endpoint.serve, name="ws")]


class _Endpoint:
    """Opens sockets and counts them."""

    def __init__(self, context: ServerContext, hub: ChatHub, limits: ConnectionLimits) -> None:
        self._context = context
        self._hub = hub
        self._limits = limits
        self._open: set[Connection] = set()
        context.tenants.on_revoked(self._end_revoked)
        self._log = structlog.get_logger("chatserve.websocket")

    async def serve(self, websocket: WebSocket) -> None:
        """One socket's whole life."""
        try:
            principal = self._admit(websocket)
        except AuthenticationError as error:
            if header(websocket.scope, b"authorization") is None and header(websocket.scope, b"origin") is not None:
                await _accept_and_refuse(websocket, error)
            else:
                await websocket.send_denial_response(error_response(error))
            return
        except ChatserveError as error:
            await websocket.send_denial_response(error_response(error))
            return
        began = time.monotonic()
        fail = fail_function(websocket.scope) or _leave
        connection = Connection(websocket, self._context, self._hub, principal, self._limits, fail)
        self._open.add(connection)
        try:
            await websocket.accept(wire.SUBPROTOCOL)
            await connection.run()
        finally:
            self._open.discard(connection)
            seconds = round(time.monotonic() - began, 1)
            self._log.info("websocket", connection=connection.id, commands=connection.num_commands, seconds=seconds)

    def _admit(self, websocket: WebSocket) -> Principal:
        if wire.SUBPROTOCOL not in websocket.scope["subprotocols"]:
            raise InvalidRequestError(
                f"Offer the subprotocol {wire.SUBPROTOCOL} (Sec-WebSocket-Protocol).", code="subprotocol_required"
            )
        principal = self._context.auth.authenticate(websocket.scope)
        if len(self._open) >= self._context.config.server.max_websocket_connections:
            raise QueueFullError(f"{len(self._open)} WebSockets are open, the most this server keeps.", retry_after=5.0)
        most = self._context.tenants.tenant(principal.tenant).limits.max_connections
        if most is not None and sum(other.principal.tenant == principal.tenant for other in self._open) >= most:
            raise RateLimitError(
                f"{most} WebSockets of this tenant are open, the most it may have. Close one.",
                code="concurrency_limit",
                retry_after=5.0,
            )
        return principal

    def _end_revoked(self, key_ids: frozenset[str | None]) -> None:
        for connection in self._open:
            if connection.principal.key_id in key_ids:
                connection.revoke()


async def _accept_and_refuse(websocket: WebSocket, error: ChatserveError) -> None:
    with contextlib.suppress(WebSocketDisconnect):  # it need not wait for the answer
        await websocket.accept(wire.SUBPROTOCOL)
        await websocket.send_text(wire.encode(wire.Error(wire.error_body(error))))
        await websocket.close(wire.Close.NOT_AUTHENTICATED, error.code)


def _leave(code: int, reason: str) -> None:
    """Under a server without our transport, returning from the application is the only way to end a socket."""
