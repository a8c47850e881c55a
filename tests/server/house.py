"""A server with tenants, over a scripted engine."""

from __future__ import annotations

import json

from chatserve.tenancy.registry import TenantRegistry
from chatserve.tenancy.tenant import TenantLimits
from chatserve.tenancy.usage import Usage
from tests.server.live import HI, LiveServer, Reply

ADMIN = "admin-key"


class House:
    """A server with the tenants acme and beta, a key of each, and an admin key."""

    def __init__(self, live: LiveServer, registry: TenantRegistry, keys: dict[str, str]) -> None:
        self.live = live
        self.registry = registry
        self.keys = keys

    async def limit(self, tenant: str, **limits: object) -> None:
        await self.registry.update_tenant(tenant, {"limits": TenantLimits(**limits)})  # type: ignore[arg-type]

    async def chat(self, tenant: str, /, **fields: object) -> Reply:
        body = {"model": "tiny", "messages": HI, "max_tokens": 8, **fields}
        return await self.live.post("/v1/chat/completions", body, Authorization=f"Bearer {self.keys[tenant]}")

    async def admin(self, method: str, path: str, body: object = None) -> Reply:
        content = b"" if body is None else json.dumps(body).encode()
        return await self.live.request(method, path, content, {"Authorization": f"Bearer {ADMIN}"})

    def usage(self, tenant: str) -> Usage:
        return self.registry.ledger.totals().get(tenant, Usage())
