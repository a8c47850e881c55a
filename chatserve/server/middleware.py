"""The server's outer wall, as pure ASGI: ids, Host and Origin, keys, CORS, errors, the request log.

Everything is decided from ``scope["path"]`` and raw headers, never from a reconstructed URL. What is not on the
short list of open paths needs a key, under ``/admin/`` the admin key, and the metrics one of the operator's. WebSocket
scopes get the Host and Origin check here and authenticate in `chatserve.server.websocket`, which can explain itself to
a browser. `chatserve.server.app` installs it.
"""

from __future__ import annotations

import math
import re
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

import structlog
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chatserve.errors import AuthenticationError, ChatserveError
from chatserve.server.auth import Principal
from chatserve.server.body import ClientGoneError
from chatserve.server.client_hints import is_retry, read_patience
from chatserve.server.context import ServerContext
from chatserve.server.errors import error_response, internal_error
from chatserve.server.origin import header
from chatserve.tenancy.limits import MeterStatus
from chatserve.tenancy.tenant import DEFAULT_TENANT

OPEN_PATHS = frozenset({"/livez", "/readyz", "/health", "/ui/login", "/ui/logout"})
"""Answered without a key, beside the page's own files."""

ADMIN_PREFIX = "/admin/"

OPERATOR_PATHS = frozenset({"/metrics"})
"""Their numbers are of all tenants together and of each: what one sends could be read off by another."""

QUIET_PATHS = frozenset({"/livez", "/readyz", "/health", "/metrics"})
"""Asked every few seconds by machines: their log lines are debug."""

CLIENT_GONE = 499
"""Logged, never sent: the client left before its answer."""

EXPOSED_HEADERS = (
    b"x-request-id, openai-processing-ms, retry-after, retry-after-ms, x-should-retry, "
    b"x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests, "
    b"x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens"
)
"""What pages of allowed foreign origins may read of a response."""

INFO_KEY = "chatserve.request"
_REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_METHODS = frozenset({"GET", "HEAD", "POST", "PATCH", "DELETE", "OPTIONS"})
_FIELD_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MAX_FIELDS_NAMED = 8


@dataclass
class RequestInfo:
    """What the wall knows of one request, for handlers and the log.

    Attributes:
        request_id: the client's where it is short and harmless, else 128 random bits; an echo, never a key.
        principal: the caller, set before a handler runs on any path that needs a key.
        is_admin: the caller showed the admin key.
        is_limited: what is asked counts against the tenant's limits, and the response says how much is left.
        tokens: (prompt, cached, output) counts a handler leaves for the log line.
        ignored: fields of the body that a handler did not know; the client is told in a ``Warning`` header.
        patience: seconds until the client gives up waiting for a first answer, where it says so.
    """

    request_id: str
    started: float
    principal: Principal
    is_admin: bool = False
    is_limited: bool = False
    tokens: tuple[int, int, int] | None = None
    ignored: tuple[str, ...] = ()
    patience: float | None = None


def request_info(scope: Scope) -> RequestInfo:
    """The `RequestInfo` of an HTTP scope that came through `EdgeMiddleware`."""
    return cast(RequestInfo, scope[INFO_KEY])


def require_admin(scope: Scope) -> None:
    """Second lock of the operator's handlers, should a path ever reach one without passing the first."""
    if not request_info(scope).is_admin:
        raise AuthenticationError("The admin key is needed here.")


