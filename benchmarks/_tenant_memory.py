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

    say("overload: resume by swap")
    swap = resume(swap=True)
    say("overload: resume by recompute")
    recompute = resume(swap=False)
    users, device = (6, 72) if quick else (24, 300)
    # Both grow to contexts of the same length: in three turns of a conversation, and in one long answer.
    chats = _goodput(loader, "conversations", users, device, turns=3, new=64, output=128)
    answers = _goodput(loader, "single answers", users, device, turns=1, new=128, output=448)
    return {
        "label": "GPU proxy on a CPU: both tiers are the same memory",
        "resume_s": {"swap": round(swap, 4), "recompute": round(recompute, 4)},
        "resume_speedup": round(recompute / swap, 1),
        "context_tokens": context,
        "trials": trials,
        "goodput_ratio": chats["goodput_ratio"],
        "goodput_ratio_equal_total": chats["goodput_ratio_equal_total"],
        "conversations": chats,
        "single_answers": answers,
        "goals": {"resume_speedup": 10, "goodput_ratio": 1.3},
    }


def _goodput(loader: Loader, what: str, users: int, device: int, *, turns: int, new: int, output: int) -> Result:
    """Generated tokens per second of users that each send their next turn when they have read the last answer.

    Args:
        device: blocks of the device pool.
        new: tokens of a turn's message.
    """
    demand = users * turns * (new + output) // 16
    loads: dict[str, Load] = {}

    def serve(name: str, device_blocks: int, host_blocks: int) -> Iterator[None]:
        load = loads[name] = loader.load(num_blocks=device_blocks, swap_blocks=host_blocks, max_num_seqs=users)
        prompts = [load.fresh_prompt(new) for _ in range(users)]
        answers = [load.submit(prompt, output, "a") for prompt in prompts]
        left = [turns - 1] * users
        yield
        while load.core.has_work:
            load.step()
            for i, answer in enumerate(answers):
                if answer.finished is not None and left[i]:
                    left[i] -= 1
                    prompts[i] = np.concatenate((prompts[i], np.array(answer.tokens, np.int32), load.fresh_prompt(new)))
                    answers[i] = load.submit(prompts[i], output, "a")
            yield
        load.check_at_rest()

    say(f"overload: {what} with swap, with recompute, and with swap in the same total memory, in turns")
    equal = device * 2 // 3
    seconds = take_turns(
        serve("swap", device, 4 * device),
        serve("recompute", device, 0),
        serve("equal_total", equal, device - equal),
    )
    speed = dict(zip(loads, (users * turns * output / each for each in seconds), strict=True))
    return {
        "goodput_ratio": round(speed["swap"] / speed["recompute"], 2),
        "goodput_ratio_equal_total": round(speed["equal_total"] / speed["recompute"], 2),
        "goodput_tok_s": {name: round(value, 1) for name, value in speed.items()},
        "preemptions": {name: load.core.stats().preemptions for name, load in loads.items()},
        # Besides every message once.
        "tokens_computed_again": {
            name: load.core.stats().computed_tokens - users * turns * new for name, load in loads.items()
        },
        "users": users,
        "turns": turns,
        "message_tokens": new,
        "answer_tokens": output,
        "device_blocks": device,
        "demand_over_pool": round(demand / device, 1),
    }
