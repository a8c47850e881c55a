"""How many tokens per second does the engine make without any network, beside transformers on the same weights?

Drives `EngineCore` in this process with the executor that serves, and `transformers.generate` with the same dtype,
threads and kind of prompts, in the same run and interleaved round by round. Prompts are random tokens, distinct and
fresh every time, so nothing comes from the prefix cache; decoding is greedy and ignores the end of text.
Run: ``scripts/bench offline [--json]``; about six minutes on two cores, most of them transformers one by one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from chatserve.config import EngineConfig, ModelConfig
from chatserve.engine.core import EngineCore
from chatserve.engine.protocol import AddRequest, EngineInfo
from chatserve.model import store
from chatserve.sampling_params import SamplingParams
from chatserve.scope import Scope
from chatserve.worker.executor import create_executor

PROMPT_TOKENS, OUTPUT_TOKENS = 256, 64
CONCURRENCIES = (1, 2, 4, 8, 16, 32)
PREFILLS = (512, 1024)
STATIC_BATCH = 16
SCOPE = Scope("tenant", "bench")

Prompt = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Timing:
    """One batch: ``tokens`` output tokens in ``seconds``; from the moment every sequence had its first token,
    ``decode_tokens`` in ``decode_seconds``."""

    tokens: int
    seconds: float
    decode_tokens: int
    decode_seconds: float

    @property
    def end_to_end(self) -> float:
        """Output tokens per second, prefill included."""
        return self.tokens / self.seconds

    @property
    def decode_only(self) -> float:
        """Output tokens per second while all sequences decode."""
        return self.decode_tokens / self.decode_seconds


class Engine:
    """Our engine, in this process."""

    def __init__(self, config: EngineConfig) -> None:
        executor, self.info = create_executor(config)
        self._core = EngineCore(config, executor, self.info)
        self._next_id = 0

    def generate(self, prompts: list[Prompt], num_tokens: int) -> Timing:
        """All prompts at once, to the end."""
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, seed=0)
        started = time.perf_counter()
        for prompt in prompts:
            self._core.add(AddRequest(self._next_id, prompt.tobytes(), sampling, (SCOPE,)))
            self._next_id += 1
        seen: set[int] = set()
        tokens, all_decoding, tokens_then = 0, 0.0, 0
        while self._core.has_work:
            frame = self._core.step()
            failed = [event for event in frame.finished if event.reason == "error"]
            if failed:
                raise RuntimeError(f"generation failed: {failed[0].error_message}")
            ids = np.frombuffer(frame.request_ids, dtype="<i8").tolist()
            tokens += len(ids)
            if len(seen) < len(prompts):
                seen.update(ids)
                if len(seen) == len(prompts):
                    all_decoding, tokens_then = time.perf_counter(), tokens
        ended = time.perf_counter()
        if tokens != len(prompts) * num_tokens:
            raise RuntimeError(f"expected {len(prompts) * num_tokens} tokens, got {tokens}")
        return Timing(tokens, ended - started, tokens - tokens_then, ended - all_decoding)


class Transformers:
    """``AutoModelForCausalLM.generate`` on the same folder, in the dtype the engine chose."""

    def __init__(self, folder: str, dtype: str) -> None:
        import torch
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self._torch = torch
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        self.version = transformers.__version__

    def generate(self, prompts: list[Prompt], num_tokens: int) -> Timing:
        """One static batch."""
        times: list[float] = []

        def note_time(input_ids: Any, scores: Any, **_: Any) -> Any:
            times.append(time.perf_counter())
            return self._torch.zeros(len(input_ids), dtype=self._torch.bool)

        ids = self._torch.from_numpy(np.stack(prompts).astype(np.int64))
        started = time.perf_counter()
        self._model.generate(
            ids,
            attention_mask=self._torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=[note_time],
        )
        ended = time.perf_counter()
        n = len(prompts)
        return Timing(n * num_tokens, ended - started, n * (num_tokens - 1), times[-1] - times[0])

    def one_after_another(self, prompts: list[Prompt], num_tokens: int) -> Timing:
        """The same work without batching."""
        parts = [self.generate([prompt], num_tokens) for prompt in prompts]
        return Timing(
            sum(part.tokens for part in parts),
            sum(part.seconds for part in parts),
            sum(part.decode_tokens for part in parts),
            sum(part.decode_seconds for part in parts),
        )


def measure(model: str, rounds: int, threads: int | None, kernels: Literal["auto", "torch"]) -> dict[str, Any]:
    """Run everything ``rounds`` times, ours and theirs in turn; medians."""
    prepared = store.resolve(model)
    served = ModelConfig(path=str(prepared.path), name=prepared.name)
    engine = Engine(EngineConfig(model=served, threads=threads, kernels=kernels))
    theirs = Transformers(str(prepared.path), engine.info.dtype)
    rng = np.random.default_rng()

    def prompts(count: int, length: int = PROMPT_TOKENS) -> list[Prompt]:
        return [rng.integers(3, engine.info.vocab_size, length, dtype=np.int32) for _ in range(count)]

    engine.generate(prompts(2, 32), 4)
    theirs.generate(prompts(2, 32), 4)

    ours: dict[str, list[Timing]] = {str(n): [] for n in CONCURRENCIES}
    prefill: dict[str, list[float]] = {str(n): [] for n in PREFILLS}
    peers: dict[str, list[Timing]] = {"1": [], f"{STATIC_BATCH}_static": [], f"{STATIC_BATCH}_serial": []}
    loads = [os.getloadavg()[0]]
    for round_number in range(1, rounds + 1):
        for n in CONCURRENCIES:
            ours[str(n)].append(engine.generate(prompts(n), OUTPUT_TOKENS))
            log(f"round {round_number}: {n:2d} sequences, {ours[str(n)][-1].end_to_end:7.1f} tok/s end to end")
        for n in PREFILLS:
            prefill[str(n)].append(n / engine.generate(prompts(1, n), 1).seconds)
        peers["1"].append(theirs.generate(prompts(1), OUTPUT_TOKENS))
        peers[f"{STATIC_BATCH}_static"].append(theirs.generate(prompts(STATIC_BATCH), OUTPUT_TOKENS))
        peers[f"{STATIC_BATCH}_serial"].append(theirs.one_after_another(prompts(STATIC_BATCH), OUTPUT_TOKENS))
        for name, timings in peers.items():
            log(f"round {round_number}: transformers {name}, {timings[-1].end_to_end:7.1f} tok/s end to end")
        loads.append(os.getloadavg()[0])
    return report(engine.info, theirs.version, ours, prefill, peers, loads, rounds) | {"kernels": kernels}


def report(
    info: EngineInfo,
    transformers_version: str,
    ours: dict[str, list[Timing]],
    prefill: dict[str, list[float]],
    peers: dict[str, list[Timing]],
    loads: list[float],
    rounds: int,
) -> dict[str, Any]:
    """The one JSON object: medians over rounds, and ratios of end-to-end medians."""

    def medians(timings: dict[str, list[Timing]], attribute: str) -> dict[str, float]:
        return {
            name: round(statistics.median(getattr(timing, attribute) for timing in values), 1)
            for name, values in timings.items()
        }

    end_to_end, peer_end_to_end = medians(ours, "end_to_end"), medians(peers, "end_to_end")
    batch = str(STATIC_BATCH)
    return {
        "decode_tok_s": end_to_end,
        "decode_only_tok_s": medians(ours, "decode_only"),
        "prefill_tok_s": {name: round(statistics.median(values), 1) for name, values in prefill.items()},
        "transformers": {
            "decode_tok_s": peer_end_to_end,
            "decode_only_tok_s": medians(peers, "decode_only"),
            "version": transformers_version,
        },
        "ratios": {
            "1_vs_transformers_1": round(end_to_end["1"] / peer_end_to_end["1"], 2),
            "16_vs_transformers_16_static": round(end_to_end[batch] / peer_end_to_end[f"{batch}_static"], 2),
            "16_vs_transformers_16_serial": round(end_to_end[batch] / peer_end_to_end[f"{batch}_serial"], 2),
        },
        "meaning": {
            "decode_tok_s": "output tokens per second from submission to the last token, prefill included, all "
            "sequences together",
            "decode_only_tok_s": "the same from the moment every sequence has its first token",
            "prefill_tok_s": "prompt tokens per second to the first token of one prompt",
        },
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "rounds": rounds,
        "model": info.model,
        "dtype": info.dtype,
        "threads": info.threads,
        "openmp_spins": os.environ.get("GOMP_SPINCOUNT"),
        "load_average": [round(load, 2) for load in loads],
    }


def log(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def table(result: dict[str, Any]) -> str:
    """The numbers for people."""
    lines = [f"{'sequences':>12} {'end to end':>12} {'decode only':>12}   tokens/s"]
    for name, value in result["decode_tok_s"].items():
        lines.append(f"{name:>12} {value:>12} {result['decode_only_tok_s'][name]:>12}")
    peers = result["transformers"]
    for name, value in peers["decode_tok_s"].items():
        lines.append(f"{'hf ' + name:>12} {value:>12} {peers['decode_only_tok_s'][name]:>12}")
    lines += [f"prefill {name}: {value} tokens/s" for name, value in result["prefill_tok_s"].items()]
    lines += [f"{name}: {value}" for name, value in result["ratios"].items()]
    served = f"{result['model']}, {result['dtype']}, kernels {result['kernels']}, {result['threads']} threads"
    lines.append(f"{served}, load {result['load_average']}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--kernels", choices=("auto", "torch"), default="auto", help="compiled kernels, or plain torch")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    arguments = parser.parse_args()
    result = measure(arguments.model, arguments.rounds, arguments.threads, arguments.kernels)
    print(json.dumps(result) if arguments.json else table(result))


if __name__ == "__main__":
    main()
