"""Fair service between tenants on the oracle model: floods, pauses, weights, hits, slots."""

from __future__ import annotations

from chatserve.engine.protocol import SetTenant
from chatserve.scheduler.fairness import OUTPUT_COST, PROMPT_COST, Tenants
from chatserve.scope import Scope
from tests.harness import Harness, numbers


def service(engine: Harness, name: str) -> float:
    """What a tenant has got so far, in weighted tokens without its weight."""
    tenants = engine.core.scheduler.tenants
    index = tenants.index(name)
    return PROMPT_COST * int(tenants.computed[index]) + OUTPUT_COST * int(tenants.generated[index])


def flood(engine: Harness, tenant: str, count: int, *, prompt: int = 20, output: int = 20) -> None:
    for i in range(count):
        engine.submit(
            numbers(ord(tenant) * 97 + i * 13, prompt),
            output,
            scopes=(Scope("tenant", tenant),),
            tenant=tenant,
            seed=i,
        )


def test_a_flood_gets_no_more_than_a_drizzle_that_is_backlogged() -> None:
    """A sends ten times as much as B; while both wait, their service stays within the bound of the paper."""
    engine = Harness(num_blocks=200, max_num_seqs=4)
    flood(engine, "a", 100)
    flood(engine, "b", 30)
    largest = 0.0
    for _ in range(250):
        engine.step()
        largest = max(largest, abs(service(engine, "a") - service(engine, "b")))
    bound = 2 * max(PROMPT_COST * 20, OUTPUT_COST * 4 * 40)
    assert service(engine, "b") > 2 * bound
    assert largest <= bound


def test_idling_earns_no_credit() -> None:
    """A tenant that returns is served fairly from then on, not first for as long as it was away."""
    engine = Harness(num_blocks=200, max_num_seqs=4)
    flood(engine, "a", 60)
    for _ in range(150):
        engine.step()
    before = service(engine, "a")
    flood(engine, "b", 60)
    for _ in range(150):
        engine.step()
    gained_a, gained_b = service(engine, "a") - before, service(engine, "b")
    assert gained_a > 0.6 * gained_b


def test_weights_divide_service() -> None:
    """A tenant of weight 3 gets three times the service of one of weight 1."""
    engine = Harness(num_blocks=200, max_num_seqs=4)
    engine.core.set_tenant(SetTenant("a", weight=3.0))
    flood(engine, "a", 100)
    flood(engine, "b", 100)
    for _ in range(400):
        engine.step()
    assert 2.3 <= service(engine, "a") / service(engine, "b") <= 3.7


def test_a_tenant_of_hits_does_not_starve_a_cold_one() -> None:
    """All of H's prompts are cached, C's single one is not: C waits for its turn, not for H to end (sglang#31954)."""
    engine = Harness(num_blocks=200, max_num_seqs=2)
    hot = (Scope("tenant", "h"),)
    prompt = numbers(0, 60)
    engine.run(engine.submit(prompt, 1, scopes=hot, tenant="h"))
    for _ in range(60):
        engine.submit(prompt, 8, scopes=hot, tenant="h")
    for _ in range(10):
        engine.step()
    arrived = engine.core.scheduler.step
    cold = engine.submit(numbers(300, 60), 4, scopes=(Scope("tenant", "c"),), tenant="c")
    engine.run(cold)
    assert cold.started_step is not None
    assert cold.started_step - arrived <= 10


def test_long_outputs_of_one_tenant_give_slots_back() -> None:
    """All slots hold one tenant's long outputs; another's request gets one once the first is a quantum ahead."""
    engine = Harness(num_blocks=800, max_num_seqs=2, max_model_len=2000)
    for i in range(2):
        engine.submit(numbers(i * 100, 6), 1500, tenant="a")
    for _ in range(300):
        engine.step()
    now = engine.core.scheduler.step
    late = engine.submit(numbers(500, 6), 4, tenant="b", scopes=(Scope("tenant", "b"),))
    engine.run(late, limit=400)
    assert late.started_step is not None
    # Both had no past together: b is lifted to a's counter, so a must first get a quantum ahead of it.
    assert late.started_step - now <= 1024 / (2 * OUTPUT_COST) + 40
    engine.run()
    for stream in engine.streams.values():
        engine.expect(stream)


