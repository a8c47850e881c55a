"""The tenants of one running server: who is calling, what may be admitted, what was used.

Joins the store, the directory of keys, one limit account per tenant and the ledger, and keeps them current: changes
that another process makes in the store are seen within a second, and whoever asked is told which keys are gone. Knows
no HTTP and no engine. Lives on the event loop; only the store's statements run in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from chatserve.config import Config
from chatserve.errors import AuthenticationError, ChatserveError, ConflictError, QueueFullError, RateLimitError
from chatserve.tenancy.declared import Declared, declared_keys, read_declared
from chatserve.tenancy.directory import Directory
from chatserve.tenancy.keys import PEPPER_BYTES, ApiKey, NewKey, load_pepper, new_key
from chatserve.tenancy.ledger import Ledger
from chatserve.tenancy.limits import Account, LimitStatus, Refusal
from chatserve.tenancy.store import TenantStore
from chatserve.tenancy.tenant import Tenant
from chatserve.tenancy.usage import Usage, day_of

REFRESH_SECONDS = 0.5
FLUSH_TICKS = 2
"""Refreshes between two writes of usage."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Admission:
    """One admitted request's claim on its tenant's limits; it must be settled."""

    __slots__ = ("_cost", "_registry", "_settled", "_started", "_tenant")

    def __init__(self, registry: TenantRegistry, tenant: str, cost: int) -> None:
        self._registry = registry
        self._tenant = tenant
        self._cost = cost
        self._started = False
        self._settled = False

    def start(self) -> None:
        """The request has left the queue. Idempotent."""
        if not self._started and not self._settled:
            self._started = True
            self._registry.account(self._tenant).start()

    def settle(self, used: int) -> None:
        """The request is over and used this many tokens, prompt and output. Idempotent."""
        if not self._settled:
            self._settled = True
            self._registry.settle(self._tenant, self._cost, used, started=self._started)


