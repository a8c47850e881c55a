"""How does an OpenAI-compatible server behave under a load, seen from a client?

Closed loop (`--concurrency`: so many conversations at once) or open loop (`--rate`: Poisson arrivals, whatever the
server does), single prompts, prompts that share a beginning, conversations of several turns, and a mix of tenants with
keys of their own. Token counts are the server's (`usage`), times are the client's, from the moment a request was due.
Prompts are token ids, so every server gets the same work; `--endpoint chat` sends words for servers that take no ids.
Run: ``scripts/bench serving --url http://127.0.0.1:8000 --model smollm2-135m --rate 4 --json``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from benchmarks._load import LoadError, Outcome, Summary, run_load
from benchmarks._plot import PlotError, draw
from benchmarks._stream_client import Endpoint, Target
from benchmarks._workload import Prompts, Tenant


def parse_tenant(text: str) -> Tenant:
    """``NAME=KEY`` or ``NAME=KEY:WEIGHT``; weights are 1 unless given.

    Raises:
        click.BadParameter: it is neither.
    """
    name, _, rest = text.partition("=")
    key, colon, weight = rest.rpartition(":")
    if not colon:
        key, weight = rest, "1"
    try:
        tenant = Tenant(name, key, float(weight))
    except ValueError:
        raise click.BadParameter(f"{weight!r} is no weight.") from None
    if not (name and key and tenant.weight > 0):
        raise click.BadParameter(f"{text!r} is not NAME=KEY or NAME=KEY:WEIGHT.")
    return tenant


def report(outcome: Outcome, ttft: float | None, itl: float | None) -> dict[str, Any]:
    """The numbers of one run; goodput where there is an objective, and each tenant's and turn's own latencies."""
    summary = Summary(outcome)
    result = summary.as_dict()
    if ttft is not None or itl is not None:
        objective = {"ttft_s": ttft, "itl_s": itl}
        bounds = (float("inf") if ttft is None else ttft, float("inf") if itl is None else itl)
        result["goodput"] = {"objective": objective, **summary.goodput(*bounds)}
    for name, attribute in (("tenants", "tenant"), ("turns", "turn")):
        groups: dict[Any, list[Any]] = {}
        for reply in summary.replies:
            groups.setdefault(getattr(reply, attribute), []).append(reply)
        if len(groups) > 1:
            parts = {str(key): Summary(Outcome(replies, outcome.began, 0.0)) for key, replies in sorted(groups.items())}
            result[name] = {
                key: {k: v for k, v in part.as_dict().items() if k != "client_cpu_us_per_token"}
                for key, part in parts.items()
            }
    return result


def table(result: dict[str, Any]) -> str:
    """The numbers for people."""
    lines = [
        f"{result['requests']} requests in {result['seconds']:.1f} s: {result['prompt_tokens']} prompt tokens "
        f"({result['cached_tokens'] if result['cached_tokens'] is not None else 'unknown'} reused), "
        f"{result['output_tokens']} output tokens",
        f"{result['output_tokens_per_second']:.1f} output tokens/s, "
        f"{result['total_tokens_per_second']:.1f} with prompts",
        f"{'':>24} {'p50':>9} {'p95':>9} {'p99':>9} {'mean':>9}   milliseconds",
    ]
    parts = [("all", result), *result.get("tenants", {}).items()]
    parts += [(f"turn {int(turn) + 1}", part) for turn, part in result.get("turns", {}).items()]
    for name, part in parts:
        for label, key in (("first token", "ttft_s"), ("inter-token", "itl_s")):
            if part[key]:
                values = " ".join(f"{part[key][p] * 1e3:9.1f}" for p in ("p50", "p95", "p99", "mean"))
                lines.append(f"{name + ', ' + label:>24} {values}")
    if goodput := result.get("goodput"):
        lines.append(
            f"goodput: {goodput['share']:.0%} of the requests, {goodput['requests_per_second']:.2f} requests/s, "
            f"{goodput['tokens_per_second']:.1f} tokens/s within {goodput['objective']}"
        )
    lines.append(
        f"client: {result['client_cpu_us_per_token']:.1f} µs of CPU per token, "
        f"{result['tokens_per_event']:.3f} tokens per event; load average {result['load_average']}"
    )
    return "\n".join(lines)


@click.command(help=__doc__)
@click.option("--url", default="http://127.0.0.1:8000", show_default=True)
@click.option("--model", default="smollm2-135m", show_default=True)
@click.option("--endpoint", type=click.Choice(("completions", "chat")), default="completions", show_default=True)
@click.option("--api-key", help="One key for everything.")
@click.option("--tenant", "tenants", type=parse_tenant, multiple=True, metavar="NAME=KEY[:WEIGHT]", help="Repeatable.")
@click.option("--concurrency", type=click.IntRange(1), help="Closed loop: conversations at once.  [default: 8]")
@click.option("--rate", type=click.FloatRange(0, min_open=True), help="Open loop: conversations begun per second.")
@click.option("--num-conversations", type=click.IntRange(1), default=64, show_default=True)
@click.option("--prompt-tokens", type=click.IntRange(1), default=256, show_default=True, help="Of the first turn.")
@click.option("--shared-tokens", type=click.IntRange(0), default=0, help="More, that every conversation begins with.")
@click.option("--output-tokens", type=click.IntRange(1), default=64, show_default=True)
@click.option("--turns", type=click.IntRange(1), default=1, show_default=True)
@click.option("--turn-tokens", type=click.IntRange(1), default=32, show_default=True, help="Of each later turn.")
@click.option("--mean-pause", type=click.FloatRange(0), default=0.0, help="Seconds before each later turn.")
@click.option("--ttft-objective", type=click.FloatRange(0), help="Seconds; for goodput.")
@click.option("--itl-objective", type=click.FloatRange(0), help="Mean seconds between tokens; for goodput.")
@click.option("--vocab-size", type=click.IntRange(2000), default=49152, show_default=True, help="Ids lie below it.")
@click.option("--seed", type=int, default=None, help="Default: another one each time, printed.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw the run into this PNG file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def main(
    url: str,
    model: str,
    endpoint: Endpoint,
    api_key: str | None,
    tenants: tuple[Tenant, ...],
    concurrency: int | None,
    rate: float | None,
    num_conversations: int,
    prompt_tokens: int,
    shared_tokens: int,
    output_tokens: int,
    turns: int,
    turn_tokens: int,
    mean_pause: float,
    ttft_objective: float | None,
    itl_objective: float | None,
    vocab_size: int,
    seed: int | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    if concurrency is not None and rate is not None:
        raise click.UsageError("--concurrency is a closed loop and --rate an open one: choose.")
    if tenants and api_key is not None:
        raise click.UsageError("--api-key is for everybody and --tenant for each: choose.")
    address = urlsplit(url)
    if address.scheme != "http" or address.hostname is None:
        raise click.UsageError(f"--url {url} is not an http:// address.")
    target = Target(address.hostname, address.port or 80, model)
    seed = int.from_bytes(os.urandom(4), "little") if seed is None else seed
    prompts = Prompts(vocab_size, seed)
    conversations = prompts.conversations(
        num_conversations,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        shared=prompts.fresh(shared_tokens) if shared_tokens else (),
        turns=turns,
        turn_tokens=turn_tokens,
        mean_pause=mean_pause,
        tenants=tenants or (Tenant("", api_key),),
    )
    starts = None if rate is None else prompts.poisson(num_conversations, rate)
    try:
        outcome = run_load(target, conversations, concurrency=concurrency or 8, starts=starts, endpoint=endpoint)
        result = report(outcome, ttft_objective, itl_objective) | {
            "load": {"rate": rate} if rate is not None else {"concurrency": concurrency or 8},
            "seed": seed,
            "load_average": round(os.getloadavg()[0], 2),
        }
        if plot is not None:
            load = f"{concurrency or 8} at once" if rate is None else f"{rate:g} conversations begun per second"
            draw(outcome, plot, f"{model} at {url}: {load}")
    except (LoadError, PlotError) as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        raise click.ClickException(f"{url}: {error}") from error
    click.echo(json.dumps(result) if as_json else table(result))


if __name__ == "__main__":
    main()
