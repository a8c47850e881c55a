"""Tenants that a file or a flag declares, for machines that keep no state.

Reads ``[[tenants]]`` tables from TOML, with their keys as plain text or as SHA-256, and turns ``--api-key`` values
into keys of the default tenant. Knows no database; what is declared here cannot be changed while the server runs.
`tenancy.registry` combines it with the store.
"""

from __future__ import annotations

import datetime
import tomllib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from chatserve.errors import ConfigError, InvalidRequestError
from chatserve.tenancy.keys import ApiKey, plain_digest, plain_key_id
from chatserve.tenancy.tenant import DEFAULT_PRIORITY_CLASS, DEFAULT_TENANT, Tenant, TenantLimits

SHA256_HEX_DIGITS = 64


class Declared(msgspec.Struct, frozen=True):
    """Tenants and keys that do not change; a key's ``digest`` is its SHA-256."""

    tenants: tuple[Tenant, ...] = ()
    keys: tuple[ApiKey, ...] = ()


class _KeyTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: str | None = None
    sha256: str | None = None
    label: str = ""
    expires: datetime.datetime | None = None


class _TenantTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    display_name: str = ""
    weight: float = 1.0
    priority_class: int = DEFAULT_PRIORITY_CLASS
    limits: TenantLimits = TenantLimits()
    groups: tuple[str, ...] = ()
    disabled: bool = False
    keys: tuple[_KeyTable, ...] = ()


def declared_keys(keys: Sequence[str]) -> Declared:
    """Plain keys of the default tenant."""
    return Declared((), tuple(_key(DEFAULT_TENANT, plain_digest(key), "--api-key") for key in keys))


def read_declared(path: Path) -> Declared:
    """The ``[[tenants]]`` of a TOML file; its other tables are a configuration's and are left alone.

    Raises:
        ConfigError: the file cannot be read, or a value is wrong (the message names it).
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}.") from error
    if "tenants" not in content:
        raise ConfigError(f"{path} declares no tenants: it needs [[tenants]] tables.")
    try:
        tables = msgspec.convert(content["tenants"], tuple[_TenantTable, ...])
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: tenants: {error}.") from error
    names, digests = set[str](), set[bytes]()
    tenants: list[Tenant] = []
    keys: list[ApiKey] = []
    for table in tables:
        tenant = Tenant(**{name: getattr(table, name) for name in _TenantTable.__struct_fields__ if name != "keys"})
        try:
            tenant.validate()
        except InvalidRequestError as error:
            raise ConfigError(f"{path}: tenant {table.name!r}: {error.message}") from error
        if tenant.name in names:
            raise ConfigError(f"{path}: the tenant {tenant.name!r} is declared twice.")
        names.add(tenant.name)
        tenants.append(tenant)
        for entry in table.keys:
            key = _read_key(tenant.name, entry, path)
            if key.digest in digests:
                raise ConfigError(f"{path}: tenant {tenant.name!r}: a key is declared twice; one key opens one tenant.")
            digests.add(key.digest)
            keys.append(key)
    return Declared(tuple(tenants), tuple(keys))


def _read_key(tenant: str, entry: _KeyTable, path: Path) -> ApiKey:
    where = f"{path}: tenant {tenant!r}: keys"
    if (entry.key is None) == (entry.sha256 is None):
        raise ConfigError(f"{where}: give either key (the text) or sha256 (of it, in hexadecimal).")
    if entry.key is not None:
        if not entry.key or not entry.key.isascii() or not entry.key.isprintable() or " " in entry.key:
            raise ConfigError(f"{where}: a key must be printable ASCII without spaces, and not empty.")
        digest = plain_digest(entry.key)
    else:
        try:
            digest = bytes.fromhex(entry.sha256 or "")
        except ValueError:
            digest = b""
        if len(digest) * 2 != SHA256_HEX_DIGITS:
            raise ConfigError(f"{where}: sha256 must have {SHA256_HEX_DIGITS} hexadecimal digits.")
    expires = None
    if entry.expires is not None:
        if entry.expires.tzinfo is None:
            raise ConfigError(f"{where}: expires needs a time zone, as in 2030-01-01T00:00:00Z.")
        expires = entry.expires.timestamp()
    return _key(tenant, digest, entry.label, expires)


def _key(tenant: str, digest: bytes, label: str, expires: float | None = None) -> ApiKey:
    return ApiKey(id=plain_key_id(digest), tenant=tenant, digest=digest, label=label, expires=expires)
