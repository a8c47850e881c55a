"""Keys are recognised without being kept, and cannot be confused with anything else."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from chatserve.errors import ConfigError
from chatserve.tenancy.keys import PEPPER_VARIABLE, key_id_of, keyed_digest, load_pepper, new_key

PEPPER = bytes(32)


def test_a_key_carries_its_public_id_and_a_checksum() -> None:
    """The id is read from the text alone; any single changed character is noticed before a database is asked."""
    made = new_key(PEPPER, "acme", created=0.0)
    assert made.text.startswith(f"cs_{made.record.id}_")
    assert key_id_of(made.text) == made.record.id
    for position, old in enumerate(made.text):
        changed = made.text[:position] + ("a" if old != "a" else "b") + made.text[position + 1 :]
        assert key_id_of(changed) is None, position
    for odd in ("", "cs_", made.text + "0", " " + made.text, made.text[:-1], made.text.upper(), "é" * 66, "\ud800"):
        assert key_id_of(odd) is None


def test_the_record_does_not_hold_the_key() -> None:
    """What is stored is a digest under the pepper: the same key under another pepper is somebody else's."""
    made = new_key(PEPPER, "acme", created=0.0)
    assert made.record.digest == keyed_digest(PEPPER, made.text)
    assert made.record.digest != keyed_digest(b"\1" * 32, made.text)
    assert made.text.split("_", 2)[2][:43] not in repr(made.record)


def test_keys_differ() -> None:
    """Ids and secrets are random."""
    made = [new_key(PEPPER, "acme", created=0.0) for _ in range(2000)]
    assert len({key.record.id for key in made}) == len({key.text[16:59] for key in made}) == 2000


def test_usable_until_expiry_or_revocation() -> None:
    """The moment of expiry is no longer good."""
    record = new_key(PEPPER, "acme", created=0.0, expires=10.0).record
    assert record.usable(9.9)
    assert not record.usable(10.0)


def test_pepper_is_made_once_and_for_the_owner_only(tmp_path: Path) -> None:
    """Processes that start together agree on one file with mode 0600; nothing else is left behind."""
    database, found = tmp_path / "tenants.sqlite", list[bytes]()
    threads = [threading.Thread(target=lambda: found.append(load_pepper(database, {}))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert os.listdir(tmp_path) == ["tenants.pepper"]
    assert (tmp_path / "tenants.pepper").stat().st_mode & 0o777 == 0o600


def test_pepper_that_others_can_read_is_refused(tmp_path: Path) -> None:
    """A leak is told, not lived with."""
    load_pepper(tmp_path / "t.sqlite", {})
    (tmp_path / "t.pepper").chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_pepper(tmp_path / "t.sqlite", {})


def test_pepper_from_the_environment(tmp_path: Path) -> None:
    """The variable wins and no file is made; a short or odd value is refused."""
    assert load_pepper(tmp_path / "t.sqlite", {PEPPER_VARIABLE: "ab" * 32}) == b"\xab" * 32
    for odd in ("", "ab", "xy" * 32):
        with pytest.raises(ConfigError, match=PEPPER_VARIABLE):
            load_pepper(tmp_path / "t.sqlite", {PEPPER_VARIABLE: odd})
    assert os.listdir(tmp_path) == []
