"""Whether response times betray what another tenant has cached."""

from __future__ import annotations

import random

import numpy as np

from benchmarks._engine import Loader, Prompt
from benchmarks._tenant_parts import Result, say


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
