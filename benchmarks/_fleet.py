"""The servers of one race: started when first needed, kept while rows need them alike, one of them at work at a time.

Knows which servers there are on this machine and which are missing, and why. While one is measured the others are
stopped where they are (SIGSTOP), except ours, which would take that for the death of its engine and idles in the
kernel; what CPU time bystanders take all the same is booked, so that a noisy one shows.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks._local_server import free_port
from benchmarks.peers import hf, llama, ours, vllm
from benchmarks.peers.process import Launch, Missing, Model, Need, Server
from chatserve.model import store
from chatserve.model.cache_folder import cache_root

Launcher = Callable[[Model, Need, int, int], Launch]

LAUNCHERS: dict[str, Launcher] = {"ours": ours.launch, "llama": llama.launch, "vllm": vllm.launch, "hf": hf.launch}

SETTLE_SECONDS = 0.5
"""Before a measurement: until threads that spun at the end of the last one sleep."""


def say(text: str) -> None:
    """Progress, on the error stream."""
    print(text, file=sys.stderr, flush=True)


def model_forms(name: str, gguf: Path | None) -> Model:
    """The model in all forms, converted first if need be.

    Args:
        gguf: the published file; ``None`` takes the one that was pulled for a registry name.

    Raises:
        Missing: there is no GGUF file to compare on.
    """
    prepared = store.resolve(name)
    if gguf is None and name in store.REGISTRY:
        gguf = cache_root() / "gguf" / Path(store.REGISTRY[name].member).name
    if gguf is None or not gguf.is_file():
        raise Missing(f"there is no GGUF file of {name}; name one with --gguf")
    config: dict[str, Any] = json.loads((prepared.path / "config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    bfloat16_bytes = (prepared.path / "model.safetensors").stat().st_size
    quantized = prepared.path / "quantized.safetensors"
    return Model(
        name=name,
        folder=_folder_for_others(prepared, quantized),
        gguf=gguf.absolute(),
        vocab_size=int(config["vocab_size"]),
        quantized_bytes=quantized.stat().st_size if quantized.is_file() else bfloat16_bytes,
        bfloat16_bytes=bfloat16_bytes,
        kv_bytes_per_token=2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim,
    )


def _folder_for_others(prepared: store.PreparedModel, quantized: Path) -> Path:
    """Links to the prepared folder's files but our quantised blocks: other servers load every weight file they see.

    It stays where it is, since a server may keep what it compiled under the path of the model.
    """
    folder = (cache_root() / "race" / prepared.name).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    for link in folder.iterdir():
        link.unlink()
    for file in prepared.path.iterdir():
        if file != quantized:
            (folder / file.name).symlink_to(file.absolute())
    return folder


class Fleet:
    """Servers by name, started on demand.

    Attributes:
        missing: reason by name for every server that is asked for and not on this machine.
        start_seconds: every observed start by name, oldest first.
        os_threads: threads of all processes of a server when it was last measured.
        idle_cpu: the largest share of one core that bystanders took together while another was measured.
    """

    def __init__(self, model: Model, names: Sequence[str], threads: int, first_port: int | None = None) -> None:
        self.model = model
        self.threads = threads
        self.missing: dict[str, str] = {}
        self.start_seconds: dict[str, list[float]] = {}
        self.os_threads: dict[str, int] = {}
        self.idle_cpu = 0.0
        self._servers: dict[str, Server] = {}
        self._ports = {
            name: free_port() if first_port is None else first_port + index for index, name in enumerate(LAUNCHERS)
        }
        for name in names:
            try:
                self.launch(name, Need())
            except Missing as reason:
                self.missing[name] = str(reason)
                say(f"{name} is missing: {reason}")
        self.names = [name for name in names if name not in self.missing]

    def launch(self, name: str, need: Need) -> Launch:
        """How a server would be started for this need.

        Raises:
            Missing: it is not on this machine.
        """
        return LAUNCHERS[name](self.model, need, self._ports[name], self.threads)

    def get(self, name: str, need: Need) -> Server:
        """The running server that meets a need, started anew if the one that runs would be started otherwise."""
        launch = self.launch(name, need)
        server = self._servers.get(name)
        if server is None or server.launch != launch:
            self.stop(name)
            server = self.start(name, launch)
            self._servers[name] = server
        return server

    def start(self, name: str, launch: Launch) -> Server:
        """Start one and book how long it took; the caller stops it, unless it came from `get`."""
        server = Server(name, launch)
        self.start_seconds.setdefault(name, []).append(server.start_seconds)
        say(f"{name} is ready after {server.start_seconds:.2f} s")
        return server

    @contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """Around a measurement of ``name``: others stand still, their CPU time and its own threads are booked."""
        others = [server for other, server in self._servers.items() if other != name]
        stopped = [server for other, server in self._servers.items() if other not in (name, "ours")]
        for server in stopped:
            server.pause()
        time.sleep(SETTLE_SECONDS)
        cpu, began = sum(server.cpu_seconds() for server in others), time.perf_counter()
        try:
            yield
        finally:
            for server in stopped:
                server.resume()
        elapsed = time.perf_counter() - began
        idle = (sum(server.cpu_seconds() for server in others) - cpu) / elapsed
        if idle > 0.02 and elapsed > 1.0:  # below a second the kernel's ticks decide
            say(f"Bystanders used {idle:.0%} of a core while {name} was measured.")
        self.idle_cpu = max(self.idle_cpu, idle if elapsed > 1.0 else 0.0)
        if name in self._servers:
            self.os_threads[name] = self._servers[name].num_os_threads()

    def stop(self, name: str) -> None:
        """Idempotent."""
        server = self._servers.pop(name, None)
        if server is not None:
            server.stop()

    def stop_all(self) -> None:
        """Every server that `get` started."""
        for name in list(self._servers):
            self.stop(name)


def load_average() -> float:
    """Of the last minute."""
    return round(os.getloadavg()[0], 2)