class TenantRegistry:
    """Everything about tenants in one server.

    Attributes:
        ledger: where use is booked.

    Args:
        store: closed by `close`.
        clock, monotonic: Unix time and seconds of a steady clock; tests pass their own.
    """

    def __init__(
        self,
        store: TenantStore,
        *,
        pepper: bytes,
        declared: Declared,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ledger = Ledger(store, clock)
        self._store = store
        self._pepper = pepper
        self._clock = clock
        self._monotonic = monotonic
        self._directory = Directory(pepper, declared)
        self._directory.load(store.snapshot(), clock())
        today = day_of(clock())
        self._used_before = {row.tenant: row for row in store.usage(first_day=today, last_day=today)}
        self._accounts: dict[str, Account] = {}
        self._listeners: list[Callable[[frozenset[str | None]], None]] = []
        self._change_listeners: list[Callable[[], None]] = []
        self._refreshing = asyncio.Lock()
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # -- identity -----------------------------------------------------------------------------------------------

    @property
    def keys_required(self) -> bool:
        """Whether callers need a key."""
        return self._directory.keys_required

    def recognise(self, text: str) -> ApiKey:
        """The record of a key; raises `AuthenticationError`."""
        return self._directory.recognise(text, self._clock())

    def key(self, key_id: str) -> ApiKey:
        """The record of a key recognised before, if it still is good; else `AuthenticationError`."""
        return self._directory.key(key_id, self._clock())

    def tenant(self, name: str) -> Tenant:
        """A tenant as it is now; raises `AuthenticationError` if it is gone or disabled."""
        tenant = self._directory.tenant(name)
        if tenant is None or not tenant.active:
            raise AuthenticationError("This tenant is disabled. Ask the operator.", code="tenant_disabled")
        return tenant

    def tenants(self) -> list[Tenant]:
        """All that were not deleted, by name."""
        return self._directory.tenants()

    def keys(self, tenant: str | None = None) -> list[ApiKey]:
        """Records of all keys, or of one tenant's."""
        return self._directory.keys(tenant)

    def on_revoked(self, listener: Callable[[frozenset[str | None]], None]) -> None:
        """Call ``listener(key_ids)`` on the loop when keys stop opening anything. It must not block or raise.

        ``None`` stands for callers without a key, who are refused from the first tenant on.
        """
        self._listeners.append(listener)

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call ``listener()`` on the loop when tenants or keys have changed. It must not block or raise."""
        self._change_listeners.append(listener)

    # -- limits -------------------------------------------------------------------------------------------------

    def check(self, tenant: str) -> None:
        """Refuse early what certainly will not be admitted, before anything is spent on it; see `admit`."""
        limits = self.tenant(tenant).limits
        refusal = self.account(tenant).decide(limits, (1,), self._monotonic(), self._today())
        if refusal is not None:
            raise self._refused(tenant, refusal)

    def count_request(self, tenant: str) -> None:
        """Count a request that generates nothing against the limit per minute.

        Raises:
            RateLimitError: over it; nothing is counted.
            AuthenticationError: the tenant is gone.
        """
        limits = self.tenant(tenant).limits
        refusal = self.account(tenant).count_request(limits, self._monotonic())
        if refusal is not None:
            raise self._refused(tenant, refusal)

    def admit(self, tenant: str, costs: Sequence[int]) -> list[Admission]:
        """Reserve for requests that may use ``costs`` tokens each: all of them or none.

        Raises:
            RateLimitError, QueueFullError: over a limit; nothing is reserved.
            AuthenticationError: the tenant is gone.
        """
        limits = self.tenant(tenant).limits
        refusal = self.account(tenant).admit(limits, costs, self._monotonic(), self._today())
        if refusal is not None:
            raise self._refused(tenant, refusal)
        return [Admission(self, tenant, cost) for cost in costs]

    def has_queue_share(self, tenant: str, count: int, places: int) -> bool:
        """Whether ``count`` more waiting requests of a tenant stay within an equal part of so many places.

        The part is that of all tenants that are waiting for something, this one included.
        """
        waiting = {name for name, account in self._accounts.items() if account.num_waiting} | {tenant}
        return self.account(tenant).num_waiting + count <= places // len(waiting)

    def status(self, tenant: str) -> LimitStatus:
        """What is left of the limits per minute."""
        known = self._directory.tenant(tenant)
        if known is None:
            return LimitStatus(None, None)
        return self.account(tenant).status(known.limits, self._monotonic())

    def account(self, tenant: str) -> Account:
        """The account behind a tenant's limits."""
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = Account()
            row = self._used_before.get(tenant)
            if row is not None:
                account.set_day_tokens(row.day, row.usage.billed_tokens)
        return account

    def settle(self, tenant: str, cost: int, used: int, *, started: bool) -> None:
        """Only `Admission` calls this."""
        known = self._directory.tenant(tenant) or Tenant(name=tenant)
        self.account(tenant).settle(known.limits, cost, used, self._monotonic(), self._today(), started=started)

    def _refused(self, tenant: str, refusal: Refusal) -> ChatserveError:
        self.ledger.book(tenant, Usage(requests_rejected=1))
        kind = QueueFullError if refusal.code == "queue_full" else RateLimitError
        return kind(refusal.message, code=refusal.code, retry_after=refusal.retry_after)

    def _today(self) -> str:
        return day_of(self._clock())

    # -- administration -----------------------------------------------------------------------------------------

    async def create_tenant(self, tenant: Tenant) -> Tenant:
        """Add a tenant, created now; see `TenantStore.create_tenant`."""
        self._refuse_declared(tenant.name)
        await self._change(lambda: self._store.create_tenant(tenant))
        return tenant

    async def update_tenant(self, name: str, changes: Mapping[str, object]) -> Tenant:
        """Change a tenant; see `TenantStore.update_tenant`."""
        self._refuse_declared(name)
        return await self._change(lambda: self._store.update_tenant(name, **changes))

    async def delete_tenant(self, name: str) -> None:
        """Retire a tenant and end what its keys are running; see `TenantStore.delete_tenant`."""
        self._refuse_declared(name)
        await self._change(lambda: self._store.delete_tenant(name, self._clock()))

    async def new_key(self, tenant: str, *, label: str = "", expires: float | None = None) -> NewKey:
        """Make a key for a tenant of the store; raises `NotFoundError`."""
        self._refuse_declared(tenant)
        made = new_key(self._pepper, tenant, label=label, created=self._clock(), expires=expires)
        await self._change(lambda: self._store.add_key(made.record))
        return made

    async def revoke_key(self, key_id: str) -> ApiKey:
        """Revoke a key and end what it is running; raises `NotFoundError`."""
        return await self._change(lambda: self._store.revoke_key(key_id, self._clock()))

    async def _change(self, change: Callable[[], T]) -> T:
        result = await asyncio.to_thread(change)
        await self.refresh()
        return result

    def _refuse_declared(self, tenant: str) -> None:
        if self._directory.is_declared(tenant):
            raise ConflictError(
                f"The tenant {tenant!r} is declared in the server's tenants file: change it there and restart.",
                code="tenant_declared",
            )

    # -- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to follow the store."""
        self._task = asyncio.create_task(self._follow(), name="tenants")

    async def close(self) -> None:
        """Write what is booked and close the store. Idempotent."""
        self._stop.set()
        if self._task is not None:
            await self._task
        try:
            await self.ledger.flush()
        except (sqlite3.Error, OSError):
            logger.exception("the tenants' database cannot be written: the last second's usage is lost")
        finally:
            await asyncio.to_thread(self._store.close)

    async def refresh(self) -> None:
        """See the store's changes now."""
        async with self._refreshing:
            if await asyncio.to_thread(self._store.revision) != self._directory.revision:
                snapshot = await asyncio.to_thread(self._store.snapshot)
                self._tell(self._directory.load(snapshot, self._clock()))
                for listener in self._change_listeners:
                    listener()

    async def _follow(self) -> None:
        ticks = 0
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), REFRESH_SECONDS)
            ticks += 1
            try:
                self._tell(self._directory.expire(self._clock()))
                if self._store.path is not None:  # nobody else can change what is in memory
                    await self.refresh()
                if ticks % FLUSH_TICKS == 0:
                    await self.ledger.flush()
            except (sqlite3.Error, OSError):
                logger.exception("the tenants' database cannot be used; what is known of it stays in force")

    def _tell(self, revoked: frozenset[str | None]) -> None:
        if revoked:
            for listener in self._listeners:
                listener(revoked)


