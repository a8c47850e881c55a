"""Tenants in a TOML file: read as written, refused with the place of the mistake."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from chatserve.cli.settings import presets_folder
from chatserve.errors import ConfigError
from chatserve.tenancy.declared import declared_keys, read_declared
from chatserve.tenancy.keys import plain_digest
from chatserve.tenancy.tenant import TenantLimits

HASHED = hashlib.sha256(b"hashed-text").hexdigest()
GOOD = f"""
[server]
port = 1
[[tenants]]
name = "acme"
weight = 2
groups = ["staff"]
[tenants.limits]
tokens_per_minute = 1_000
[[tenants.keys]]
key = "plain-text"
expires = 2030-01-01T00:00:00Z
[[tenants.keys]]
sha256 = "{HASHED}"
label = "hashed"
[[tenants]]
name = "other"
"""


def test_read_as_written(tmp_path: Path) -> None:
    """Settings, limits and both kinds of keys; other tables of the file are not its business."""
    file = tmp_path / "t.toml"
    file.write_text(GOOD)
    declared = read_declared(file)
    acme, other = declared.tenants
    assert (acme.name, acme.weight, acme.groups) == ("acme", 2.0, ("staff",))
    assert acme.limits == TenantLimits(tokens_per_minute=1000)
    assert other.name == "other"
    plain, hashed = declared.keys
    assert (plain.tenant, plain.digest, plain.expires) == ("acme", plain_digest("plain-text"), 1893456000.0)
    assert (hashed.tenant, hashed.digest, hashed.label) == ("acme", plain_digest("hashed-text"), "hashed")
    assert plain.id != hashed.id


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[[tenants]\n", "TOML"),
        ("[server]\n", "no tenants"),
        ("[[tenants]]\nweight = 1\n", "name"),
        ('[[tenants]]\nname = "A"\n', "'A'"),
        ('[[tenants]]\nname = "a"\nwieght = 1\n', "wieght"),
        ('[[tenants]]\nname = "a"\n[tenants.limits]\nrpm = 1\n', "rpm"),
        ('[[tenants]]\nname = "a"\n[tenants.limits]\nmax_queued = 0\n', "max_queued"),
        ('[[tenants]]\nname = "a"\n[[tenants]]\nname = "a"\n', "twice"),
        ('[[tenants]]\nname = "a"\n[[tenants.keys]]\nkey = "k"\n[[tenants.keys]]\nkey = "k"\n', "twice"),
        ('[[tenants]]\nname = "a"\n[[tenants.keys]]\nlabel = "k"\n', "either key"),
        ('[[tenants]]\nname = "a"\n[[tenants.keys]]\nkey = "k k"\n', "printable"),
        ('[[tenants]]\nname = "a"\n[[tenants.keys]]\nsha256 = "abc"\n', "64"),
        ('[[tenants]]\nname = "a"\n[[tenants.keys]]\nkey = "k"\nexpires = 2030-01-01T00:00:00\n', "time zone"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, told: str) -> None:
    """With the file's path and what is wrong in it, and never a key."""
    file = tmp_path / "t.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_declared(file)
    assert told in caught.value.message
    assert str(file) in caught.value.message


def test_missing_file(tmp_path: Path) -> None:
    """A path that is not there is told."""
    with pytest.raises(ConfigError, match=r"none\.toml"):
        read_declared(tmp_path / "none.toml")


def test_the_shipped_example_is_right() -> None:
    """Its tenants and keys can be read, limits included."""
    declared = read_declared(presets_folder() / "multi-tenant.toml")
    assert [tenant.name for tenant in declared.tenants] == ["chat-team", "batch"]
    assert [key.tenant for key in declared.keys] == ["chat-team", "chat-team", "batch"]
    assert declared.tenants[0].limits.kv_floor == 0.2


def test_flag_keys_are_the_default_tenants() -> None:
    """Each has an id of its own that is the same at every start and is not the digest."""
    one, two = declared_keys(["a", "b"]).keys
    assert one.tenant == two.tenant == "default"
    assert one.id != two.id
    assert one == declared_keys(["a"]).keys[0]
    assert one.id not in one.digest.hex()
