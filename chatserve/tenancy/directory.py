"""Who a key belongs to, answered from memory.

Holds one snapshot of the store and what was declared; answers in constant time without touching the database, and
says which keys stopped opening anything when a newer snapshot (or the clock) takes them away. Pure: times are
arguments. Knows no limits and no usage; `tenancy.registry` feeds it.
"""

from __future__ import annotations

import hmac

from chatserve.errors import AuthenticationError
from chatserve.tenancy.declared import Declared
from chatserve.tenancy.keys import ApiKey, key_id_of, keyed_digest, plain_digest
from chatserve.tenancy.store import Snapshot
from chatserve.tenancy.tenant import DEFAULT_TENANT, Tenant


class Directory:
    """Tenants and keys as they are known now.

    Attributes:
        revision: of the snapshot it has.
    """

    def __init__(self, pepper: bytes, declared: Declared) -> None:
        self.revision = -1
        self._pepper = pepper
        self._declared = declared
        self._tenants: dict[str, Tenant] = {}
        self._stored: dict[str, ApiKey] = {}
        self._by_digest = {key.digest: key for key in declared.keys}
        self._declared_by_id = {key.id: key for key in declared.keys}
        self._usable: frozenset[str | None] = frozenset()
        self._next_expiry = float("inf")

    @property
    def keys_required(self) -> bool:
        """Whether callers need a key: there are keys, or tenants beside the default one, even if none is active."""
        return bool(self._by_digest or self._stored or self._tenants.keys() - {DEFAULT_TENANT})

    def load(self, snapshot: Snapshot, now: float) -> frozenset[str | None]:
        """Take a newer snapshot; ids of keys that opened something before and do not any more.

        ``None`` is among them when callers without a key were welcome before and are not any more.
        """
        self.revision = snapshot.revision
        self._tenants = {tenant.name: tenant for tenant in (*snapshot.tenants, *self._declared.tenants)}
        self._stored = {key.id: key for key in snapshot.keys}
        return self._recount(now)

    def expire(self, now: float) -> frozenset[str | None]:
        """Ids of keys whose time has run out since the last call. Costs nothing while there are none."""
        return self._recount(now) if now >= self._next_expiry else frozenset()

    def is_declared(self, tenant: str) -> bool:
        """Whether a file declares the tenant, so that it cannot be changed here."""
        return any(tenant == declared.name for declared in self._declared.tenants)

    def tenants(self) -> list[Tenant]:
        """All that were not deleted, by name."""
        return sorted((t for t in self._tenants.values() if t.deleted is None), key=lambda tenant: tenant.name)

    def keys(self, tenant: str | None = None) -> list[ApiKey]:
        """Records of all keys, or of one tenant's, oldest first; declared ones first of all."""
        keys = (*self._declared.keys, *self._stored.values())
        return [key for key in keys if tenant is None or key.tenant == tenant]

    def tenant(self, name: str) -> Tenant | None:
        """A tenant as it is now; the default one always exists."""
        return self._tenants.get(name) or (Tenant(name=DEFAULT_TENANT) if name == DEFAULT_TENANT else None)

    def recognise(self, text: str, now: float) -> ApiKey:
        """The record of a key. Its time does not depend on how much of a guess is right.

        Raises:
            AuthenticationError: unknown, revoked or expired, or its tenant is not active.
        """
        key_id = key_id_of(text)
        key = self._stored.get(key_id) if key_id is not None else None
        if key is None or not hmac.compare_digest(keyed_digest(self._pepper, text), key.digest):
            key = self._by_digest.get(plain_digest(text))
        if key is None:
            raise AuthenticationError(
                "This key is not known here. Check that it is complete and meant for this server."
            )
        return self._checked(key, now)

    def key(self, key_id: str, now: float) -> ApiKey:
        """The record of a key that was recognised before, if it still opens anything; else `AuthenticationError`."""
        key = self._stored.get(key_id) or self._declared_by_id.get(key_id)
        if key is None:
            raise key_revoked()
        return self._checked(key, now)

    def _checked(self, key: ApiKey, now: float) -> ApiKey:
        if key.revoked is not None:
            raise key_revoked()
        if not key.usable(now):
            raise AuthenticationError("This key has expired. Ask the operator for a new one.", code="key_expired")
        if not self._is_active(key.tenant):
            raise AuthenticationError("The tenant of this key is disabled. Ask the operator.", code="tenant_disabled")
        return key

    def _is_active(self, name: str) -> bool:
        tenant = self.tenant(name)
        return tenant is not None and tenant.active

    def _recount(self, now: float) -> frozenset[str | None]:
        before = self._usable
        usable = [key for key in self.keys() if key.usable(now) and self._is_active(key.tenant)]
        self._usable = frozenset([*(key.id for key in usable), *([] if self.keys_required else [None])])
        self._next_expiry = min((key.expires for key in usable if key.expires is not None), default=float("inf"))
        return before - self._usable


def key_revoked() -> AuthenticationError:
    """What is told to whoever came in with a key that is no longer good, also in the middle of an answer."""
    return AuthenticationError("This key was revoked. Ask the operator for a new one.", code="key_revoked")
