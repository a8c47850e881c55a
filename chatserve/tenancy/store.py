"""Tenants, keys and usage in SQLite: the tables, and every statement there is.

Methods take and return plain data, block, and may be called from any thread; each is one transaction. Knows no
peppers and no clocks (times are arguments). `tenancy.registry` uses it in a server, the command line alone; both may
have the same file open, and `revision` tells one of the other's changes.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from pathlib import Path

import msgspec

from chatserve.errors import ConflictError, NotFoundError
from chatserve.tenancy.database import Database
from chatserve.tenancy.keys import ApiKey
from chatserve.tenancy.tenant import Tenant, TenantLimits
from chatserve.tenancy.usage import FIELDS, Usage, UsageRow

_USAGE_COLUMNS = ",\n".join(
    f"    {field} {'INTEGER' if isinstance(getattr(Usage(), field), int) else 'REAL'} NOT NULL DEFAULT 0"
    for field in FIELDS
)

MIGRATIONS = (
    f"""
CREATE TABLE tenants (
    name TEXT PRIMARY KEY,
    display_name TEXT NOT NULL,
    weight REAL NOT NULL,
    priority_class INTEGER NOT NULL,
    limits TEXT NOT NULL,
    groups TEXT NOT NULL,
    created REAL NOT NULL,
    disabled INTEGER NOT NULL,
    deleted REAL
) STRICT;
CREATE TABLE keys (
    id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL REFERENCES tenants (name),
    digest BLOB NOT NULL,
    label TEXT NOT NULL,
    created REAL NOT NULL,
    expires REAL,
    revoked REAL
) STRICT;
CREATE INDEX keys_by_tenant ON keys (tenant);
CREATE TABLE usage (
    tenant TEXT NOT NULL,
    day TEXT NOT NULL,
{_USAGE_COLUMNS},
    PRIMARY KEY (tenant, day)
) STRICT;
CREATE TABLE revision (number INTEGER NOT NULL) STRICT;
INSERT INTO revision VALUES (0);
CREATE TRIGGER tenants_inserted AFTER INSERT ON tenants BEGIN UPDATE revision SET number = number + 1; END;
CREATE TRIGGER tenants_updated AFTER UPDATE ON tenants BEGIN UPDATE revision SET number = number + 1; END;
CREATE TRIGGER keys_inserted AFTER INSERT ON keys BEGIN UPDATE revision SET number = number + 1; END;
CREATE TRIGGER keys_updated AFTER UPDATE ON keys BEGIN UPDATE revision SET number = number + 1; END;
""",
)
"""Columns are named as the fields of `Tenant`, `ApiKey` and `Usage`: a new field there needs a migration here."""

_TENANT_FIELDS = Tenant.__struct_fields__
_TENANT_COLUMNS = ", ".join(_TENANT_FIELDS)
_KEY_FIELDS = ApiKey.__struct_fields__
_KEY_COLUMNS = ", ".join(_KEY_FIELDS)


class Snapshot(msgspec.Struct, frozen=True):
    """All tenants (deleted ones too) and all keys, as they were at one ``revision``."""

    revision: int
    tenants: tuple[Tenant, ...]
    keys: tuple[ApiKey, ...]


class TenantStore:
    """One database of tenants.

    Args:
        path: the file; ``None`` keeps everything in memory, for servers without state.
    """

    def __init__(self, path: Path | None) -> None:
        self._database = Database(path, MIGRATIONS)

    @property
    def path(self) -> Path | None:
        """The file, if there is one."""
        return self._database.path

    def close(self) -> None:
        """Finish what was asked for and close the file. Idempotent."""
        self._database.close()

    # -- tenants and keys ---------------------------------------------------------------------------------------

    def revision(self) -> int:
        """A number that rises whenever a tenant or a key changes, whoever changes it."""
        return self._database.call(_revision)

    def snapshot(self) -> Snapshot:
        """Everything about tenants and keys, read at one moment."""

        def read(connection: sqlite3.Connection) -> Snapshot:
            tenants = connection.execute(f"SELECT {_TENANT_COLUMNS} FROM tenants ORDER BY name").fetchall()
            keys = connection.execute(f"SELECT {_KEY_COLUMNS} FROM keys ORDER BY created, id").fetchall()
            return Snapshot(_revision(connection), tuple(map(_tenant, tenants)), tuple(map(_key, keys)))

        return self._database.call(read)

    def create_tenant(self, tenant: Tenant) -> None:
        """Add a tenant.

        Raises:
            InvalidRequestError: a value out of range.
            ConflictError: the name is, or was, somebody's.
        """
        tenant.validate()

        def insert(connection: sqlite3.Connection) -> None:
            known = connection.execute("SELECT deleted FROM tenants WHERE name = ?", (tenant.name,)).fetchone()
            if known is not None:
                state = "exists already" if known[0] is None else "was deleted; names are not used again"
                raise ConflictError(f"The tenant {tenant.name!r} {state}.", code="tenant_exists", param="name")
            connection.execute(f"INSERT INTO tenants ({_TENANT_COLUMNS}) VALUES (?,?,?,?,?,?,?,?,?)", _row(tenant))

        self._database.call(insert)

    def update_tenant(self, name: str, **changes: object) -> Tenant:
        """Replace fields of `Tenant` (never its name); the tenant as it is now.

        Raises:
            InvalidRequestError: a value out of range.
            NotFoundError: no such tenant, or it was deleted.
        """

        def update(connection: sqlite3.Connection) -> Tenant:
            changed = msgspec.structs.replace(_find(connection, name), **changes)
            changed.validate()
            connection.execute(
                "UPDATE tenants SET display_name = ?, weight = ?, priority_class = ?, limits = ?, groups = ?, "
                "created = ?, disabled = ?, deleted = ? WHERE name = ?",
                (*_row(changed)[1:], name),
            )
            return changed

        return self._database.call(update)

    def delete_tenant(self, name: str, now: float) -> None:
        """Retire a tenant and revoke its keys; raises `NotFoundError`. Its usage and its name stay on record."""

        def delete(connection: sqlite3.Connection) -> None:
            _find(connection, name)
            connection.execute("UPDATE tenants SET deleted = ? WHERE name = ?", (now, name))
            connection.execute("UPDATE keys SET revoked = ? WHERE tenant = ? AND revoked IS NULL", (now, name))

        self._database.call(delete)

    def add_key(self, key: ApiKey) -> None:
        """Keep a key's record; raises `NotFoundError` where its tenant does not exist."""

        def insert(connection: sqlite3.Connection) -> None:
            _find(connection, key.tenant)
            values = tuple(getattr(key, field) for field in _KEY_FIELDS)
            connection.execute(f"INSERT INTO keys ({_KEY_COLUMNS}) VALUES (?,?,?,?,?,?,?)", values)

        self._database.call(insert)

    def revoke_key(self, key_id: str, now: float) -> ApiKey:
        """Revoke a key for ever; raises `NotFoundError`. One that was revoked before keeps its time."""

        def revoke(connection: sqlite3.Connection) -> ApiKey:
            connection.execute("UPDATE keys SET revoked = ? WHERE id = ? AND revoked IS NULL", (now, key_id))
            row = connection.execute(f"SELECT {_KEY_COLUMNS} FROM keys WHERE id = ?", (key_id,)).fetchone()
            if row is None:
                raise NotFoundError("There is no key with this id. `chatserve tenants key list` shows them.")
            return _key(row)

        return self._database.call(revoke)

    # -- usage --------------------------------------------------------------------------------------------------

    def add_usage(self, rows: Iterable[UsageRow]) -> None:
        """Add to the sums of tenants and days, all or none."""
        columns = ", ".join(FIELDS)
        marks = ", ".join("?" * len(FIELDS))
        sums = ", ".join(f"{field} = {field} + excluded.{field}" for field in FIELDS)
        values = [(row.tenant, row.day, *(getattr(row.usage, field) for field in FIELDS)) for row in rows]

        def upsert(connection: sqlite3.Connection) -> None:
            connection.executemany(
                f"INSERT INTO usage (tenant, day, {columns}) VALUES (?, ?, {marks}) "
                f"ON CONFLICT (tenant, day) DO UPDATE SET {sums}",
                values,
            )

        self._database.call(upsert)

    def usage(self, *, tenant: str | None = None, first_day: str = "", last_day: str = "9999") -> list[UsageRow]:
        """Sums of one tenant or of all, by day and then by tenant; days inclusive, ``YYYY-MM-DD``."""
        columns = ", ".join(FIELDS)

        def read(connection: sqlite3.Connection) -> list[UsageRow]:
            rows = connection.execute(
                f"SELECT tenant, day, {columns} FROM usage "
                "WHERE (?1 IS NULL OR tenant = ?1) AND day >= ?2 AND day <= ?3 ORDER BY day, tenant",
                (tenant, first_day, last_day),
            )
            return [UsageRow(name, day, Usage(*sums)) for name, day, *sums in rows]

        return self._database.call(read)


