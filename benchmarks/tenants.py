"""Can many tenants share one engine and trust it?

Six questions on the real model, in this process, without network: what a published prompt saves; whether service is
fair; what a quiet tenant feels of a flood; what a better class waits; what swapping saves under overload; and whether
response times betray what another tenant has cached. Each part prints its sizes and trial counts beside its result.
Run: ``scripts/bench tenants [--json] [--only PART …] [--quick]``; about fifteen minutes on two cores.

`overload` is a *GPU proxy*: on a CPU both tiers are the same memory, so it measures the mechanism with a copy that
costs what memory bandwidth costs, not what a bus does.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks._engine import Loader, Prompt, Timeline
from chatserve.scheduler.fairness import OUTPUT_COST, PROMPT_COST

Result = dict[str, Any]


def p99(values: list[float]) -> float:
    """99th percentile, the greatest value of fewer than a hundred."""
    return float(np.percentile(values, 99, method="higher"))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def shared_prompt(loader: Loader, quick: bool) -> Result:
    """Tenants under one published prompt: prefill tokens computed and blocks resident, private over published."""
    tenants, shared, own = (8 if quick else 64), 1024, 32
    blocks = (tenants + 1) * (shared + own + 32) // 16 + 256

    def measure(publish: bool) -> tuple[int, int]:
        load = loader.load(num_blocks=blocks * (4 if publish else 1))
        system = load.fresh_prompt(shared)
        if publish:
            load.publish(system)
        for i in range(tenants):
            prompt: Prompt = np.concatenate((system, load.fresh_prompt(own)))
            load.submit(prompt, 1, f"t{i}")
        load.run()
        load.check_at_rest()
        computed = load.core.stats().computed_tokens - tenants * own
        pool = load.core.manager.pool
        resident = pool.num_blocks - pool.num_free - tenants * -(-own // 16)
        return computed, resident

    say("shared_prompt: private scopes")
    private_tokens, private_blocks = measure(publish=False)
    say("shared_prompt: published")
    public_tokens, public_blocks = measure(publish=True)
    return {
        "prefill_ratio": round(private_tokens / public_tokens, 2),
        "blocks_ratio": round(private_blocks / public_blocks, 2),
        "shared_tokens_computed": {"private": private_tokens, "published": public_tokens},
        "shared_blocks_resident": {"private": private_blocks, "published": public_blocks},
        "tenants": tenants,
        "shared_tokens": shared,
        "own_tokens": own,
        "goal": 62.7,
    }


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

    def serve(fair: bool, seed: int) -> tuple[float, float, float]:
        """(largest gap while both are backlogged, tokens per second, service of B)."""
        rng = random.Random(seed)
        load = loader.load(num_blocks=2000, max_num_seqs=slots)

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
        began = time.perf_counter()
        a, b = send("a", 10 * slots), send("b", count)
        # A sends ten times what B has in flight, until B is half through; then it pauses until its queue is empty.
        while sum(r.finished is not None for r in b) < count // 2:
            if not is_backlogged(a):
                a += send("a", 10 * slots)
            load.step()
            gap = max(gap, abs(service(a) - service(b)))
        load.run(until=lambda: all(r.finished is not None for r in a))
        # A returns while B still has work: from here on the two are compared anew.
        before, more = service(b), send("a", count)
        while is_backlogged(b):
            load.step()
            if is_backlogged(more):
                gap = max(gap, abs(service(more) - (service(b) - before)))
        load.run()
        load.check_at_rest()
        tokens = sum(len(r.tokens) for r in load.requests.values())
        return gap, tokens / (time.perf_counter() - began), service(b)

    gaps, services = [], []
    speeds: dict[bool, list[float]] = {True: [], False: []}
    for round_ in range(1 if quick else 2):
        # The order alternates, so that a machine that drifts favours neither.
        for fair in (True, False) if round_ % 2 else (False, True):
            say(f"fairness: round {round_ + 1}, {'virtual token counters' if fair else 'first come, first served'}")
            gap, speed, served = serve(fair, round_)
            speeds[fair].append(speed)
            if fair:
                gaps.append(gap)
                services.append(served)
    return {
        "gap_tokens": max(gaps),
        "bound_tokens": bound,
        "L": longest_prompt,
        "M": slots * (longest_prompt + longest_output),
        "gap_over_bound": round(max(gaps) / bound, 3),
        "service_over_bound": round(min(services) / bound, 1),
        "throughput_over_fcfs": round(statistics.median(speeds[True]) / statistics.median(speeds[False]), 3),
        "tok_s": {"fair": [round(v, 1) for v in speeds[True]], "fcfs": [round(v, 1) for v in speeds[False]]},
        "slots": slots,
        "requests_b": count,
        "goals": {"gap_over_bound": 0.25, "throughput_over_fcfs": 0.97},
    }


def noisy_neighbour(loader: Loader, quick: bool) -> Result:
    """A quiet tenant's conversations alone and beside a flood: its p99 TTFT and its cache hit rate."""
    turns, conversations, slots, flood_slots = (3 if quick else 5), (3 if quick else 12), 16, 8

    def measure(flood: bool) -> tuple[list[float], float, float]:
        load = loader.load(num_blocks=1400, max_num_seqs=slots)
        load.submit(load.fresh_prompt(64), 2, "warm")
        load.run()
        ttfts: list[float] = []
        cached = possible = 0
        running: list[Timeline] = []
        busy = steps = 0
        for _ in range(conversations):
            history = load.fresh_prompt(120)
            for turn in range(turns):
                quiet = load.submit(history, 16, "quiet")
                while quiet.finished is None:
                    running = [t for t in running if t.finished is None]
                    while flood and len(running) < flood_slots:
                        running.append(load.submit(load.fresh_prompt(200), 64, "flood"))
                    load.step()
                    steps += 1
                    busy += len(running) >= flood_slots - 1
                ttfts.append(quiet.ttft)
                if turn:
                    cached += quiet.cached
                    possible += len(history) - 1
                tail = load.fresh_prompt(40)
                history = np.concatenate((history, np.array(quiet.tokens, np.int32), tail))
        load.run()
        load.check_at_rest()
        return ttfts, cached / possible, busy / steps

    say("noisy_neighbour: alone")
    alone, hit_alone, _ = measure(flood=False)
    say("noisy_neighbour: beside a flood")
    noisy, hit_noisy, saturation = measure(flood=True)
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

    def high() -> Timeline:
        return load.submit(load.fresh_prompt(64), 8, "high", priority_class=0)

    say("priority: unloaded")
    unloaded = []
    for _ in range(trials):
        request = high()
        load.run()
        unloaded.append(request.ttft)
    say("priority: over a flood")
    low: list[Timeline] = []
    loaded: list[float] = []
    full = steps = 0
    pending: Timeline | None = None
    next_at = time.perf_counter() + 3.0
    load.step_seconds.clear()
    while len(loaded) < trials:
        low = [t for t in low if t.finished is None]
        while len(low) < 3 * slots:
            low.append(load.submit(load.fresh_prompt(64), 256, "low", priority_class=1))
        if pending is not None and pending.first_token is not None:
            loaded.append(pending.ttft)
            pending = None
        if pending is None and time.perf_counter() >= next_at:
            pending = high()
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


