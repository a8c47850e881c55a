"""Runs one server of the race: started, waited for, watched, stopped with everything it started.

Knows processes and readiness; what to run is a `Launch`, made by the module of the server.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from benchmarks._stream_client import Target

HOST = "127.0.0.1"
CONTEXT_TOKENS = 4096
"""What servers that page their KV cache are started with, whatever a row needs, so that rows can share them."""

_POLL_SECONDS = 0.02
_STOP_SECONDS = 30.0
_TICKS = os.sysconf("SC_CLK_TCK")


class Missing(Exception):  # noqa: N818 - a fact about this machine, not a failure
    """This server is not installed here; the message says what to set."""


class ServerError(RuntimeError):
    """A server did not start, or died; the message ends with the last lines of its log."""


@dataclass(frozen=True)
class Model:
    """One model in the forms that servers read.

    Attributes:
        name: the name clients use.
        folder: Hugging Face layout with one bfloat16 ``model.safetensors``, and nothing beside it.
        gguf: the same weights as published, for servers that read GGUF.
        quantized_bytes, bfloat16_bytes: what one pass over the weights reads.
        kv_bytes_per_token: of a bfloat16 cache.
    """

    name: str
    folder: Path
    gguf: Path
    vocab_size: int
    quantized_bytes: int
    bfloat16_bytes: int
    kv_bytes_per_token: int


@dataclass(frozen=True)
class Need:
    """What a row of the race needs a server to be able to do. Two rows with equal needs share a server.

    Attributes:
        streams: requests in flight at once.
        context: tokens of the longest sequence, at most `CONTEXT_TOKENS`.
        kv_tokens: exact size of the KV cache, all its tiers together; ``None`` leaves it large.
        weights: as published (4-bit where the server can), or in bfloat16.
    """

    streams: int = 32
    context: int = CONTEXT_TOKENS
    kv_tokens: int | None = None
    weights: Literal["published", "bfloat16"] = "published"


@dataclass(frozen=True)
class Launch:
    """How to start a server, and how to speak to it.

    Attributes:
        environment: variables beside this process's own.
        ready_path: answers 200 once requests are served.
        extra: what its bodies need beside OpenAI's fields.
        threads: compute threads it is told to use.
        folder: where it is started. Python looks for packages there, so others do not start in this checkout.
    """

    command: list[str]
    port: int
    threads: int
    model: str
    environment: Mapping[str, str] = field(default_factory=dict)
    ready_path: str = "/health"
    extra: dict[str, Any] = field(default_factory=dict)
    folder: Path = Path("/")
    patience: float = 400.0


class Server:
    """One running server; its session is a process group of its own, so nothing it started outlives it.

    Attributes:
        start_seconds: from its start to its first 200 on the readiness path.
    """

    def __init__(self, name: str, launch: Launch) -> None:
        """Start it and wait until it is ready.

        Raises:
            ServerError: it ended, or was not ready in time, or its port belongs to somebody else.
        """
        self.name = name
        self.launch = launch
        self.target = Target(HOST, launch.port, launch.model, launch.extra)
        if is_taken(launch.port):
            raise ServerError(f"port {launch.port}, which {name} was to have, is taken")
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `stop`
        began = time.perf_counter()
        self.process = subprocess.Popen(
            launch.command,
            env={**os.environ, **launch.environment},
            cwd=launch.folder,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            self._wait_ready(began)
        except BaseException:
            self.stop()
            raise
        self.start_seconds = time.perf_counter() - began

    def _wait_ready(self, began: float) -> None:
        url = f"http://{self.target.host}:{self.target.port}{self.launch.ready_path}"
        while not is_ready(url):
            if self.process.poll() is not None:
                raise ServerError(f"{self.name} ended with status {self.process.returncode}.\n{self.log_tail()}")
            if time.perf_counter() - began > self.launch.patience:
                raise ServerError(f"{self.name} was not ready after {self.launch.patience:g} s.\n{self.log_tail()}")
            time.sleep(_POLL_SECONDS)

    def pause(self) -> None:
        """Stop every process where it is (SIGSTOP), memory and connections kept."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Undo `pause`."""
        os.killpg(self.process.pid, signal.SIGCONT)

    def stop(self) -> None:
        """End the whole process group; returns when it is gone. Idempotent."""
        if self._log.closed:
            return
        for number in (signal.SIGCONT, signal.SIGTERM):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
        deadline = time.monotonic() + _STOP_SECONDS
        while time.monotonic() < deadline and (self.process.poll() is None or self._members()):
            time.sleep(_POLL_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._log.close()

    def log_tail(self, num_bytes: int = 3000) -> str:
        """The end of what it printed."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - num_bytes))
        return self._log.read().decode(errors="replace")

    def cpu_seconds(self) -> float:
        """CPU time of all its processes so far, in the kernel's ticks (10 ms)."""
        return sum(sum(map(int, fields[11:13])) for fields in self._members()) / _TICKS

    def num_os_threads(self) -> int:
        """Threads of all its processes, whatever they do."""
        return sum(int(fields[17]) for fields in self._members())

    def _members(self) -> list[list[str]]:
        """``/proc/*/stat`` from the third field on, of every living process of the session."""
        members = []
        for folder in Path("/proc").iterdir():
            if not folder.name.isdecimal():
                continue
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            if int(fields[3]) == self.process.pid and fields[0] != "Z":
                members.append(fields)
        return members


def is_taken(port: int) -> bool:
    """Whether somebody listens: a server left over from another run would be measured instead of the one started."""
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


def is_ready(url: str) -> bool:
    """Whether a GET is answered with 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def executable(variable: str, meaning: str) -> Path:
    """The file that an environment variable names.

    Raises:
        Missing: the variable is not set.
        ServerError: it names no executable file: a mistake, not an absence.
    """
    value = os.environ.get(variable)
    if not value:
        raise Missing(f"set {variable} to {meaning}")
    path = Path(value).absolute()
    if not (path.is_file() and os.access(path, os.X_OK)):
        raise ServerError(f"{variable} is {value}, which is no executable file")
    return path