def _revision(connection: sqlite3.Connection) -> int:
    (number,) = connection.execute("SELECT number FROM revision").fetchone()
    return int(number)


def _find(connection: sqlite3.Connection, name: str) -> Tenant:
    row = connection.execute(
        f"SELECT {_TENANT_COLUMNS} FROM tenants WHERE name = ? AND deleted IS NULL", (name,)
    ).fetchone()
    if row is None:
        raise NotFoundError(f"There is no tenant {name[:80]!r}. `chatserve tenants list` shows them.", param="tenant")
    return _tenant(row)


def _row(tenant: Tenant) -> tuple[object, ...]:
    return (
        tenant.name,
        tenant.display_name,
        tenant.weight,
        tenant.priority_class,
        msgspec.json.encode(tenant.limits).decode(),
        msgspec.json.encode(tenant.groups).decode(),
        tenant.created,
        int(tenant.disabled),
        tenant.deleted,
    )


def _tenant(row: tuple[object, ...]) -> Tenant:
    fields = dict(zip(_TENANT_FIELDS, row, strict=True))
    fields["limits"] = msgspec.json.decode(str(fields["limits"]), type=TenantLimits)
    fields["groups"] = msgspec.json.decode(str(fields["groups"]), type=tuple[str, ...])
    fields["disabled"] = bool(fields["disabled"])
    return msgspec.convert(fields, Tenant)


def _key(row: tuple[object, ...]) -> ApiKey:
    return msgspec.convert(dict(zip(_KEY_FIELDS, row, strict=True)), ApiKey)
