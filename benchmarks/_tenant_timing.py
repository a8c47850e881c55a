"""Whether response times betray what another tenant has cached, or how much of a guessed key is right."""

from __future__ import annotations

import itertools
import random
import secrets
import statistics
import time

import numpy as np

from benchmarks._engine import Loader, Prompt
from benchmarks._tenant_parts import Result, say
from chatserve.errors import AuthenticationError
from chatserve.server.auth import Authenticator
from chatserve.tenancy.registry import open_registry


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


def key_check(loader: Loader, quick: bool) -> Result:
    """Time of refusing guesses that begin like a real key, and of random ones; Welch's t of their means."""
    del loader  # needs no model
    real = f"cs_{secrets.token_hex(24)}"
    auth = Authenticator(open_registry(api_keys=(real,)))
    rng, addresses, tries = random.Random(6), itertools.count(1), (4_000 if quick else 100_000)
    order = [True, False] * (tries // 2)
    rng.shuffle(order)
    times: dict[bool, list[int]] = {True: [], False: []}
    for near in order:
        end = secrets.token_hex(24)
        key = real[:-4] + end[:4] if near else f"cs_{end}"
        header = (b"authorization", b"Bearer " + key.encode())
        client = (f"client-{next(addresses)}", 1)  # each its own: none is over the limit
        scope = {"type": "http", "method": "GET", "headers": [header], "client": client}
        started = time.perf_counter_ns()
        try:
            auth.authenticate(scope)
        except AuthenticationError:
            times[near].append(time.perf_counter_ns() - started)
    # The slowest tenth is the machine's other work.
    near_ns, far_ns = (sorted(each)[: len(each) * 9 // 10] for each in (times[True], times[False]))
    spread = statistics.variance(near_ns) / len(near_ns) + statistics.variance(far_ns) / len(far_ns)
    return {
        "welch_t": round((statistics.mean(near_ns) - statistics.mean(far_ns)) / spread**0.5, 2),
        "mean_us": {"near": round(statistics.mean(near_ns) / 1e3, 2), "far": round(statistics.mean(far_ns) / 1e3, 2)},
        "tries": tries,
        "goal": "|welch_t| < 4.5",
    }
