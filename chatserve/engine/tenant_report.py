"""What the engine has counted per tenant, in full or as what changed since the last report.

Reads the columns of `scheduler.fairness.Tenants` and the blocks charged in the prefix tree; writes nothing. A report
goes out whenever the engine falls idle, which may be after every request, so finding what changed costs a few vector
comparisons, not a walk over all tenants. Owned by `engine.core`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from chatserve.cache.radix_tree import RadixTree
from chatserve.engine.protocol import TenantState
from chatserve.scheduler.fairness import Tenants


class TenantReport:
    """States of tenants by their index in `Tenants`."""

    def __init__(self, tenants: Tenants, tree: RadixTree) -> None:
        self._tenants = tenants
        self._tree = tree
        self._counters: npt.NDArray[np.float64] = np.zeros(0)
        self._prompt: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._device_usage: dict[int, int] = {}
        self._host_usage: dict[int, int] = {}

    def states(self) -> tuple[TenantState, ...]:
        """Every tenant that was ever seen."""
        return tuple(self._state(index) for index in range(len(self._tenants)))

    def news(self) -> tuple[TenantState, ...]:
        """Tenants whose counts or blocks have changed since the last call.

        Whatever is counted moves a fairness counter, except an admission before anything of it was computed, which
        shows in the prompt tokens.
        """
        tenants, tree = self._tenants, self._tree
        count, known = len(tenants), len(self._counters)
        differs = self._counters != tenants.counters[:known]
        differs |= self._prompt != tenants.prompt[:known]
        changed = {*np.flatnonzero(differs).tolist(), *range(known, count)}
        for before, now in ((self._device_usage, tree.device_usage), (self._host_usage, tree.host_usage)):
            if before != now:
                changed |= {owner for owner in before.keys() | now.keys() if before.get(owner) != now.get(owner)}
        self._counters, self._prompt = tenants.counters[:count].copy(), tenants.prompt[:count].copy()
        self._device_usage, self._host_usage = dict(tree.device_usage), dict(tree.host_usage)
        return tuple(self._state(index) for index in sorted(changed))

    def _state(self, index: int) -> TenantState:
        tenants, tree = self._tenants, self._tree
        return TenantState(
            tenant=tenants.names[index],
            prompt_tokens=int(tenants.prompt[index]),
            cached_tokens=int(tenants.cached[index]),
            computed_tokens=int(tenants.computed[index]),
            generated_tokens=int(tenants.generated[index]),
            device_blocks=tree.device_usage.get(index, 0),
            host_blocks=tree.host_usage.get(index, 0),
            virtual_tokens=float(tenants.counters[index]),
        )
