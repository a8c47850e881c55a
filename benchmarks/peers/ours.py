"""chatserve, from this checkout and in this environment."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.peers.process import CONTEXT_TOKENS, Launch, Model, Need

CHECKOUT = Path(__file__).parent.parent.parent
BLOCK_TOKENS = 16
QUANTIZATION = {"published": "auto", "bfloat16": "none"}


def launch(model: Model, need: Need, port: int, threads: int, source: str | None = None) -> Launch:
    """``source`` is what ``chatserve serve`` is given instead of the model's name."""
    command = [sys.executable, "-m", "chatserve", "serve", source or model.name, "--port", str(port)]
    command += ["--log-level", "warning", "--threads", str(threads), "--no-ui"]
    command += ["--max-num-seqs", str(max(64, need.streams)), "--max-model-len", str(CONTEXT_TOKENS)]
    command += ["--quantization", QUANTIZATION[need.weights]]
    if need.kv_tokens is not None:
        command += ["--num-gpu-blocks-override", str(need.kv_tokens // BLOCK_TOKENS)]
    return Launch(command, port, threads, model.name, ready_path="/readyz", folder=CHECKOUT)
