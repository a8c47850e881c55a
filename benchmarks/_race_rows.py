"""What each row of the race does and how its figures become one line: no processes, no clock.

A `LoadRow` makes the work of one round (the same for every server), reads figures from what came back, and says what
the memory bandwidth alone would allow. Ratios are always "how many times better is ours", also for latencies.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks._load import Summary, percentiles
from benchmarks._workload import Conversation, Prompts
from benchmarks.peers.process import Model, Need

PEERS = ("llama", "vllm", "hf")

Figures = dict[str, float]
Samples = Mapping[str, Sequence[Figures]]


@dataclass(frozen=True)
class Work:
    """One round of one row.

    Attributes:
        before: run first and not timed, one after another: what is to be in the cache.
        starts: seconds at which timed conversations begin; ``None`` for all at once.
        one_by_one: each timed conversation waits for the one before it.
    """

    timed: list[Conversation]
    before: list[Conversation] = field(default_factory=list)
    starts: list[float] | None = None
    one_by_one: bool = False


@dataclass(frozen=True)
class Metric:
    """One figure of a row."""

    name: str
    unit: str
    higher_is_better: bool


@dataclass(frozen=True)
class LoadRow:
    """A row that loads servers.

    Attributes:
        metrics: the first one is the row's own; the others are printed below it.
        make: the work of one round.
        read: every metric of one server's round.
        floor: from model and bytes per second, the best value of the first metric that reading memory allows.
        peers: whom the row is about; others are left out even if they run.
    """

    number: str
    title: str
    peers: tuple[str, ...]
    need: Need
    metrics: tuple[Metric, ...]
    goal: str
    make: Callable[[Prompts], Work]
    read: Callable[[Summary], Figures]
    floor: Callable[[Model, float], float] | None = None


DECODE = Metric("decode_only", "tokens/s", True)
END_TO_END = Metric("end_to_end", "tokens/s", True)
TTFT = Metric("ttft", "s", False)


def _rates(summary: Summary) -> Figures:
    return {
        "decode_only": summary.decode_only,
        "end_to_end": summary.end_to_end,
        "ttft": statistics.median(summary.ttfts),
        "tokens_per_event": summary.tokens_per_event,
    }


def _weights(model: Model, need: Need) -> int:
    return model.quantized_bytes if need.weights == "published" else model.bfloat16_bytes


def _decode_floor(streams: int, need: Need, shared: int, own: int, output: int) -> Callable[[Model, float], float]:
    """Tokens per second of ``streams`` where each step reads the weights, the shared context once and every own one."""

    def floor(model: Model, bandwidth: float) -> float:
        context = shared + streams * (own + output / 2)
        return streams * bandwidth / (_weights(model, need) + context * model.kv_bytes_per_token)

    return floor


def _prompt_floor(context: int) -> Callable[[Model, float], float]:
    """Seconds of one pass over the weights and the prompt's cache."""

    def floor(model: Model, bandwidth: float) -> float:
        return (model.quantized_bytes + context * model.kv_bytes_per_token) / bandwidth

    return floor


def one_stream() -> LoadRow:
    """A person alone: prompt of 64 tokens, answer of 256."""
    prompt, output = 64, 256
    need = Need(streams=1, context=1024)

    def floor(model: Model, bandwidth: float) -> float:
        # The prompt's pass gives the first token, so there are as many passes as tokens.
        context = prompt + output / 2
        return bandwidth / (_weights(model, need) + context * model.kv_bytes_per_token)

    return LoadRow(
        "1",
        f"one stream, {prompt} in, {output} out",
        PEERS,
        need,
        (END_TO_END, DECODE, TTFT),
        "≥1.25× llama.cpp (AMX build), ≥5× vLLM, ≥70 % of the floor",
        lambda prompts: Work(prompts.conversations(1, prompt_tokens=prompt, output_tokens=output)),
        _rates,
        floor,
    )


def many_streams(number: str, streams: int, peers: tuple[str, ...], goal: str, need: Need) -> LoadRow:
    """Distinct prompts of 256 tokens, answers of 128."""
    prompt, output = 256, 128
    return LoadRow(
        number,
        f"{streams} streams, distinct {prompt}-token prompts, {output} out",
        peers,
        need,
        (DECODE, END_TO_END, TTFT),
        goal,
        lambda prompts: Work(prompts.conversations(streams, prompt_tokens=prompt, output_tokens=output)),
        _rates,
        _decode_floor(streams, need, 0, prompt, output),
    )


def shared_prefix() -> LoadRow:
    """Sixteen people under one system prompt that nobody has computed yet."""
    streams, shared, own, output = 16, 1024, 64, 128
    need = Need(streams=streams, context=2048)

    def make(prompts: Prompts) -> Work:
        prefix = prompts.fresh(shared)
        return Work(prompts.conversations(streams, prompt_tokens=own, output_tokens=output, shared=prefix))

    return LoadRow(
        "4",
        f"{streams} streams sharing {shared:,} tokens, {own} own, {output} out",
        ("llama", "vllm"),
        need,
        (DECODE, END_TO_END, TTFT),
        "≥3.5× vLLM, ≥15× llama.cpp",
        make,
        _rates,
        _decode_floor(streams, need, shared, own, output),
    )


