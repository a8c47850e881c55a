"""``/admin/*``: tenants, their keys and everybody's usage, for whoever holds the admin key.

The routes exist only on servers with an admin key, and every handler asks the wall whether the caller showed it: a
tenant's key opens nothing here. Bodies are strict, since a misspelt limit would be no limit. What is done is
`chatserve.tenancy`'s part.
"""

from __future__ import annotations

import time

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from chatserve.errors import InvalidRequestError, NotFoundError
from chatserve.server.body import decode, read_json_body
from chatserve.server.context import ServerContext
from chatserve.server.middleware import require_admin
from chatserve.server.routes.reply import json_response
from chatserve.server.routes.usage import UsageReport, days_asked, report
from chatserve.tenancy.tenant import DEFAULT_PRIORITY_CLASS, Tenant, TenantLimits

MAX_KEY_SECONDS = 100 * 365 * 86400.0


class NewTenant(msgspec.Struct, forbid_unknown_fields=True):
    """Body of ``POST /admin/tenants``."""

    name: str
    display_name: str = ""
    weight: float = 1.0
    priority_class: int = DEFAULT_PRIORITY_CLASS
    limits: TenantLimits = TenantLimits()
    groups: tuple[str, ...] = ()
    disabled: bool = False


class LimitsChange(msgspec.Struct, forbid_unknown_fields=True):
    """Limits to change; ``null`` lifts one, what is left out stays."""

    max_concurrent: int | UnsetType | None = UNSET
    requests_per_minute: int | UnsetType | None = UNSET
    tokens_per_minute: int | UnsetType | None = UNSET
    tokens_per_day: int | UnsetType | None = UNSET
    max_queued: int | UnsetType | None = UNSET
    max_connections: int | UnsetType | None = UNSET
    kv_floor: float | UnsetType = UNSET
    kv_cap: float | UnsetType = UNSET


class TenantChange(msgspec.Struct, forbid_unknown_fields=True):
    """Body of ``PATCH /admin/tenants/{name}``; what is left out stays."""

    display_name: str | UnsetType = UNSET
    weight: float | UnsetType = UNSET
    priority_class: int | UnsetType = UNSET
    limits: LimitsChange | UnsetType = UNSET
    groups: tuple[str, ...] | UnsetType = UNSET
    disabled: bool | UnsetType = UNSET


class NewKeyRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of ``POST /admin/keys``; ``expires_in`` in seconds, never if left out."""

    tenant: str
    label: str = ""
    expires_in: float | None = None


class TenantList(msgspec.Struct):
    """All tenants."""

    data: list[Tenant]
    object: str = "list"


class KeyInfo(msgspec.Struct):
    """A key as its record shows it; ``key`` only in the answer that made it."""

    id: str
    tenant: str
    label: str
    created: float
    expires: float | None
    revoked: float | None
    key: str | UnsetType = UNSET


class KeyList(msgspec.Struct):
    """Records of keys."""

    data: list[KeyInfo]
    object: str = "list"


class Admin:
    """Endpoints for the operator."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._tenants = context.tenants

    async def list_tenants(self, request: Request) -> Response:
        """All tenants that were not deleted."""
        require_admin(request.scope)
        return json_response(TenantList(self._tenants.tenants()))

    async def create_tenant(self, request: Request) -> Response:
        """Add a tenant; 409 where the name is or was in use."""
        require_admin(request.scope)
        body = decode(await read_json_body(request, self._context.config.server), NewTenant)
        tenant = Tenant(**msgspec.structs.asdict(body), created=time.time())
        return json_response(await self._tenants.create_tenant(tenant), 201)

    async def tenant(self, request: Request) -> Response:
        """One tenant."""
        require_admin(request.scope)
        return json_response(self._find(request.path_params["name"]))

    async def update_tenant(self, request: Request) -> Response:
        """Change a tenant; running streams keep the terms under which they began."""
        require_admin(request.scope)
        body = decode(await read_json_body(request, self._context.config.server), TenantChange)
        tenant = self._find(request.path_params["name"])
        changes = _given(body)
        if not isinstance(body.limits, UnsetType):
            changes["limits"] = msgspec.structs.replace(tenant.limits, **_given(body.limits))
        return json_response(await self._tenants.update_tenant(tenant.name, changes))

    async def delete_tenant(self, request: Request) -> Response:
        """Retire a tenant for ever and end what its keys are running."""
        require_admin(request.scope)
        await self._tenants.delete_tenant(self._find(request.path_params["name"]).name)
        return Response(status_code=204)

    async def list_keys(self, request: Request) -> Response:
        """Keys by their public ids; ``?tenant=`` selects."""
        require_admin(request.scope)
        keys = self._tenants.keys(request.query_params.get("tenant"))
        shown = [KeyInfo(k.id, k.tenant, k.label, k.created, k.expires, k.revoked) for k in keys]
        return json_response(KeyList(shown))

    async def create_key(self, request: Request) -> Response:
        """Make a key; its text is in this answer and nowhere else."""
        require_admin(request.scope)
        body = decode(await read_json_body(request, self._context.config.server), NewKeyRequest)
        if len(body.label) > 200:
            raise InvalidRequestError("label must have at most 200 characters.", param="label")
        expires = None
        if body.expires_in is not None:
            if not 0 < body.expires_in <= MAX_KEY_SECONDS:
                raise InvalidRequestError("expires_in must be a positive number of seconds.", param="expires_in")
            expires = time.time() + body.expires_in
        made = await self._tenants.new_key(self._find(body.tenant).name, label=body.label, expires=expires)
        record = made.record
        info = KeyInfo(record.id, record.tenant, record.label, record.created, record.expires, None, made.text)
        response = json_response(info, 201)
        response.headers["cache-control"] = "no-store"
        return response

    async def revoke_key(self, request: Request) -> Response:
        """Revoke a key; streams that it opened end with the code ``key_revoked``."""
        require_admin(request.scope)
        await self._tenants.revoke_key(request.path_params["key_id"])
        return Response(status_code=204)

    async def usage(self, request: Request) -> Response:
        """What tenants used, by day; ``?tenant=``, ``?from=`` and ``?to=`` select."""
        require_admin(request.scope)
        first, last = days_asked(request)
        tenant = request.query_params.get("tenant")
        rows = await self._tenants.ledger.usage(tenant=tenant, first_day=first, last_day=last)
        return json_response(UsageReport(*report(rows)))

    def _find(self, name: str) -> Tenant:
        found = next((tenant for tenant in self._tenants.tenants() if tenant.name == name), None)
        if found is None:
            raise NotFoundError(f"There is no tenant {name[:80]!r}. GET /admin/tenants lists them.", param="tenant")
        return found


def _given(change: msgspec.Struct) -> dict[str, object]:
    """The fields that a body names, limits aside."""
    fields = msgspec.structs.asdict(change)
    return {name: value for name, value in fields.items() if value is not UNSET and name != "limits"}