def overload(loader: Loader, quick: bool) -> Result:
    """GPU proxy. Resuming a 1,024-token context by swap and by recompute; goodput at three times the device pool."""
    context, trials = 1024, (2 if quick else 7)

    def resume(swap: bool) -> float:
        load = loader.load(num_blocks=140, swap_blocks=600 if swap else 0, max_num_seqs=2)
        times = []
        for _ in range(trials):
            victim = load.submit(load.fresh_prompt(context), 64, "a")
            load.run(until=lambda v=victim: len(v.tokens) >= 4)  # type: ignore[misc]
            load.core.scheduler.preempt_request(len(load.requests))
            # Somebody else takes the whole pool meanwhile.
            filler = load.submit(load.fresh_prompt(140 * 16 - 40), 2, "b", priority_class=-1)
            load.run(until=lambda f=filler: f.finished is not None)  # type: ignore[misc]
            known = len(victim.tokens)
            began = time.perf_counter()
            load.run(until=lambda v=victim, k=known: len(v.tokens) > k)  # type: ignore[misc]
            times.append(time.perf_counter() - began)
            load.run()
        load.check_at_rest()
        return statistics.median(times)

    sequences, prompt, output, device = (6, 64, 144, 40) if quick else (24, 128, 448, 300)
    demand = sequences * (prompt + output) // 16

    def goodput(device_blocks: int, host_blocks: int) -> tuple[float, int]:
        load = loader.load(num_blocks=device_blocks, swap_blocks=host_blocks, max_num_seqs=sequences)
        for _ in range(sequences):
            load.submit(load.fresh_prompt(prompt), output, "a")
        began = time.perf_counter()
        load.run()
        seconds = time.perf_counter() - began
        load.check_at_rest()
        return sequences * output / seconds, load.core.stats().preemptions

    say("overload: resume by swap")
    swap = resume(swap=True)
    say("overload: resume by recompute")
    recompute = resume(swap=False)
    say("overload: goodput with swap")
    with_swap, preemptions = goodput(device, 4 * device)
    say("overload: goodput with recompute")
    without, preemptions_recompute = goodput(device, 0)
    say("overload: goodput, same total memory")
    equal_total, _ = goodput(device * 2 // 3, device - device * 2 // 3)
    return {
        "label": "GPU proxy on a CPU: both tiers are the same memory",
        "resume_s": {"swap": round(swap, 4), "recompute": round(recompute, 4)},
        "resume_speedup": round(recompute / swap, 1),
        "goodput_ratio": round(with_swap / without, 2),
        "goodput_ratio_equal_total": round(equal_total / without, 2),
        "goodput_tok_s": {"swap": round(with_swap, 1), "recompute": round(without, 1)},
        "preemptions": {"swap": preemptions, "recompute": preemptions_recompute},
        "context_tokens": context,
        "trials": trials,
        "device_blocks": device,
        "demand_over_pool": round(demand / device, 1),
        "goals": {"resume_speedup": 10, "goodput_ratio": 1.3},
    }


def auc(positive: list[float], negative: list[float]) -> float:
    """Probability that a random positive is smaller than a random negative (faster means "cached")."""
    wins = sum((p < n) + 0.5 * (p == n) for p in positive for n in negative)
    return wins / (len(positive) * len(negative))


def interval(positive: list[float], negative: list[float], rng: random.Random) -> tuple[float, float]:
    """95 % bootstrap interval of the AUC."""
    p, n = np.array(positive), np.array(negative)
    samples = []
    for _ in range(1000):
        a = p[[rng.randrange(len(p)) for _ in range(len(p))]]
        b = n[[rng.randrange(len(n)) for _ in range(len(n))]]
        samples.append(float((a[:, None] < b[None, :]).mean()))
    low, high = np.percentile(samples, [2.5, 97.5])
    return float(low), float(high)


def timing_attack(loader: Loader, quick: bool) -> Result:
    """TTFT of prompts that another tenant has cached against fresh ones, in random order; and of one's own."""
    length, trials, own_trials = 1024, (12 if quick else 270), (6 if quick else 40)
    rng = random.Random(5)
    load = loader.load(num_blocks=length // 16 * 12, max_num_seqs=4)

    def probe(tenant: str, prompt: Prompt) -> tuple[float, int]:
        request = load.submit(prompt, 1, tenant)
        load.run()
        return request.ttft, request.cached

    probe("warm", load.fresh_prompt(length))
    secret = load.fresh_prompt(length)
    samples: dict[bool, list[float]] = {True: [], False: []}
    foreign_hits = 0
    order = [True, False] * trials
    rng.shuffle(order)
    for count, guess_right in enumerate(order):
        # The victim uses its prompt, so that it is cached and recent; the attacker then asks for it, or for another.
        if count % 4 == 0:
            secret = load.fresh_prompt(length)
        probe("victim", secret)
        attacker = f"attacker{count}"
        seconds, cached = probe(attacker, secret if guess_right else load.fresh_prompt(length))
        foreign_hits += cached
        samples[guess_right].append(seconds)
        if count % 90 == 0:
            say(f"timing_attack: {count} of {len(order)} probes")
    own: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(own_trials):
        prompt = load.fresh_prompt(length)
        own[False].append(probe("self", prompt)[0])
        own[True].append(probe("self", prompt)[0])
    low, high = interval(samples[True], samples[False], rng)
    return {
        "auc_other": round(auc(samples[True], samples[False]), 3),
        "auc_other_95": [round(low, 3), round(high, 3)],
        "auc_own": round(auc(own[True], own[False]), 3),
        "foreign_hit_tokens": foreign_hits,
        "trials": len(order),
        "own_trials": own_trials,
        "prompt_tokens": length,
        "goals": {"auc_other": "interval contains 0.5, half-width <= 0.05", "auc_own": 0.95},
    }


PARTS: dict[str, Callable[[Loader, bool], Result]] = {
    "shared_prompt": shared_prompt,
    "fairness": fairness,
    "noisy_neighbour": noisy_neighbour,
    "priority": priority,
    "overload": overload,
    "timing_attack": timing_attack,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it works; not for figures")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    loader = Loader(arguments.model, arguments.threads)
    result: Result = {"quick": arguments.quick, "model": arguments.model}
    for name in arguments.only:
        result[name] = PARTS[name](loader, arguments.quick)
        say(f"{name}: {json.dumps(result[name])}")
    result["load_average"] = os.getloadavg()[0]
    if arguments.json:
        print(json.dumps(result))
        return
    for name in arguments.only:
        print(f"\n{name}: {(PARTS[name].__doc__ or '').strip()}")
        for key, value in result[name].items():
            print(f"  {key:<28} {value}")


if __name__ == "__main__":
    main()
