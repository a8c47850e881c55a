"""What tenants feel of each other: fairness while both are backlogged, a noisy neighbour, a better class."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator

import numpy as np

from benchmarks._engine import Load, Loader, Timeline
from benchmarks._tenant_parts import Result, p99, say, take_turns
from chatserve.scheduler.fairness import OUTPUT_COST, PROMPT_COST


def fairness(loader: Loader, quick: bool) -> Result:
    """A sends ten times B's load; both backlogged, then A pauses and returns. The service gap over VTC's bound."""
    slots, longest_prompt, longest_output = 4, 32, 16
    bound = 2 * max(PROMPT_COST * longest_prompt, OUTPUT_COST * slots * (longest_prompt + longest_output))
    # Requests of random lengths cost about 24 + 2 * 12 virtual tokens.
    count = int(bound * (2 if quick else 20) / 48) + 4 * slots

    def service(requests: list[Timeline]) -> float:
        begun = [r for r in requests if r.first_token is not None]
        return sum(PROMPT_COST * r.prompt_tokens + OUTPUT_COST * len(r.tokens) for r in begun)

    def is_backlogged(requests: list[Timeline]) -> bool:
        return sum(r.first_token is None for r in requests) > slots

    loads: dict[bool, Load] = {}
    gaps: list[float] = []
    services: list[float] = []

    def serve(fair: bool, seed: int) -> Iterator[None]:
        """One run, a step at a time."""
        rng = random.Random(seed)
        load = loads[fair] = loader.load(num_blocks=2000, max_num_seqs=slots)

        def send(tenant: str, requests: int) -> list[Timeline]:
            name = tenant if fair else "all"
            return [
                load.submit(
                    load.fresh_prompt(rng.randint(longest_prompt // 2, longest_prompt)),
                    rng.randint(longest_output // 2, longest_output),
                    name,
                )
                for _ in range(requests)
            ]

        gap = 0.0
        a, b = send("a", 10 * slots), send("b", count)
        yield
        # A sends ten times what B has in flight, until B is half through; then it pauses until its queue is empty.
        while sum(r.finished is not None for r in b) < count // 2:
            if not is_backlogged(a):
                a += send("a", 10 * slots)
            load.step()
            gap = max(gap, abs(service(a) - service(b)))
            yield
        while any(r.finished is None for r in a):
            load.step()
            yield
        # A returns while B still has work: from here on the two are compared anew.
        before, more = service(b), send("a", count)
        while is_backlogged(b):
            load.step()
            if is_backlogged(more):
                gap = max(gap, abs(service(more) - (service(b) - before)))
            yield
        while load.core.has_work:
            load.step()
            yield
        load.check_at_rest()
        if fair:
            gaps.append(gap)
            services.append(service(b))

    speeds: dict[bool, list[float]] = {True: [], False: []}
    for round_ in range(1 if quick else 2):
        say(f"fairness: round {round_ + 1}, virtual token counters and first come, first served in turns")
        for fair, seconds in zip((True, False), take_turns(serve(True, round_), serve(False, round_)), strict=True):
            speeds[fair].append(sum(len(r.tokens) for r in loads[fair].requests.values()) / seconds)
    return {
        "gap_tokens": max(gaps),
        "bound_tokens": bound,
        "L": longest_prompt,
        "M": slots * (longest_prompt + longest_output),
        "gap_over_bound": round(max(gaps) / bound, 3),
        "service_over_bound": round(min(services) / bound, 1),
        "throughput_over_fcfs": round(
            statistics.median(fair / fcfs for fair, fcfs in zip(speeds[True], speeds[False], strict=True)), 3
        ),
        "tok_s": {"fair": [round(v, 1) for v in speeds[True]], "fcfs": [round(v, 1) for v in speeds[False]]},
        "slots": slots,
        "requests_b": count,
        "goals": {"gap_over_bound": 0.25, "throughput_over_fcfs": 0.97},
    }


def noisy_neighbour(loader: Loader, quick: bool) -> Result:
    """A quiet tenant's conversations alone and beside a flood: its p99 TTFT and its cache hit rate."""
    turns, conversations, slots, flood_slots = (3 if quick else 5), (3 if quick else 12), 16, 8

    ttfts: dict[bool, list[float]] = {True: [], False: []}
    hits: dict[bool, float] = {}
    full: list[bool] = []

    def converse(flood: bool) -> Iterator[None]:
        """The quiet tenant's conversations, a turn at a time."""
        load = loader.load(num_blocks=1400, max_num_seqs=slots)
        load.submit(load.fresh_prompt(64), 2, "warm")
        load.run()
        yield
        cached = possible = 0
        running: list[Timeline] = []
        for _ in range(conversations):
            history = load.fresh_prompt(120)
            for turn in range(turns):
                quiet = load.submit(history, 16, "quiet")
                while quiet.finished is None:
                    running = [t for t in running if t.finished is None]
                    while flood and len(running) < flood_slots:
                        running.append(load.submit(load.fresh_prompt(200), 64, "flood"))
                    load.step()
                    if flood:
                        full.append(len(running) >= flood_slots - 1)
                ttfts[flood].append(quiet.ttft)
                if turn:
                    cached += quiet.cached
                    possible += len(history) - 1
                tail = load.fresh_prompt(40)
                history = np.concatenate((history, np.array(quiet.tokens, np.int32), tail))
                yield
        load.run()
        load.check_at_rest()
        hits[flood] = cached / possible

    say("noisy_neighbour: alone and beside a flood, in turns")
    take_turns(converse(flood=False), converse(flood=True), turn_seconds=0.0)
    alone, noisy, hit_alone, hit_noisy = ttfts[False], ttfts[True], hits[False], hits[True]
    saturation = sum(full) / len(full)
    return {
        "ttft_p99_ratio": round(p99(noisy) / p99(alone), 2),
        "ttft_p50_ratio": round(statistics.median(noisy) / statistics.median(alone), 2),
        "hit_rate_ratio": round(hit_noisy / hit_alone, 3),
        "ttft_s": {"alone_p99": round(p99(alone), 4), "flood_p99": round(p99(noisy), 4)},
        "hit_rate": {"alone": round(hit_alone, 3), "flood": round(hit_noisy, 3)},
        "turns": len(alone),
        "flood": f"{flood_slots} concurrent (its limit) of 200 in, 64 out; full in {saturation:.0%} of the steps",
        "slots": slots,
        "pool_blocks": 1400,
        "goals": {"ttft_p99_ratio": 2, "hit_rate_ratio": 0.95},
    }


