"""What the engine has counted per tenant, in full or as what changed since the last report.

Reads the columns of `scheduler.fairness.Tenants`, which notes what changes, and the blocks charged in the prefix tree.
A report goes out whenever the engine falls idle, which may be after every request, so it walks over no more tenants
than it must. Owned by `engine.core`.
"""

from __future__ import annotations

from chatserve.cache.radix_tree import RadixTree
from chatserve.engine.protocol import TenantState
from chatserve.scheduler.fairness import Tenants


class TenantReport:
    """States of tenants by their index in `Tenants`."""

    def __init__(self, tenants: Tenants, tree: RadixTree) -> None:
        self._tenants = tenants
        self._tree = tree
        self._device_usage: dict[int, int] = {}
        self._host_usage: dict[int, int] = {}

    def states(self) -> tuple[TenantState, ...]:
        """Every tenant that was ever seen."""
        return tuple(self._state(index) for index in range(len(self._tenants)))

    def news(self) -> tuple[TenantState, ...]:
        """Tenants whose counts or blocks have changed since the last call."""
        tree = self._tree
        changed = self._tenants.take_changed()
        for before, now in ((self._device_usage, tree.device_usage), (self._host_usage, tree.host_usage)):
            if before != now:
                changed |= {owner for owner in before.keys() | now.keys() if before.get(owner) != now.get(owner)}
        self._device_usage, self._host_usage = dict(tree.device_usage), dict(tree.host_usage)
        return tuple(self._state(index) for index in sorted(changed))

    def _state(self, index: int) -> TenantState:
        tenants, tree = self._tenants, self._tree
        return TenantState(
            tenant=tenants.names[index],
            prompt_tokens=tenants.prompt[index],
            cached_tokens=tenants.cached[index],
            computed_tokens=tenants.computed[index],
            generated_tokens=tenants.generated[index],
            device_blocks=tree.device_usage.get(index, 0),
            host_blocks=tree.host_usage.get(index, 0),
            virtual_tokens=tenants.counters[index],
        )
