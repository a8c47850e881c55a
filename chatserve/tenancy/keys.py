"""API keys: how one is made, read and recognised without being kept.

A key is ``cs_<id>_<secret>_<crc>``: the id is public and finds the record, the secret has 256 random bits, the
checksum lets secret scanners and typing errors be told from real keys. What is stored is the HMAC-SHA-256 of the
whole key under a pepper that is not in the database. Knows no tenants' rules and no storage of keys;
`tenancy.directory` recognises callers with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import secrets
import zlib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from chatserve.errors import ConfigError

PEPPER_VARIABLE = "CHATSERVE_KEY_PEPPER"
PEPPER_BYTES = 32
_KEY = re.compile(r"cs_([a-z0-9]{12})_([A-Za-z0-9_-]{43})_([0-9a-f]{8})", re.ASCII)
_ID_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one key; the key itself is not in it.

    Attributes:
        id: public; 12 lower-case letters and digits.
        digest: 32 bytes: the key's HMAC under the pepper (its SHA-256 where a file or flag declared it).
        label: for people.
        created, expires, revoked: Unix seconds; ``None`` where it never does, or was not.
    """

    id: str
    tenant: str
    digest: bytes
    label: str = ""
    created: float = 0.0
    expires: float | None = None
    revoked: float | None = None

    def usable(self, now: float) -> bool:
        """Whether the key opens anything at Unix time ``now``."""
        return self.revoked is None and (self.expires is None or now < self.expires)


class NewKey(msgspec.Struct, frozen=True):
    """A key that was just made: the only moment at which its text exists here."""

    text: str
    record: ApiKey


def new_key(pepper: bytes, tenant: str, *, label: str = "", created: float, expires: float | None = None) -> NewKey:
    """Make a key for a tenant."""
    key_id = "".join(secrets.choice(_ID_LETTERS) for _ in range(12))
    body = f"cs_{key_id}_{secrets.token_urlsafe(32)}"
    text = f"{body}_{_checksum(body)}"
    record = ApiKey(
        id=key_id, tenant=tenant, digest=keyed_digest(pepper, text), label=label, created=created, expires=expires
    )
    return NewKey(text, record)


def key_id_of(text: str) -> str | None:
    """The public id in a well-formed key with a right checksum; else ``None``."""
    match = _KEY.fullmatch(text)
    if match is None or _checksum(text.rpartition("_")[0]) != match[3]:
        return None
    return match[1]


def keyed_digest(pepper: bytes, text: str) -> bytes:
    """What is stored of a key."""
    return hmac.digest(pepper, text.encode("utf-8", "surrogatepass"), "sha256")


def plain_digest(text: str) -> bytes:
    """What is kept in memory of a key that a flag or file gives in plain text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def plain_key_id(digest: bytes) -> str:
    """A public id for a declared key: the same at every start, and no help in guessing the key."""
    return hashlib.sha256(b"chatserve key id\0" + digest).hexdigest()[:12]


def load_pepper(database: Path, environ: Mapping[str, str]) -> bytes:
    """The pepper of a database's keys: from the environment, or from a file beside it, made the first time.

    Raises:
        ConfigError: the file cannot be read or made, others may read it, or it is no pepper.
    """
    given = environ.get(PEPPER_VARIABLE)
    if given is not None:
        return _checked(given, PEPPER_VARIABLE)
    path = database.with_suffix(".pepper")
    try:
        with contextlib.suppress(FileExistsError):
            _create(path)
        if path.stat().st_mode & 0o077:
            raise ConfigError(f"{path} may be read by others: run chmod 600 on it, and replace the keys made with it.")
        return _checked(path.read_text(encoding="ascii").strip(), str(path))
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{path} cannot be used for the pepper of API keys: {error}.") from error


def _create(path: Path) -> None:
    """Publish a complete file under ``path``, or raise `FileExistsError`; another process may do the same."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(PEPPER_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(draft, path)
    finally:
        draft.unlink()


def _checked(text: str, where: str) -> bytes:
    try:
        pepper = bytes.fromhex(text)
    except ValueError:
        pepper = b""
    if len(pepper) < PEPPER_BYTES:
        raise ConfigError(f"{where} must hold at least {PEPPER_BYTES} bytes as hexadecimal digits.")
    return pepper


def _checksum(body: str) -> str:
    return f"{zlib.crc32(body.encode()):08x}"
