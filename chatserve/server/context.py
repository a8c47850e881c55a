"""What every request handler shares: one object, built once, passed as an argument.

Knows the parts (configuration, engine, generation service, authentication, metrics, life cycle) and how a
caller becomes a cache scope. Does not know HTTP or WebSocket. `chatserve.server.run` builds it; the route
modules and `chatserve.server.websocket` receive it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chatserve.config import Config
from chatserve.scope import Scope

if TYPE_CHECKING:
    from chatserve.engine.client import EngineClient
    from chatserve.server.auth import Authenticator, Principal
    from chatserve.server.generation_service import GenerationService
    from chatserve.server.metrics import ServerMetrics
    from chatserve.server.origin import OriginPolicy
    from chatserve.server.prefixes import PrefixRegistry
    from chatserve.server.sampling_defaults import SamplingDefaults
    from chatserve.server.tenant_sync import TenantSync
    from chatserve.tenancy.registry import TenantRegistry


class Lifecycle:
    """Serving, then draining, never back.

    Attributes:
        draining: new work is refused from now on; running streams go on.
        drain_started: set at the same moment, for those who wait for it.
    """

    def __init__(self) -> None:
        self.draining = False
        self.drain_started = asyncio.Event()

    def start_draining(self) -> None:
        """Refuse new work. Idempotent; call it on the event loop."""
        self.draining = True
        self.drain_started.set()


@dataclass(frozen=True)
class ServerContext:
    """The parts of one running server.

    Attributes:
        config: the whole program's configuration; ``config.server`` is the edge's.
        origins: Host and Origin rules; the middleware has applied them to every HTTP and WebSocket scope
            before a handler runs.
        created: Unix time of the start, reported as the model's ``created``.
    """

    config: Config
    engine: EngineClient
    service: GenerationService
    prefixes: PrefixRegistry
    sampling_defaults: SamplingDefaults
    tenants: TenantRegistry
    tenant_sync: TenantSync
    origins: OriginPolicy
    auth: Authenticator
    metrics: ServerMetrics
    lifecycle: Lifecycle
    created: int

    @property
    def model_name(self) -> str:
        """The name clients use for the one model that is served."""
        return self.config.engine.model.name

    def scopes_for(self, principal: Principal, salt: str = "") -> tuple[Scope, ...]:
        """Cache scopes a caller may see: public, its groups', and last its own, where it publishes.

        The owner is the authenticated tenant; ``salt`` comes from the client and can only narrow.

        Raises:
            EngineUnavailableError: no engine has told yet which weights it runs.
            AuthenticationError: the tenant is gone.
        """
        scope, groups = self.service.scope, self.tenants.tenant(principal.tenant).groups
        return (scope("public"), *(scope("group", group) for group in groups), scope("tenant", principal.tenant, salt))