def data_home(environ: Mapping[str, str]) -> Path:
    """Where chatserve keeps its state: ``$CHATSERVE_HOME``, else the user's data folder (XDG)."""
    if home := environ.get("CHATSERVE_HOME"):
        return Path(home)
    if data := environ.get("XDG_DATA_HOME"):
        return Path(data) / "chatserve"
    return Path.home() / ".local" / "share" / "chatserve"


def default_database(environ: Mapping[str, str]) -> Path:
    """The database that the command line manages and a server uses unless they are told another."""
    return data_home(environ) / "tenants.sqlite"


def open_tenants(config: Config, environ: Mapping[str, str]) -> TenantRegistry:
    """The tenants that a configuration names; the database in the data folder counts where it exists.

    Raises `ConfigError` where one cannot be used.
    """
    settings, default = config.tenancy, default_database(environ)
    database = default if default.exists() else None
    if settings.database is not None:
        database = Path(settings.database).expanduser()
    file = None if settings.file is None else Path(settings.file).expanduser()
    return open_registry(database=database, file=file, api_keys=config.server.api_keys, environ=environ)


def open_registry(
    *,
    database: Path | None = None,
    file: Path | None = None,
    api_keys: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
) -> TenantRegistry:
    """The tenants of a server.

    Args:
        database: the SQLite file, made if it does not exist; ``None`` keeps no state.
        file: TOML that declares tenants.
        api_keys: plain keys of the default tenant.

    Raises:
        ConfigError: a file cannot be used.
    """
    flags = declared_keys(api_keys)
    declared = read_declared(file) if file is not None else Declared()
    store = TenantStore(database)
    try:
        pepper = secrets.token_bytes(PEPPER_BYTES) if database is None else load_pepper(database, environ)
        return TenantRegistry(store, pepper=pepper, declared=Declared(declared.tenants, (*flags.keys, *declared.keys)))
    except BaseException:
        store.close()
        raise
