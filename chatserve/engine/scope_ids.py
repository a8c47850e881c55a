"""Numbers for cache scopes, and which of them may be forgotten.

The cache speaks of scopes by number. Tenants, groups and revisions are few, but salts come from clients, one per
request if they like, so scopes with a salt are forgotten once nothing is cached in them and nobody uses them. A number
is never given out twice. `EngineCore` owns one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from chatserve.cache.kv_cache_manager import KVCacheManager
from chatserve.scope import Scope

SALTED_KEPT = 1024
"""Scopes with a salt below which looking for forgettable ones is not worth it."""


class ScopeIds:
    """Scopes that have been used, by number.

    Args:
        owner_of: index of the tenant who is charged for a scope's blocks.
        in_use: numbers that open requests mention.
    """

    def __init__(
        self, manager: KVCacheManager, owner_of: Callable[[Scope], int], in_use: Callable[[], Iterable[int]]
    ) -> None:
        self._manager = manager
        self._owner_of = owner_of
        self._in_use = in_use
        self._ids: dict[Scope, int] = {}
        self._salted: dict[Scope, int] = {}
        self._num_given = 0
        self._collect_at = SALTED_KEPT

    def __len__(self) -> int:
        return len(self._ids) + len(self._salted)

    def numbers(self, scopes: Iterable[Scope]) -> tuple[int, ...]:
        """The numbers of a request's scopes; new ones for new scopes."""
        if len(self._salted) >= self._collect_at:
            self._forget_unused()
        return tuple(map(self._number, scopes))

    def _number(self, scope: Scope) -> int:
        ids = self._salted if scope.salt else self._ids
        known = ids.get(scope)
        if known is not None:
            return known
        number = ids[scope] = self._num_given
        self._num_given += 1
        self._manager.tree.owner_of_scope[number] = self._owner_of(scope)
        return number

    def known(self, scopes: Iterable[Scope]) -> tuple[int, ...]:
        """The numbers of those that have been used: in the others nothing can be cached."""
        found = ((self._salted if scope.salt else self._ids).get(scope) for scope in scopes)
        return tuple(number for number in found if number is not None)

    def of_tenant(self, tenant: str) -> Iterator[int]:
        """The numbers of a tenant's private scopes, salted ones too."""
        for ids in (self._ids, self._salted):
            for scope, number in ids.items():
                if scope.kind == "tenant" and scope.owner == tenant:
                    yield number

    def _forget_unused(self) -> None:
        used = set(self._in_use())
        self._salted = {
            scope: number
            for scope, number in self._salted.items()
            if number in used or not self._manager.forget_scope(number)
        }
        # Twice what is left, so that looking costs little per new scope however many are in use.
        self._collect_at = max(SALTED_KEPT, 2 * len(self._salted))
