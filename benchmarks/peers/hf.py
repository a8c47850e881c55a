"""Hugging Face transformers: static batches through ``generate``, behind a small server of ours.

``transformers serve`` itself takes no token ids, so it could not be given the same work as the others.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.peers.process import Launch, Model, Need, executable

VARIABLE = "CHATSERVE_PEER_HF"


def launch(model: Model, need: Need, port: int, threads: int) -> Launch:
    """bfloat16 weights.

    Raises:
        Missing: the variable is not set.
    """
    python = executable(VARIABLE, "a Python that has torch and transformers 5")
    program = Path(__file__).with_name("hf_server.py")
    # Isolated: the folder of a script would come first, and modules here have the names of packages.
    command = [str(python), "-I", str(program), str(model.folder), str(port), str(threads), str(need.streams)]
    return Launch(command, port, threads, model.name, {"HF_HUB_OFFLINE": "1"})
