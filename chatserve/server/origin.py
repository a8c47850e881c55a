"""Which Host names this server answers to and which web origins may talk to it.

Stops DNS rebinding and cross-site requests from any page the user happens to visit, on loopback too. Knows
addresses and names, not keys. `chatserve.server.middleware` and `chatserve.server.websocket` ask it; `check_bind`
is asked once, before anything listens.
"""

from __future__ import annotations

import ipaddress
import re
import socket

from starlette.types import Scope as ASGIScope

from chatserve.config import ServerConfig
from chatserve.errors import ConfigError, InvalidRequestError, PermissionDeniedError

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
WILDCARDS = frozenset({"", "0.0.0.0", "::"})
_HOST = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::(?P<port>[0-9]{1,5}))?")


class OriginPolicy:
    """Host and Origin rules of one server. ``"*"`` in ``allowed_hosts`` or ``allowed_origins`` allows all."""

    def __init__(self, config: ServerConfig) -> None:
        self._any_host = config.uds is not None or "*" in config.allowed_hosts
        self._any_address = config.host in WILDCARDS
        names = {*LOOPBACK_NAMES, config.host, *config.allowed_hosts}
        if self._any_address:
            names.add(socket.gethostname())
        self._hosts = frozenset(name.lower().strip("[]") for name in names if name)
        self._any_origin = "*" in config.allowed_origins
        self._origins = frozenset(origin.lower().rstrip("/") for origin in config.allowed_origins)

    def check(self, scope: ASGIScope) -> None:
        """Refuse a foreign Host or Origin.

        Raises:
            InvalidRequestError: no Host, several, or one that is no host name.
            PermissionDeniedError: a Host that is not ours, or an Origin that is neither ours nor allowed.
        """
        host = self._check_host(scope)
        origin = header(scope, b"origin")
        if origin is None or self._any_origin or origin.lower() in self._origins:
            return
        scheme = {"ws": "http", "wss": "https"}.get(scope["scheme"], scope["scheme"])
        if host is None or origin.lower() != f"{scheme}://{host}":
            raise PermissionDeniedError(
                "This server does not talk to pages of other web origins. Allow one with --allowed-origins."
            )

    def allows_cross_origin(self, origin: str) -> bool:
        """Whether pages of a foreign origin may read responses (CORS)."""
        return self._any_origin or origin.lower() in self._origins

    def _check_host(self, scope: ASGIScope) -> str | None:
        values = [value for name, value in scope["headers"] if name == b"host"]
        if not values and scope.get("http_version") == "1.0":
            return None  # no browser sends this, so no page can use it
        if len(values) != 1:
            raise InvalidRequestError("Send exactly one Host header.", code="invalid_host")
        host: str = values[0].decode("latin-1").lower()
        match = _HOST.fullmatch(host)
        if match is None or (match["port"] is not None and not 0 < int(match["port"]) < 65536):
            raise InvalidRequestError("The Host header is not a host name with an optional port.", code="invalid_host")
        name: str = match["v6"] or match["name"]
        if self._any_host or name in self._hosts or host in self._hosts or (self._any_address and _is_address(name)):
            return host
        raise PermissionDeniedError(
            f"This server does not answer to the name {name!r}. Allow it with --allowed-hosts.", code="host_not_allowed"
        )


def check_bind(config: ServerConfig, *, has_tenants: bool = False) -> None:
    """Raise `ConfigError` when anything but loopback would be served without keys."""
    if config.api_keys or has_tenants or config.uds is not None or is_loopback(config.host):
        return
    raise ConfigError(
        f"Refusing to listen on {config.host or 'all addresses'} without keys: anybody who can reach it could use it. "
        "Add --api-key KEY (or CHATSERVE_API_KEY), make tenants (`chatserve tenants`), or listen on 127.0.0.1."
    )


def is_loopback(host: str) -> bool:
    """Whether a bind address can be reached from this machine only."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def header(scope: ASGIScope, name: bytes) -> str | None:
    """The first value of a header (lower-case name), as latin-1 text."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value).decode("latin-1")
    return None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