def cold_prompt() -> LoadRow:
    """A long prompt that nobody has seen."""
    prompt, repeats = 1024, 3

    def make(prompts: Prompts) -> Work:
        return Work(prompts.conversations(repeats, prompt_tokens=prompt, output_tokens=2), one_by_one=True)

    return LoadRow(
        "5",
        f"cold {prompt:,}-token prompt",
        PEERS,
        Need(streams=1, context=2048),
        (TTFT,),
        "≥2× vLLM, ≥6× llama.cpp",
        make,
        lambda summary: {"ttft": statistics.median(summary.ttfts)},
        _prompt_floor(prompt),
    )


def cached_prompt() -> LoadRow:
    """A long history that is in the cache, and 32 new tokens after it."""
    cached, new, output, repeats = 2048, 32, 16, 5

    def make(prompts: Prompts) -> Work:
        history = prompts.fresh(cached)
        return Work(
            prompts.conversations(repeats, prompt_tokens=new, output_tokens=output, shared=history),
            before=prompts.conversations(1, prompt_tokens=new, output_tokens=2, shared=history),
            one_by_one=True,
        )

    def read(summary: Summary) -> Figures:
        ttft, step = statistics.median(summary.ttfts), statistics.median(summary.itls)
        return {"ttft": ttft, "decode_steps": ttft / step, "decode_step": step}

    return LoadRow(
        "6",
        f"{cached:,} cached and {new} new tokens",
        ("llama", "vllm"),
        Need(streams=1, context=4096),
        (TTFT, Metric("decode_steps", "own decode steps", False), Metric("decode_step", "s", False)),
        "p50 ≤2.5 of our own decode steps, ≥2× vLLM with its prefix cache",
        make,
        read,
        _prompt_floor(cached + new),
    )


def conversations() -> LoadRow:
    """More conversations than the KV memory holds, arriving at random."""
    count, turns, first, later, output = 32, 6, 256, 64, 32
    working_set = count * (first + (turns - 1) * later + turns * output)
    # A whole number of blocks of any server.
    kv_tokens = working_set * 60 // 100 // 128 * 128

    def make(prompts: Prompts) -> Work:
        made = prompts.conversations(
            count, prompt_tokens=first, output_tokens=output, turns=turns, turn_tokens=later, mean_pause=1.0
        )
        return Work(made, starts=prompts.poisson(count, rate=2.0))

    def read(summary: Summary) -> Figures:
        times = percentiles(summary.ttfts)
        return {"end_to_end": summary.end_to_end, "ttft_p95": times["p95"], "ttft_p50": times["p50"]}

    return LoadRow(
        "7",
        f"{count} conversations of {turns} turns, Poisson arrivals, KV memory {kv_tokens:,} of {working_set:,} tokens",
        ("vllm",),
        Need(streams=count, context=2048, kv_tokens=kv_tokens),
        (END_TO_END, Metric("ttft_p95", "s", False), Metric("ttft_p50", "s", False)),
        "tokens/s and TTFT p95 ≥1.5× vLLM",
        make,
        read,
    )


def load_rows() -> dict[str, LoadRow]:
    """Rows 1 to 7 in order; ``2_bf16`` is row 2 in the same precision on both sides."""
    sixteen = "≥3× vLLM, ≥5× llama.cpp"
    rows = (
        one_stream(),
        many_streams("2", 16, PEERS, sixteen, Need(streams=16, context=1024)),
        many_streams("2_bf16", 16, ("vllm",), "no goal", Need(streams=16, context=1024, weights="bfloat16")),
        many_streams("3", 32, ("vllm",), "≥2.5× vLLM", Need(streams=32, context=1024)),
        shared_prefix(),
        cold_prompt(),
        cached_prompt(),
        conversations(),
    )
    return {row.number: row for row in rows}


def compare(metric: Metric, samples: Samples) -> dict[str, Any]:
    """Medians by server, and medians over rounds of how many times better ours is; ``None`` where nothing ran."""
    result: dict[str, Any] = {"unit": metric.unit}
    values = {name: [figures[metric.name] for figures in rounds] for name, rounds in samples.items() if rounds}
    for name in ("ours", *PEERS):
        result[name] = significant(statistics.median(values[name])) if name in values else None
    for name in PEERS:
        ratio = None
        if "ours" in values and name in values:
            pairs = zip(values["ours"], values[name], strict=True)
            ratio = statistics.median(a / b if metric.higher_is_better else b / a for a, b in pairs)
        result[f"over_{name}"] = None if ratio is None else significant(ratio)
    return result


def line_of(row: LoadRow, samples: Samples, floor: float | None) -> dict[str, Any]:
    """One row's part of the JSON object.

    Args:
        samples: figures of each round by server, ``ours`` among them.
        floor: the first metric's value at the byte floor; ``None`` where memory does not decide.
    """
    main = row.metrics[0]
    result = {"title": row.title, "goal": row.goal, "metric": main.name, **compare(main, samples)}
    result["floor"] = result["floor_share"] = None
    if floor is not None:
        result["floor"] = significant(floor)
        if result["ours"] is not None:
            share = result["ours"] / floor if main.higher_is_better else floor / result["ours"]
            result["floor_share"] = significant(share)
    for metric in row.metrics[1:]:
        result[metric.name] = compare(metric, samples)
    result["rounds"] = {
        name: [{key: significant(value) for key, value in figures.items()} for figures in rounds]
        for name, rounds in samples.items()
    }
    return result


def significant(value: float) -> float:
    """Four significant digits: more would be noise."""
    return float(f"{value:.4g}")
