"""What tenants cost in memory: a prompt that all share, and demand beyond the device pool."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import numpy as np

from benchmarks._engine import Load, Loader, Prompt
from benchmarks._tenant_parts import Result, say, take_turns


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
