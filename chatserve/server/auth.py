"""Who is calling: bearer keys and the page's cookie sessions.

Knows headers, sessions (random, opaque, in memory, worth no more than the key they were opened with) and which
origin may use a cookie; whose a key is, `chatserve.tenancy` knows. Does not route and writes no responses;
`chatserve.server.middleware` and `chatserve.server.websocket` call `Authenticator`.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections import deque
from http.cookies import CookieError, SimpleCookie

import msgspec
from starlette.types import Scope as ASGIScope

from chatserve.errors import AuthenticationError, PermissionDeniedError
from chatserve.server.auth_address import address_of
from chatserve.server.auth_guard import KeyGuard, is_guessable
from chatserve.server.origin import header
from chatserve.tenancy.keys import ApiKey
from chatserve.tenancy.registry import TenantRegistry
from chatserve.tenancy.tenant import DEFAULT_TENANT

COOKIE_NAME = "chatserve_session"
SESSION_SECONDS = 30 * 24 * 3600
MAX_SESSIONS_PER_KEY = 512
"""The oldest session of the same key goes first: nobody's logins end another's session."""

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_ADMIN_ID = "admin"
"""Names the admin key where keys are named; ids of other keys are longer."""


class Principal(msgspec.Struct, frozen=True):
    """An authenticated caller.

    Attributes:
        tenant: who is served, limited and charged, and owner of its cache scope. Class, weight, limits and groups
            are looked up when they are needed, so that a change counts at once.
        key_id: public id of the key that was shown; ``None`` on a server without keys.
    """

    tenant: str = DEFAULT_TENANT
    key_id: str | None = None


class Authenticator:
    """Keys and sessions of one server.

    Args:
        admin_key: opens what `authenticate_admin` guards; nothing does without it.
    """

    def __init__(self, tenants: TenantRegistry, admin_key: str | None = None) -> None:
        self._tenants = tenants
        self._admin = None if admin_key is None else _digest(admin_key)
        self._sessions: dict[bytes, tuple[float, str]] = {}  # until when, and by which key
        self._of_key: dict[str, deque[bytes]] = {}  # oldest first; those that were closed stay until their turn
        self._guard = KeyGuard()
        tenants.on_revoked(self._forget)

    @property
    def required(self) -> bool:
        """Whether callers need a key. Without keys only loopback is served (`check_bind`)."""
        return self._tenants.keys_required

    def authenticate(self, scope: ASGIScope) -> Principal:
        """The caller behind an ASGI ``http`` or ``websocket`` scope whose Origin, if any, was found to be good.

        Raises:
            AuthenticationError: keys are on, and the scope carries none that is good.
            PermissionDeniedError: a cookie without the page's own origin, where one is needed (anything that
                can change state, and every WebSocket).
            RateLimitError: too many wrong keys came from the caller's address.
        """
        if not self.required:
            return Principal()
        key = _bearer(scope)
        if key is not None:
            record = self._recognise(key, scope)
            return Principal(record.tenant, record.id)
        session = self._session(scope)
        if session is None:
            raise AuthenticationError("A key is needed here: send the header Authorization: Bearer <key>.")
        may_change_state = scope["type"] == "websocket" or scope["method"] not in SAFE_METHODS
        if may_change_state and header(scope, b"origin") is None:
            raise PermissionDeniedError("A cookie is accepted from this server's own page only (no Origin was sent).")
        return session

    def authenticate_admin(self, scope: ASGIScope) -> None:
        """Check for the admin key, as a bearer key and in no other way.

        Raises:
            AuthenticationError: the scope does not carry it.
            RateLimitError: too many wrong keys came from the caller's address.
        """
        if not self._is_admin(scope):
            if _bearer(scope) is not None:
                self._guard.wrong(address_of(scope), time.monotonic())
            raise AuthenticationError(
                "The admin key is needed here: send the header Authorization: Bearer <admin key>."
            )

    def authenticate_operator(self, scope: ASGIScope) -> Principal:
        """Check for whoever may see every tenant's numbers: the admin key, or a key of the default tenant.

        Raises:
            PermissionDeniedError: it is another tenant's.
            AuthenticationError, RateLimitError: as `authenticate`.
        """
        if self._is_admin(scope):
            return Principal()
        principal = self.authenticate(scope)
        if principal.tenant != DEFAULT_TENANT:
            raise PermissionDeniedError(
                "This shows every tenant's numbers: it opens to the operator's keys. Yours are at /v1/usage.",
                code="operator_only",
            )
        return principal

    def _is_admin(self, scope: ASGIScope) -> bool:
        """Whether the admin key was shown; raises `RateLimitError` where that may be the result of guessing."""
        key = _bearer(scope)
        if key is None or self._admin is None or not hmac.compare_digest(_digest(key), self._admin):
            return False
        if is_guessable(key):
            self._guard.right(address_of(scope), _ADMIN_ID, time.monotonic())
        return True

    def _recognise(self, key: str, scope: ASGIScope) -> ApiKey:
        """The record of a key. Whether it is right does not show in the time, nor to whoever tries too many."""
        address, now = address_of(scope), time.monotonic()
        try:
            record = self._tenants.recognise(key)
        except AuthenticationError as error:
            if error.code == AuthenticationError.default_code:  # not one that was revoked or has expired
                self._guard.wrong(address, now)
            raise
        if is_guessable(key):
            self._guard.right(address, record.id, now)
        return record

    def has_cookie(self, scope: ASGIScope) -> bool:
        """Whether a session cookie was sent at all, valid or not."""
        return _cookie(scope) is not None

    def log_in(self, key: str, scope: ASGIScope) -> str:
        """Open a session for a key that came with ``scope`` and return its opaque token; raises as `authenticate`."""
        record = self._recognise(key, scope)
        token = secrets.token_urlsafe(32)
        self._sessions[_digest(token)] = (time.monotonic() + SESSION_SECONDS, record.id)
        opened = self._of_key.setdefault(record.id, deque())
        opened.append(_digest(token))
        if len(opened) > MAX_SESSIONS_PER_KEY:
            self._sessions.pop(opened.popleft(), None)
        return token

    def log_out(self, scope: ASGIScope) -> None:
        """Close the session a scope carries, if it carries one."""
        token = _cookie(scope)
        if token is not None:
            self._sessions.pop(_digest(token), None)

    def _session(self, scope: ASGIScope) -> Principal | None:
        token = _cookie(scope)
        entry = self._sessions.get(_digest(token)) if token is not None else None
        if token is None or entry is None:
            return None
        if entry[0] < time.monotonic():
            del self._sessions[_digest(token)]
            return None
        record = self._tenants.key(entry[1])  # still good?
        return Principal(record.tenant, record.id)

    def _forget(self, key_ids: frozenset[str | None]) -> None:
        """Close the sessions of keys that open nothing any more: what is kept is bounded by the keys that do."""
        for key_id in key_ids:
            for digest in self._of_key.pop(key_id, ()) if key_id is not None else ():
                self._sessions.pop(digest, None)


def _bearer(scope: ASGIScope) -> str | None:
    authorization = header(scope, b"authorization")
    if authorization is None:
        return None
    scheme, _, key = authorization.partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise AuthenticationError("The Authorization header must read: Bearer <key>.")
    return key.strip()


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
