"""Reports about tenants: added up over time they are the whole truth, and an idle tenant is not repeated."""

from __future__ import annotations

import random

import pytest

from chatserve.engine.protocol import TenantState
from chatserve.scope import Scope
from tests.harness import Harness, numbers


@pytest.mark.parametrize("seed", range(6))
def test_news_add_up_to_the_states(seed: int) -> None:
    """Whoever applies every report in order knows at any moment what `states` says, new tenants included, through
    preemption, eviction by others and aborts; and nobody is reported who has not changed.
    """
    rng, engine = random.Random(seed), Harness(num_blocks=24, max_num_seqs=4)
    report, known = engine.core.tenant_report, dict[str, TenantState]()
    streams, repeated = [], 0
    for step in range(600):
        if rng.random() < 0.1:
            name = f"t{rng.randrange(1 + step // 60)}"
            streams.append(
                engine.submit(
                    numbers(rng.randrange(300), rng.randrange(1, 30)),
                    rng.randrange(1, 20),
                    scopes=(Scope("tenant", name),),
                    tenant=name,
                )
            )
        if streams and rng.random() < 0.02:
            engine.abort(rng.choice(streams))
        engine.step()
        if rng.random() < 0.3:
            news = report.news()
            repeated += sum(known.get(state.tenant) == state for state in news)
            known.update((state.tenant, state) for state in news)
            assert known == {state.tenant: state for state in report.states()}
    assert repeated == 0
    assert len(known) > 5
    assert engine.core.stats().evictions > 0
