"""Where a request comes from, and whose word is taken for it.

A peer's own address counts, whatever its headers say, unless the operator named the peer as a proxy. All peers on a
Unix socket have one address, as the kernel tells no more of them. Knows ASGI scopes, no keys; `chatserve.server.run`
wraps the application with `heed_proxies`, and `chatserve.server.auth` counts wrong keys by `address_of`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

UNIX_PEER = "unix"
"""The address of whoever connects through a Unix socket, and its name among trusted proxies."""


def heed_proxies(app: ASGIApp, trusted: Sequence[str]) -> ASGIApp:
    """``app``, told the client's address and scheme as X-Forwarded-For and X-Forwarded-Proto of trusted peers have it.

    uvicorn's own switch for this is not enough: it trusts loopback by default, and cannot name peers on a Unix socket.

    Args:
        trusted: addresses, networks and `UNIX_PEER`; the last address of the header that is not among them counts,
            since a client can write what stands before.
    """
    if not trusted:
        return app
    proxied = cast(ASGIApp, ProxyHeadersMiddleware(cast(Any, app), list(trusted)))

    async def named(scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("client") is None:
            scope["client"] = (UNIX_PEER, 0)
        await proxied(scope, receive, send)

    return named


def address_of(scope: Scope) -> str:
    """The address behind an ASGI ``http`` or ``websocket`` scope."""
    client = scope.get("client")
    return str(client[0]) if client else UNIX_PEER
