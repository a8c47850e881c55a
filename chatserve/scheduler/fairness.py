"""Fair service between tenants: a virtual token counter each (Sheng et al., *Fairness in Serving Large Language
Models*, OSDI 2024).

A tenant's counter rises with the service it gets, divided by its weight; who has the lowest is served next. A
tenant that returns after a pause is lifted to just below the lowest counter among the active: idling earns no credit.
"""

from __future__ import annotations

from collections.abc import Mapping

PROMPT_COST = 1.0
"""Per prompt token that is computed."""

OUTPUT_COST = 2.0
"""Per generated token."""

CACHED_COST = 0.05
"""Per prompt token found in the cache: memory traffic, but no computation."""

QUANTUM_TOKENS = 1024.0
"""Virtual tokens by which a tenant must be ahead of a waiting one before it loses a slot to it."""

SLACK_TOKENS = 128.0
"""Virtual tokens that a tenant may be ahead of the next and still go first, to use a prefix before it is evicted."""

OPERATOR = 0
"""Index of the operator, who is charged for what is published to several tenants."""


class Tenants:
    """Every tenant the engine has seen, by index.

    ``num_active`` counts a tenant's open requests, ``num_present`` the tenants that have any.

    Columns by tenant index, lists because most steps touch one or a few:
        counters: virtual tokens served.
        prompt, cached, computed, generated: tokens since start, exactly. Computed are prompt tokens that ran, and
            tokens that ran again after a preemption.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.num_active: list[int] = []
        self.num_present = 0
        self.counters: list[float] = []
        self.prompt: list[int] = []
        self.cached: list[int] = []
        self.computed: list[int] = []
        self.generated: list[int] = []
        self._changed: set[int] = set()
        self._index: dict[str, int] = {}
        self._inverse_weights: list[float] = []
        self.index("")

    def __len__(self) -> int:
        return len(self.names)

    def index(self, name: str) -> int:
        """The tenant's index; a new one has weight 1."""
        known = self._index.get(name)
        if known is not None:
            return known
        at = len(self.names)
        self._index[name] = at
        self.names.append(name)
        self.num_active.append(0)
        self.counters.append(0.0)
        self._inverse_weights.append(1.0)
        for column in (self.prompt, self.cached, self.computed, self.generated):
            column.append(0)
        self._changed.add(at)
        return at

    def take_changed(self) -> set[int]:
        """Tenants of whom anything was counted since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    def set_weight(self, tenant: int, weight: float) -> None:
        """A tenant of weight 2 gets twice the service of one of weight 1 while both want more."""
        self._inverse_weights[tenant] = 1.0 / weight

    def arrive(self, tenant: int) -> None:
        """A request was accepted. The first of an idle tenant lifts its counter to just below the lowest active one.

        Just below: whoever returns is served next, not after whoever happens to share the number.
        """
        if not self.num_active[tenant]:
            active = [self.counters[i] for i, count in enumerate(self.num_active) if count]
            if active and self.counters[tenant] < min(active) - PROMPT_COST:
                self.counters[tenant] = min(active) - PROMPT_COST
                self._changed.add(tenant)
            self.num_present += 1
        self.num_active[tenant] += 1

    def leave(self, tenant: int) -> None:
        """A request of the tenant has ended."""
        self.num_active[tenant] -= 1
        if not self.num_active[tenant]:
            self.num_present -= 1

    def charge_cached(self, tenant: int, num_prompt: int, num_cached: int) -> None:
        """A request of the tenant was admitted with ``num_cached`` of its tokens found."""
        self.prompt[tenant] += num_prompt
        self.cached[tenant] += num_cached
        self._charge(tenant, CACHED_COST * num_cached)

    def charge_computed(self, tenant: int, num_tokens: int) -> None:
        """Prompt tokens (or tokens computed again after a preemption) were scheduled."""
        self.computed[tenant] += num_tokens
        self._charge(tenant, PROMPT_COST * num_tokens)

    def charge_generated(self, counts: Mapping[int, int]) -> None:
        """So many tokens were generated for each of these tenants."""
        for tenant, count in counts.items():
            self.generated[tenant] += count
            self._charge(tenant, OUTPUT_COST * count)

    def _charge(self, tenant: int, cost: float) -> None:
        self.counters[tenant] += cost * self._inverse_weights[tenant]
        self._changed.add(tenant)
