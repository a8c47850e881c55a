"""Can many tenants share one engine and trust it?

Seven questions, in this process, without network, on the real model where one is needed: what a published prompt
saves; whether service is fair; what a quiet tenant feels of a flood; what a better class waits; what swapping saves
under overload; and whether response times betray what another tenant has cached, or how much of a guessed key is
right. Each part prints its sizes and trial counts beside its result.
Run: ``scripts/bench tenants [--json] [--only PART …] [--quick]``; about fifteen minutes on two cores.

`overload` is a *GPU proxy*: on a CPU both tiers are the same memory, so it measures the mechanism with a copy that
costs what memory bandwidth costs, not what a bus does.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable

from benchmarks._engine import Loader
from benchmarks._tenant_memory import overload, shared_prompt
from benchmarks._tenant_parts import Result, say
from benchmarks._tenant_service import fairness, noisy_neighbour, priority
from benchmarks._tenant_timing import key_check, timing_attack

PARTS: dict[str, Callable[[Loader, bool], Result]] = {
    "shared_prompt": shared_prompt,
    "fairness": fairness,
    "noisy_neighbour": noisy_neighbour,
    "priority": priority,
    "overload": overload,
    "timing_attack": timing_attack,
    "key_check": key_check,
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
