"""Who is calling: bearer keys and the page's cookie sessions.

Knows keys (as SHA-256 digests, looked up and never compared byte by byte), sessions (random, opaque, in
memory) and which origin may use a cookie. Does not route and writes no responses; `chatserve.server.middleware`
and `chatserve.server.websocket` call `Authenticator`.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import OrderedDict
from http.cookies import CookieError, SimpleCookie

import msgspec
from starlette.types import Scope as ASGIScope

from chatserve.config import ServerConfig
from chatserve.errors import AuthenticationError, PermissionDeniedError
from chatserve.server.origin import header

COOKIE_NAME = "chatserve_session"
SESSION_SECONDS = 30 * 24 * 3600
MAX_SESSIONS = 4096
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class Principal(msgspec.Struct, frozen=True):
    """An authenticated caller.

    Attributes:
        tenant: owner of its cache scope. One tenant for now, whatever the key.
    """

    tenant: str = "default"


class Authenticator:
    """Keys and sessions of one server."""

    def __init__(self, config: ServerConfig) -> None:
        self._principals = {_digest(key): Principal() for key in config.api_keys}
        self._sessions: OrderedDict[bytes, tuple[float, Principal]] = OrderedDict()

    @property
    def required(self) -> bool:
        """Whether callers need a key. Without keys only loopback is served (`check_bind`)."""
        return bool(self._principals)

    def authenticate(self, scope: ASGIScope) -> Principal:
        """The caller behind an ASGI ``http`` or ``websocket`` scope whose Origin, if any, was found to be good.

        Raises:
            AuthenticationError: keys are on, and the scope carries none that is known.
            PermissionDeniedError: a cookie without the page's own origin, where one is needed (anything that
                can change state, and every WebSocket).
        """
        if not self._principals:
            return Principal()
        authorization = header(scope, b"authorization")
        if authorization is not None:
            scheme, _, key = authorization.partition(" ")
            if scheme.lower() != "bearer" or not key.strip():
                raise AuthenticationError("The Authorization header must read: Bearer <key>.")
            return self.principal_of(key.strip())
        session = self._session(scope)
        if session is None:
            raise AuthenticationError("A key is needed here: send the header Authorization: Bearer <key>.")
        may_change_state = scope["type"] == "websocket" or scope["method"] not in SAFE_METHODS
        if may_change_state and header(scope, b"origin") is None:
            raise PermissionDeniedError("A cookie is accepted from this server's own page only (no Origin was sent).")
        return session

    def principal_of(self, key: str) -> Principal:
        """The caller a key belongs to; raises `AuthenticationError`. Time does not depend on the key's text."""
        principal = self._principals.get(_digest(key))
        if principal is None:
            raise AuthenticationError("This key is not known here. Check the key the server was started with.")
        return principal

    def has_cookie(self, scope: ASGIScope) -> bool:
        """Whether a session cookie was sent at all, valid or not."""
        return _cookie(scope) is not None

    def log_in(self, key: str) -> str:
        """Open a session for a key and return its opaque token; raises `AuthenticationError`."""
        principal = self.principal_of(key)
        token = secrets.token_urlsafe(32)
        self._sessions[_digest(token)] = (time.monotonic() + SESSION_SECONDS, principal)
        while len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return token

    def log_out(self, scope: ASGIScope) -> None:
        """Close the session a scope carries, if it carries one."""
        token = _cookie(scope)
        if token is not None:
            self._sessions.pop(_digest(token), None)

    def _session(self, scope: ASGIScope) -> Principal | None:
        token = _cookie(scope)
        entry = self._sessions.get(_digest(token)) if token is not None else None
        if entry is None or entry[0] < time.monotonic():
            return None
        return entry[1]


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def _cookie(scope: ASGIScope) -> str | None:
    raw = header(scope, b"cookie")
    if raw is None:
        return None
    try:
        morsel = SimpleCookie(raw).get(COOKIE_NAME)
    except CookieError:
        return None
    return morsel.value if morsel is not None else None
