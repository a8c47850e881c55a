"""``chatserve tenants`` as an operator uses it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from chatserve.cli.tenants import tenants
from chatserve.tenancy.registry import open_registry
from chatserve.tenancy.store import TenantStore
from chatserve.tenancy.usage import Usage, UsageRow, day_of


class Shell:
    """Runs commands on one database."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, *words: str, code: int = 0) -> Result:
        result = CliRunner().invoke(tenants, ["--tenants-db", str(self.path), *words])
        assert result.exit_code == code, result.output
        return result


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path / "t.sqlite")


def test_from_nothing_to_a_key_that_works(shell: Shell) -> None:
    """Three commands; the key is the only thing on stdout and opens the tenant."""
    shell("create", "acme", "--weight", "2", "--tokens-per-minute", "10k", "--group", "staff", "--group", "beta")
    made = shell("key", "new", "acme", "--label", "laptop", "--expires-in", "30d")
    text = made.stdout.strip()
    assert "shown once" in made.stderr
    registry = open_registry(database=shell.path, environ={})
    assert registry.recognise(text).tenant == "acme"
    assert registry.tenant("acme").limits.tokens_per_minute == 10_000
    assert registry.tenant("acme").groups == ("staff", "beta")
    registry._store.close()
    listed = shell("key", "list").output
    assert text[3:15] in listed
    assert text not in listed
    assert text.encode() not in shell.path.read_bytes()


def test_limits_change_one_by_one(shell: Shell) -> None:
    """What is not named stays; `none` lifts a limit; nothing named is a mistake."""
    shell("create", "acme", "--max-concurrent", "4", "--requests-per-minute", "60")
    shell("limit", "acme", "--requests-per-minute", "none", "--kv-cap", "0.5", "--disable")
    (found,) = json.loads(shell("list", "--json").output)
    assert (found["limits"]["max_concurrent"], found["limits"]["requests_per_minute"]) == (4, None)
    assert (found["limits"]["kv_cap"], found["disabled"]) == (0.5, True)
    shell("limit", "acme", "--enable", "--group", "x")
    shell("limit", "acme", "--group", "")
    (found,) = json.loads(shell("list", "--json").output)
    assert (found["disabled"], found["groups"], found["limits"]["kv_cap"]) == (False, [], 0.5)
    assert "Name at least one" in shell("limit", "acme", code=2).output


def test_revoking_and_deleting(shell: Shell) -> None:
    """A revoked key says so; a deleted tenant is gone from the list and its name is not given again."""
    shell("create", "acme")
    text = shell("key", "new", "acme").stdout.strip()
    shell("key", "revoke", text[3:15])
    (found,) = json.loads(shell("key", "list", "acme", "--json").output)
    assert found["state"] == "revoked"
    assert "digest" not in found
    shell("delete", "acme", code=1)  # nobody said yes
    shell("delete", "acme", "--yes")
    assert json.loads(shell("list", "--json").output) == []
    assert "not used again" in shell("create", "acme", code=1).output


def test_usage_by_day(shell: Shell) -> None:
    """Rows of one tenant or all, with a sum."""
    store = TenantStore(shell.path)
    today = day_of(time.time())
    store.add_usage(
        [
            UsageRow("acme", today, Usage(prompt_tokens=5)),
            UsageRow("beta", today, Usage(prompt_tokens=7)),
            UsageRow("acme", "2001-01-01", Usage(prompt_tokens=9)),
        ]
    )
    store.close()
    assert len(json.loads(shell("usage", "--json").output)) == 2
    (row,) = json.loads(shell("usage", "acme", "--json").output)
    assert row["usage"]["prompt_tokens"] == 5
    lines = shell("usage").output.splitlines()
    assert lines[-1].split()[0] == "total"
    assert "PROMPT TOKENS" in lines[0]
    assert "12" in lines[-1].split()


def test_mistakes_are_one_line(shell: Shell) -> None:
    """A wrong name, value or id is told without a traceback, with what to do."""
    assert "must be 1 to 63" in shell("create", "Bad Name", code=1).output
    shell("create", "acme")
    assert "neither" in shell("limit", "acme", "--tokens-per-day", "many", code=2).output
    assert "weight" in shell("limit", "acme", "--weight", "0", code=1).output
    assert "tenants list" in shell("key", "new", "nobody", code=1).output
    assert "key list" in shell("key", "revoke", "nosuchkey000", code=1).output
    assert "30d" in shell("key", "new", "acme", "--expires-in", "soon", code=2).output
