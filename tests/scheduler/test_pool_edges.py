"""Pairs of requests that fill the pool exactly, half, nearly, or never: nobody waits for ever, nobody thrashes."""

from __future__ import annotations

import itertools

import pytest

from chatserve.scope import Scope
from tests.harness import Harness, Stream, numbers

BLOCKS, SIZE = 20, 4
EXACT = BLOCKS * SIZE + 1
"""Tokens of prompt and output that an empty pool holds: the last one is never written."""

TOTALS = {"never": EXACT + 1, "exact": EXACT, "a block less": EXACT - SIZE, "60 %": 48, "half": EXACT // 2, "one": 2}
PREEMPTIONS = 4
"""Of each request at most, where two together exceed the pool."""


def submit(engine: Harness, total: int, prompt_share: float, which: int) -> Stream:
    prompt = max(1, min(total - 1, int(total * prompt_share)))
    return engine.submit(numbers(which * 400, prompt), total - prompt, scopes=(Scope("tenant", str(which)),))


def serial_steps(totals: tuple[int, ...], prompt_share: float) -> int:
    """Steps when each is served alone, one after the other."""
    engine = Harness(num_blocks=BLOCKS)
    return sum(engine.run(submit(engine, total, prompt_share, which)) for which, total in enumerate(totals))


@pytest.mark.parametrize("num_host_blocks", [0, 60])
@pytest.mark.parametrize("prompt_share", [0.05, 0.5, 0.95], ids=["decoding", "both", "prefilling"])
def test_pairs_on_the_edge_of_the_pool(num_host_blocks: int, prompt_share: float) -> None:
    """Every pair of sizes, arriving together, one in the middle of the other, or coming back from a preemption
    together (vllm#39734, vllm#45388, vllm#25538): what can never fit is refused in the next step with its number and
    disturbs nobody; everybody else ends with every token right, in at most one and a half times the serial steps.
    """
    for (name_a, a), (name_b, b) in itertools.product(TOTALS.items(), repeat=2):
        serial = serial_steps(tuple(t for t in (a, b) if t <= EXACT), prompt_share)
        for moment in (0, 3, 7):
            engine = Harness(num_blocks=BLOCKS, num_host_blocks=num_host_blocks)
            case = f"{name_a} then {name_b} after {moment} steps"
            streams = [submit(engine, a, prompt_share, 0)]
            for _ in range(moment):
                engine.step()
            streams.append(submit(engine, b, prompt_share, 1))
            if moment == 7:
                engine.step()
                for stream in streams:
                    engine.preempt(stream)
            engine.step()
            for stream, total in zip(streams, (a, b), strict=True):
                assert (stream.errors == ["context_length_exceeded"]) == (total > EXACT), case
            engine.run(limit=1000)
            for stream, total in zip(streams, (a, b), strict=True):
                if total <= EXACT:
                    engine.expect(stream)
            assert engine.core.scheduler.step <= 1.5 * serial + moment + 6, case
            assert engine.core.stats().preemptions <= 2 * PREEMPTIONS + 2, case  # two of them are ours
            assert engine.pool.num_held == engine.manager.host_pool.num_held == 0


def test_ten_exact_fits_are_all_served() -> None:
    """Each needs the whole pool, which is full of the others' cache each time."""
    for num_host_blocks in (0, 5, 400):
        engine = Harness(num_blocks=BLOCKS, num_host_blocks=num_host_blocks)
        streams = [submit(engine, EXACT, 0.7, which) for which in range(2)]
        streams += [engine.submit(numbers(which * 61, 50), EXACT - 50) for which in range(8)]
        engine.run(limit=2000)
        for stream in streams:
            engine.expect(stream)
        assert engine.core.stats().preemptions <= PREEMPTIONS * len(streams)
