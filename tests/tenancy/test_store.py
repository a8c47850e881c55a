"""What is written is read back, names are never reused, and others' changes are noticed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatserve.errors import ConflictError, InvalidRequestError, NotFoundError
from chatserve.tenancy.keys import new_key
from chatserve.tenancy.store import TenantStore
from chatserve.tenancy.tenant import Tenant, TenantLimits
from chatserve.tenancy.usage import FIELDS, Usage, UsageRow

ACME = Tenant(
    name="acme",
    display_name="Acme \N{SNOWMAN}; DROP TABLE tenants",
    weight=2.5,
    priority_class=3,
    limits=TenantLimits(max_concurrent=4, tokens_per_day=10**12, kv_floor=0.25, kv_cap=0.5),
    groups=("staff", "beta"),
    created=12.5,
)


@pytest.fixture
def store() -> Iterator[TenantStore]:
    """In memory."""
    store = TenantStore(None)
    yield store
    store.close()


def test_round_trip(tmp_path: Path) -> None:
    """Every field of tenants, keys and usage survives a restart."""
    path = tmp_path / "below" / "tenants.sqlite"
    store = TenantStore(path)
    store.create_tenant(ACME)
    made = new_key(bytes(32), "acme", label="laptop", created=1.5, expires=99.0)
    store.add_key(made.record)
    use = Usage(*(index + 1 for index in range(len(FIELDS))))
    store.add_usage([UsageRow("acme", "2026-01-01", use)])
    store.close()
    store = TenantStore(path)
    snapshot = store.snapshot()
    assert (snapshot.tenants, snapshot.keys) == ((ACME,), (made.record,))
    assert store.usage() == [UsageRow("acme", "2026-01-01", use)]
    store.close()


def test_names_are_never_reused(store: TenantStore) -> None:
    """Whoever gets a name must not inherit another's cache, keys or usage."""
    store.create_tenant(ACME)
    with pytest.raises(ConflictError, match="exists already"):
        store.create_tenant(ACME)
    record = new_key(bytes(32), "acme", created=0.0).record
    store.add_key(record)
    store.add_usage([UsageRow("acme", "2026-01-01", Usage(prompt_tokens=5))])
    store.delete_tenant("acme", 50.0)
    assert store.snapshot().keys == (msgspec.structs.replace(record, revoked=50.0),)
    assert store.usage()[0].usage.prompt_tokens == 5
    with pytest.raises(ConflictError, match="not used again"):
        store.create_tenant(ACME)
    with pytest.raises(NotFoundError):
        store.update_tenant("acme", disabled=False)
    with pytest.raises(NotFoundError):
        store.add_key(new_key(bytes(32), "acme", created=0.0).record)
    with pytest.raises(NotFoundError):
        store.delete_tenant("acme", 60.0)


def test_update_changes_what_is_named(store: TenantStore) -> None:
    """Everything else stays; a value out of range changes nothing and is named."""
    store.create_tenant(ACME)
    changed = store.update_tenant("acme", weight=1.0, limits=TenantLimits())
    assert changed == msgspec.structs.replace(ACME, weight=1.0, limits=TenantLimits())
    assert store.snapshot().tenants == (changed,)
    for field, value in (
        *(("weight", value) for value in (0.0, -1.0, float("nan"), float("inf"))),
        *(("priority_class", value) for value in (-1, 8)),
        ("groups", ("A b",)),
        ("display_name", "x" * 201),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            store.update_tenant("acme", **{field: value})
        assert caught.value.param == field
    for limits, param in (
        (TenantLimits(max_concurrent=0), "limits.max_concurrent"),
        (TenantLimits(tokens_per_day=-1), "limits.tokens_per_day"),
        (TenantLimits(kv_floor=0.6, kv_cap=0.5), "limits.kv_floor"),
        (TenantLimits(kv_cap=0.0), "limits.kv_cap"),
        (TenantLimits(kv_floor=float("nan")), "limits.kv_floor"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            store.update_tenant("acme", limits=limits)
        assert caught.value.param == param
    assert store.snapshot().tenants == (changed,)


@pytest.mark.parametrize("name", ["", "A", "-a", "a b", "a/b", "../a", "é", "a\n", "a" * 64, 'a"'])
def test_names_are_safe_everywhere(store: TenantStore, name: str) -> None:
    """In paths, metric labels and logs."""
    with pytest.raises(InvalidRequestError):
        store.create_tenant(Tenant(name=name))


def test_revoking_twice_keeps_the_first_time(store: TenantStore) -> None:
    """The record says when the key really stopped working."""
    store.create_tenant(ACME)
    record = new_key(bytes(32), "acme", created=0.0).record
    store.add_key(record)
    assert store.revoke_key(record.id, 5.0).revoked == store.revoke_key(record.id, 9.0).revoked == 5.0
    with pytest.raises(NotFoundError):
        store.revoke_key("nosuchkey000", 1.0)


def test_revision_rises_with_what_matters_and_not_with_usage(tmp_path: Path) -> None:
    """Another process sees a change by one number; booking usage every second reloads nothing."""
    ours, theirs = TenantStore(tmp_path / "t.sqlite"), TenantStore(tmp_path / "t.sqlite")
    seen = [ours.revision()]
    theirs.create_tenant(ACME)
    seen.append(ours.revision())
    theirs.add_key(record := new_key(bytes(32), "acme", created=0.0).record)
    seen.append(ours.revision())
    theirs.update_tenant("acme", disabled=True)
    seen.append(ours.revision())
    theirs.revoke_key(record.id, 1.0)
    seen.append(ours.revision())
    theirs.delete_tenant("acme", 2.0)
    seen.append(ours.revision())
    assert seen == sorted(set(seen))
    theirs.add_usage([UsageRow("acme", "2026-01-01", Usage(prompt_tokens=1))])
    assert ours.revision() == seen[-1]
    assert ours.snapshot().revision == seen[-1]
    ours.close()
    theirs.close()


rows = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from(["2026-01-01", "2026-01-02"]), st.integers(0, 10**9)), max_size=30
)


@given(st.lists(rows, max_size=6))
@settings(max_examples=40, deadline=None)
def test_usage_adds_up(batches: list[list[tuple[str, str, int]]]) -> None:
    """However rows are batched, the sums per tenant and day are exact, and the filters select them."""
    store, model = TenantStore(None), dict[tuple[str, str], int]()
    for batch in batches:
        store.add_usage([UsageRow(tenant, day, Usage(prompt_tokens=n, run_seconds=n / 2)) for tenant, day, n in batch])
        for tenant, day, n in batch:
            model[tenant, day] = model.get((tenant, day), 0) + n
    found = store.usage()
    assert [(row.day, row.tenant) for row in found] == sorted((day, tenant) for tenant, day in model)
    assert {(row.tenant, row.day): row.usage.prompt_tokens for row in found} == model
    assert all(row.usage.run_seconds == row.usage.prompt_tokens / 2 for row in found)
    assert [row for row in found if row.tenant == "a"] == store.usage(tenant="a")
    assert [row for row in found if row.day > "2026-01-01"] == store.usage(first_day="2026-01-02")
    assert [row for row in found if row.day < "2026-01-02"] == store.usage(last_day="2026-01-01")
    store.close()