def priority(loader: Loader, quick: bool) -> Result:
    """One high-class request per second over a low-class flood that fills all slots."""
    slots, trials = 8, (5 if quick else 30)
    load = loader.load(num_blocks=1500, max_num_seqs=slots)

    def high(load: Load) -> float:
        request = load.submit(load.fresh_prompt(64), 8, "high", priority_class=0)
        load.run()
        return request.ttft

    idle = loader.load(num_blocks=1500, max_num_seqs=slots)
    say("priority: over a flood, and on an idle engine, in turns")
    unloaded: list[float] = []
    low: list[Timeline] = []
    loaded: list[float] = []
    full = steps = 0
    pending: Timeline | None = None
    next_at = time.perf_counter() + 3.0
    while len(loaded) < trials:
        low = [t for t in low if t.finished is None]
        while len(low) < 3 * slots:
            low.append(load.submit(load.fresh_prompt(64), 256, "low", priority_class=1))
        if pending is not None and pending.first_token is not None:
            loaded.append(pending.ttft)
            pending = None
            unloaded.append(high(idle))
        if pending is None and time.perf_counter() >= next_at:
            pending = load.submit(load.fresh_prompt(64), 8, "high", priority_class=0)
            next_at += 1.0
        load.step()
        steps += 1
        full += len(load.core.scheduler.batch) == slots
    step = statistics.median(load.step_seconds)
    return {
        "ttft_p99_ratio": round(p99(loaded) / (p99(unloaded) + step), 2),
        "ttft_s": {"unloaded_p99": round(p99(unloaded), 4), "flood_p99": round(p99(loaded), 4)},
        "step_s": round(step, 4),
        "trials": trials,
        "slots": slots,
        "slots_full": f"{full / steps:.0%} of the steps",
        "preemptions": load.core.stats().preemptions,
        "goal": 1.5,
    }
