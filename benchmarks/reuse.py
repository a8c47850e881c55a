"""How much of a conversation's past is reused by its next turn?

Each of N conversations has two turns over ``/v1/chat/completions``, as any OpenAI client would send them: the second
request repeats the first prompt and the answer as plain text. Reported per conversation: `cached_tokens` of the
second turn over all tokens of the first (prompt and answer). Greedy once, sampled N times. Then a second
conversation with the same system prompt: how many of its tokens it found.
Run: ``scripts/bench reuse [--json] [--conversations 100] [--url http://…]``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from typing import Any

from benchmarks._local_server import local_server, post

TOPICS = (
    "tides", "bread", "chess", "glaciers", "violins", "bees", "maps", "rust", "sleep", "bridges",
    "honey", "comets", "paper", "salt", "kites", "owls", "clocks", "tea", "wool", "echoes",
)  # fmt: skip


def two_turns(url: str, model: str, index: int, **options: Any) -> tuple[float, int]:
    """(share of the first turn that the second reused, tokens of the first turn)."""
    topic = TOPICS[index % len(TOPICS)]
    messages = [{"role": "user", "content": f"Conversation {index}. Tell me something about {topic}."}]
    request = {"model": model, "max_tokens": 96, **options}
    first = post(f"{url}/v1/chat/completions", {**request, "messages": messages})
    messages += [
        {"role": "assistant", "content": first["choices"][0]["message"]["content"]},
        {"role": "user", "content": "Go on."},
    ]
    second = post(f"{url}/v1/chat/completions", {**request, "messages": messages, "max_tokens": 1})
    tokens = first["usage"]["total_tokens"]
    return second["usage"]["prompt_tokens_details"]["cached_tokens"] / tokens, tokens


def same_system_prompt(url: str, model: str) -> dict[str, int]:
    """Two conversations under one long system prompt: what the second one found of it."""
    system = "You are a careful guide for visitors of a harbour museum. " * 12
    usages = []
    for question in ("When do you open?", "Where is the lighthouse lamp?"):
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        body = {"model": model, "messages": messages, "max_tokens": 8, "temperature": 0}
        usages.append(post(f"{url}/v1/chat/completions", body)["usage"])
    shared = post(
        f"{url}/tokenize",
        {"model": model, "messages": [{"role": "system", "content": system}], "add_generation_prompt": False},
    )["count"]
    cached = usages[1]["prompt_tokens_details"]["cached_tokens"]
    return {"system_tokens": shared, "prompt_tokens": usages[1]["prompt_tokens"], "cached_tokens": cached}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--conversations", type=int, default=100)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--url", help="a running server; by default one is started")
    arguments = parser.parse_args()
    server = contextlib.nullcontext(arguments.url) if arguments.url else local_server(arguments.model)
    with server as url:
        greedy, greedy_tokens = two_turns(url, arguments.model, 0, temperature=0)
        sampled = []
        for index in range(1, arguments.conversations + 1):
            sampled.append(two_turns(url, arguments.model, index, temperature=1.0, seed=index)[0])
            if index % 10 == 0:
                print(f"{index} of {arguments.conversations} conversations", file=sys.stderr)
        system = same_system_prompt(url, arguments.model)
    deciles = statistics.quantiles(sampled, n=10, method="inclusive")
    result = {
        "greedy_reuse": round(greedy, 4),
        "greedy_first_turn_tokens": greedy_tokens,
        "conversations": len(sampled),
        "sampled_reuse": {
            "min": round(min(sampled), 4),
            "p10": round(deciles[0], 4),
            "p50": round(statistics.median(sampled), 4),
            "p90": round(deciles[-1], 4),
            "max": round(max(sampled), 4),
            "share_at_least_0.9": sum(share >= 0.9 for share in sampled) / len(sampled),
        },
        "same_system_prompt": system,
    }
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"greedy: the second turn reuses {greedy:.1%} of the first turn's {greedy_tokens} tokens")
    print(f"sampled, {len(sampled)} conversations:")
    for low in (0.0, 0.5, 0.8, 0.9, 0.95, 0.98):
        high = {0.0: 0.5, 0.5: 0.8, 0.8: 0.9, 0.9: 0.95, 0.95: 0.98, 0.98: 1.01}[low]
        count = sum(low <= share < high for share in sampled)
        print(f"  {low:>5.0%} to {min(high, 1):>4.0%}  {count:>4}  {'#' * count}")
    print(
        f"same system prompt: {system['cached_tokens']} of the second conversation's {system['prompt_tokens']} prompt "
        f"tokens were cached; the system message has {system['system_tokens']}"
    )


if __name__ == "__main__":
    main()