class EdgeMiddleware:
    """Wraps the whole application."""

    def __init__(
        self, app: ASGIApp, context: ServerContext, paths: Mapping[Callable[..., Any], str], files: Collection[str]
    ) -> None:
        """
        Args:
            paths: of all routes, by what answers there; the only ones that become metric labels.
            files: paths of the page's files, open to everybody.
        """
        self._app = app
        self._context = context
        self._path_of = dict(paths)
        self._paths = frozenset(paths.values())
        self._files = frozenset(files)
        self._log = structlog.get_logger("chatserve.request")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._context.origins.check(scope)
        except ChatserveError as error:
            await receive()  # websocket.connect
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = header(scope, b"x-request-id") or ""
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        info = scope[INFO_KEY] = RequestInfo(request_id, time.perf_counter(), Principal())
        info.patience = read_patience(scope)
        cors = self._cors_headers(scope)
        status = 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                spent = int((time.perf_counter() - info.started) * 1000)
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode()),
                    (b"openai-processing-ms", b"%d" % spent),
                    (b"x-content-type-options", b"nosniff"),
                    *self._limit_headers(info),
                    *cors,
                    *_warning(info.ignored),
                ]
            await send(message)

        try:
            response = self._admit(scope, info)
            await (response or self._app)(scope, receive, send_with_headers)
        except ClientGoneError:
            status = status or CLIENT_GONE
        except ChatserveError as error:
            if status:
                raise
            await error_response(error)(scope, receive, send_with_headers)
        except Exception:
            self._log.exception("unexpected_error", request_id=request_id)
            if not status:
                await error_response(internal_error())(scope, receive, send_with_headers)
        finally:
            self._record(scope, info, status or CLIENT_GONE)

    def _admit(self, scope: Scope, info: RequestInfo) -> Response | None:
        """Check Host, Origin and key; a CORS preflight is answered at once."""
        self._context.origins.check(scope)
        if scope["method"] == "OPTIONS" and header(scope, b"access-control-request-method") is not None:
            return Response(status_code=204)
        path = scope["path"]
        if path.startswith(ADMIN_PREFIX):
            self._context.auth.authenticate_admin(scope)
            info.is_admin = True
        elif path in OPERATOR_PATHS:
            info.principal = self._context.auth.authenticate_operator(scope)
        elif path not in OPEN_PATHS and path not in self._files:
            info.principal = self._context.auth.authenticate(scope)
        return None

    def _limit_headers(self, info: RequestInfo) -> list[tuple[bytes, bytes]]:
        """OpenAI's: what is left of the tenant's limits per minute, and when they are whole again."""
        if not info.is_limited:
            return []
        status = self._context.tenants.status(info.principal.tenant)
        return [*_meter_headers("requests", status.requests), *_meter_headers("tokens", status.tokens)]

    def _cors_headers(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """For pages of allowed foreign origins: they send keys, never cookies, so no credentials."""
        origin = header(scope, b"origin")
        if origin is None or not self._context.origins.allows_cross_origin(origin):
            return []
        return [
            (b"access-control-allow-origin", origin.encode("latin-1")),
            (b"access-control-allow-methods", b"GET, POST"),
            (b"access-control-allow-headers", b"authorization, content-type, x-request-id"),
            (b"access-control-expose-headers", EXPOSED_HEADERS),
            (b"access-control-max-age", b"600"),
            (b"vary", b"origin"),
        ]

    def _record(self, scope: Scope, info: RequestInfo, status: int) -> None:
        path = scope["path"]
        seconds = time.perf_counter() - info.started
        # The router has told what answers, if the request came that far: paths with names in them are known by that.
        answered_by: Any = scope.get("endpoint")
        known = path if path in self._paths else self._path_of.get(answered_by)
        handler = known or ("ui" if path in self._files else "other")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._context.metrics.observe_http(handler, method, status, seconds, retry=is_retry(scope))
        fields: dict[str, object] = {}
        if info.tokens is not None:
            fields = dict(zip(("prompt_tokens", "cached_tokens", "completion_tokens"), info.tokens, strict=True))
        if info.principal.tenant != DEFAULT_TENANT:
            fields["tenant"] = info.principal.tenant
        log = self._log.debug if path in QUIET_PATHS else self._log.info
        log(
            "request",
            request_id=info.request_id,
            method=method,
            path=handler,
            status=status,
            ms=round(seconds * 1000, 1),
            **fields,
        )


def _meter_headers(what: str, meter: MeterStatus | None) -> list[tuple[bytes, bytes]]:
    if meter is None:
        return []
    return [
        (f"x-ratelimit-limit-{what}".encode(), b"%d" % meter.limit),
        (f"x-ratelimit-remaining-{what}".encode(), b"%d" % meter.remaining),
        (f"x-ratelimit-reset-{what}".encode(), _duration(meter.reset)),
    ]


def _duration(seconds: float) -> bytes:
    """As OpenAI writes it: ``850ms``, ``12s``, ``6m0s``; rounded up."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return b"%dms" % milliseconds
    minutes, rest = divmod(math.ceil(seconds), 60)
    return b"%dm%ds" % (minutes, rest) if minutes else b"%ds" % rest


def _warning(ignored: tuple[str, ...]) -> list[tuple[bytes, bytes]]:
    """The header that tells which fields had no effect; names that are no plain words are only counted."""
    if not ignored:
        return []
    names = [name for name in ignored if _FIELD_NAME.fullmatch(name)][:_MAX_FIELDS_NAMED]
    others = len(ignored) - len(names)
    told = ", ".join([*names, *([f"{others} more" if names else f"{others} fields"] if others else [])])
    return [(b"warning", f'299 chatserve "not known here and ignored: {told}"'.encode())]