def test_usage_adds_up_to_the_engines_counters() -> None:
    """Per tenant exactly, also after aborts and preemptions."""
    engine = Harness(num_blocks=24, max_num_seqs=4)
    for name in "abc":
        flood(engine, name, 10)
    for step in range(60):
        engine.step()
        if step % 9 == 0:
            engine.abort(engine.streams[1 + step % 30])
    engine.run()
    state, stats = engine.core.state(1), engine.core.stats()
    assert sum(t.computed_tokens for t in state.tenants) == stats.computed_tokens
    assert sum(t.generated_tokens for t in state.tenants) == stats.generation_tokens
    assert sum(t.cached_tokens for t in state.tenants) == stats.prefix_hit_tokens
    assert sum(t.device_blocks for t in state.tenants) == stats.blocks_cached + stats.blocks_held


def test_a_tenant_beyond_its_share_pays_for_room_first() -> None:
    """What one tenant fills the cache with does not push out another's, who is within its share."""
    engine = Harness(num_blocks=40)
    small, big = (Scope("tenant", "s"),), (Scope("tenant", "b"),)
    for tenant in ("s", "b"):
        engine.core.set_tenant(SetTenant(tenant, weight=1.0))
    prompt = numbers(0, 40)
    engine.ask(prompt, 2, scopes=small, tenant="s")
    for i in range(20):
        engine.ask(numbers(100 + 37 * i, 36), 2, scopes=big, tenant="b")
    assert engine.ask(prompt, 2, scopes=small, tenant="s").cached == 39


def test_floors_hold_and_never_wedge_the_pool() -> None:
    """A floor protects idle blocks against others' pressure, but gives way when nothing else is left."""
    engine = Harness(num_blocks=20)
    mine, theirs = (Scope("tenant", "m"),), (Scope("tenant", "t"),)
    engine.core.set_tenant(SetTenant("m", weight=0.1, kv_floor=0.6))
    engine.core.set_tenant(SetTenant("t", weight=10.0))
    prompt = numbers(0, 40)
    engine.ask(prompt, 2, scopes=mine, tenant="m")
    for i in range(8):
        engine.ask(numbers(100 + 50 * i, 20), 2, scopes=theirs, tenant="t")
    assert engine.ask(prompt, 2, scopes=mine, tenant="m").cached == 39
    engine.ask(numbers(300, 70), 8, scopes=theirs, tenant="t")


def test_the_lift_takes_the_lowest_of_the_active() -> None:
    """An arriving tenant starts just before the one that is served next: it gains one token, however often it comes."""
    tenants = Tenants()
    a, b, c = (tenants.index(name) for name in "abc")
    for each in (a, b):
        tenants.arrive(each)
    tenants.charge_computed(a, 100)
    tenants.charge_generated({b: 2})
    for _ in range(3):
        tenants.arrive(c)
        assert tenants.counters[c] == tenants.counters[b] - PROMPT_COST == 2 * OUTPUT_COST - PROMPT_COST
        tenants.leave(c)


def test_a_newcomers_first_token_does_not_wait_for_the_prefill_of_those_served() -> None:
    """Whoever has nothing running completes its prompt in one step, in which a flood adds no more than is cheap."""
    engine = Harness(num_blocks=800, max_num_seqs=16, max_num_batched_tokens=512, prefill_chunk=300)
    flood(engine, "a", 40, prompt=200, output=40)
    for _ in range(4):
        engine.step()
    newcomer = engine.submit(numbers(5, 100), 4, scopes=(Scope("tenant", "b"),), tenant="b")
    before = engine.core.stats().computed_tokens
    engine.step()
    assert len(newcomer.tokens[0]) == 1
    # Its 100 tokens, a decode for each of the flood's rows, and nothing else: 100 is more than is cheap already.
    assert engine.core.stats().computed_tokens - before <= 100 + 16
    before = engine.core.stats().computed_tokens
    engine.step()
    assert engine.core.stats().computed_tokens - before > 200
    engine.run(newcomer)
