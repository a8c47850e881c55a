"""What a tenant is: a name, its share of the machine, and its limits.

Plain frozen data and the rules that a value must obey. Does not know where tenants are kept (`tenancy.store`,
`tenancy.declared`) or how limits are enforced (`tenancy.limits`). Everything in this package speaks of these.
"""

from __future__ import annotations

import re

import msgspec

from chatserve.errors import InvalidRequestError

DEFAULT_TENANT = "default"
"""Owner of plain ``--api-key`` keys, and of every caller of a server without keys."""

MAX_PRIORITY_CLASS = 7
DEFAULT_PRIORITY_CLASS = 1

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_MAX_COUNT = 10**12


class TenantLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one tenant may use at most; ``None`` is no limit of its own.

    Attributes:
        max_concurrent: requests accepted and not ended, at once.
        requests_per_minute: those that generate and those that only work, as tokenizing; refilled continuously, and
            a burst may use the whole minute's worth.
        tokens_per_minute: prompt and output together, cached prompt tokens included.
        tokens_per_day: the same, from midnight to midnight UTC.
        max_queued: requests that have not started yet, at once.
        max_connections: WebSockets open at once.
        kv_floor: share of the KV pool that others cannot take from its cache.
        kv_cap: share of the KV pool that it may hold at most.
    """

    max_concurrent: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    max_queued: int | None = None
    max_connections: int | None = None
    kv_floor: float = 0.0
    kv_cap: float = 1.0


COUNT_LIMITS = (
    "max_concurrent",
    "requests_per_minute",
    "tokens_per_minute",
    "tokens_per_day",
    "max_queued",
    "max_connections",
)


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant.

    Attributes:
        name: identity everywhere: keys, scopes, usage. Never reused, also not after deletion.
        display_name: for people.
        weight: its share of the machine relative to others of its class, when all of them want it.
        priority_class: lower runs first, 0 to 7.
        groups: names under which prefixes may be published to several tenants.
        created: Unix seconds.
        disabled: its keys are refused until it is enabled again.
        deleted: Unix seconds of its deletion: refused for ever, kept so that its name and usage stay its own.
    """

    name: str
    display_name: str = ""
    weight: float = 1.0
    priority_class: int = DEFAULT_PRIORITY_CLASS
    limits: TenantLimits = TenantLimits()
    groups: tuple[str, ...] = ()
    created: float = 0.0
    disabled: bool = False
    deleted: float | None = None

    @property
    def active(self) -> bool:
        """Whether its keys are accepted."""
        return not self.disabled and self.deleted is None

    def validate(self) -> None:
        """Raise `InvalidRequestError` naming the first field that breaks a rule."""
        check_name("name", self.name)
        _check(len(self.display_name) <= 200, "display_name", "must have at most 200 characters")
        _check(0.01 <= self.weight <= 100.0, "weight", f"must be between 0.01 and 100; got {self.weight}")
        _check(
            0 <= self.priority_class <= MAX_PRIORITY_CLASS,
            "priority_class",
            f"must be 0 (first) to {MAX_PRIORITY_CLASS}; got {self.priority_class}",
        )
        for field in COUNT_LIMITS:
            value = getattr(self.limits, field)
            _check(
                value is None or 1 <= value <= _MAX_COUNT,
                f"limits.{field}",
                f"must be at least 1, or null for no limit; got {value}",
            )
        floor, cap = self.limits.kv_floor, self.limits.kv_cap
        _check(0.0 <= floor <= 1.0, "limits.kv_floor", f"must be a share between 0 and 1; got {floor}")
        _check(0.0 < cap <= 1.0, "limits.kv_cap", f"must be a share above 0 and at most 1; got {cap}")
        _check(floor <= cap, "limits.kv_floor", f"must not exceed kv_cap; got {floor} and {cap}")
        _check(len(self.groups) <= 32, "groups", "must name at most 32 groups")
        for group in self.groups:
            check_name("groups", group)


def check_name(param: str, name: str) -> None:
    """Raise `InvalidRequestError` unless a name is safe in paths, labels and logs."""
    _check(
        _NAME.fullmatch(name) is not None,
        param,
        f"must be 1 to 63 of a-z, 0-9, dot, underscore and hyphen, starting with a letter or digit; got {name[:80]!r}",
    )


def _check(ok: bool, param: str, rule: str) -> None:
    if not ok:
        raise InvalidRequestError(f"{param} {rule}.", param=param)
