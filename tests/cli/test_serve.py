"""``chatserve serve`` as a program: start, readiness, deaths, drain, and what it leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fakes import write_tokenizer_folder
from tests.waiting import PATIENCE

LETTERS = "tests.engine.doubles:create_letters_executor"
UNLOADABLE = "tests.engine.doubles:create_unloadable_executor"


@pytest.fixture(scope="module", autouse=True)
def _interruptible() -> Iterator[None]:
    """A shell's background job ignores SIGINT, and so would every server that it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Server:
    """A server process, its terminal output, and its HTTP surface."""

    def __init__(self, folder: Path, executor: str = LETTERS, port: int = 0) -> None:
        preset = folder / "serve.toml"
        preset.write_text(f'[engine]\nexecutor = "{executor}"\n[engine.cache]\nnum_blocks = 64\n')
        self.process = subprocess.Popen(
            [sys.executable, "-m", "chatserve", "serve", str(folder), "--port", str(port), "--config", str(preset)],
            env={**os.environ, "CHATSERVE_TEST": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()

    @property
    def output(self) -> str:
        return "".join(self.lines)

    @property
    def url(self) -> str:
        wait(lambda: "Listening on" in self.output or self.process.poll() is not None)
        match = re.search(r"Listening on (\S+)", self.output)
        assert match, self.output
        return match[1]

    def get(self, path: str) -> int:
        try:
            with urllib.request.urlopen(self.url + path, timeout=PATIENCE) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code

    def complete(self, prompt: str, max_tokens: int = 12) -> str:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            self.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            return str(json.load(response)["choices"][0]["text"])

    def engine_pids(self) -> list[int]:
        return children_of(self.process.pid)

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(PATIENCE)


def children_of(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait(condition: Callable[[], object], seconds: float = 2 * PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder whose weights nobody reads."""
    model = write_tokenizer_folder(tmp_path / "tiny")
    (model / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    return model


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    with Server(folder) as running:
        yield running


def test_it_listens_then_is_ready_says_what_it_chose_and_keeps_torch_out(server: Server) -> None:
    """The whole start: address, readiness, figures on the terminal; one child; no torch in the API process."""
    assert server.get("/livez") == 200
    wait(lambda: server.get("/readyz") == 200)
    wait(lambda: "KV cache: 64 blocks of 16 tokens" in server.output)
    assert "Engine ready: tiny" in server.output
    assert server.complete("hello") == "fghijklmnopq"
    assert len(server.engine_pids()) == 1
    assert "torch" not in Path(f"/proc/{server.process.pid}/maps").read_text()
    (engine,) = server.engine_pids()
    assert server.stop() == 0
    assert not is_alive(engine)


def test_a_killed_engine_is_replaced_and_answers_the_same(server: Server, folder: Path) -> None:
    """kill -9 of the engine: not ready at once, ready again by itself, the next answers right."""
    wait(lambda: server.get("/readyz") == 200)
    before = server.complete("the same prompt")
    (engine,) = server.engine_pids()
    hold = folder / "hold"  # the next engine, until it was seen that there is none
    hold.touch()
    os.kill(engine, signal.SIGKILL)
    wait(lambda: server.get("/readyz") == 503)
    assert server.get("/livez") == 200
    hold.unlink()
    wait(lambda: server.get("/readyz") == 200)
    assert server.complete("the same prompt") == before
    assert server.stop() == 0


def test_a_killed_server_leaves_no_engine_and_its_port_is_free(server: Server, folder: Path) -> None:
    """kill -9 of the API process: the engine ends by itself, and a new server starts at once on the same port."""
    wait(lambda: server.get("/readyz") == 200)
    (engine,) = server.engine_pids()
    port = int(server.url.rpartition(":")[2])
    server.process.kill()
    server.process.wait()
    with Server(folder, port=port) as again:
        wait(lambda: not is_alive(engine))
        wait(lambda: again.get("/readyz") == 200)
        assert again.stop() == 0


def test_an_engine_that_cannot_load_ends_the_server_with_the_reason(folder: Path) -> None:
    """No endless 503: the exit status is not zero and the last line says what to do."""
    with Server(folder, executor=UNLOADABLE) as server:
        assert server.process.wait(2 * PATIENCE) == 1
    assert server.lines[-1].startswith("Error: ")
    assert "has no weights" in server.lines[-1]


def test_a_port_that_is_taken_is_said_and_leaves_no_engine(folder: Path) -> None:
    """One line, exit status 2, nothing running."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with Server(folder, port=taken.getsockname()[1]) as server:
            wait(lambda: server.engine_pids() or server.process.poll() is not None)
            children = server.engine_pids()
            assert server.process.wait(2 * PATIENCE) == 2
    assert re.search(r"^Error: Cannot listen on 127\.0\.0\.1:\d+", server.output, re.MULTILINE)
    wait(lambda: not any(map(is_alive, children)))


def test_ctrl_c_ends_it_in_order(server: Server) -> None:
    """SIGINT to the whole process group, as a terminal sends it."""
    wait(lambda: server.get("/readyz") == 200)
    (engine,) = server.engine_pids()
    os.kill(engine, signal.SIGINT)
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(PATIENCE) == 0
    assert not is_alive(engine)
    assert "Traceback" not in server.output


def test_ctrl_c_while_it_loads_is_one_line(folder: Path) -> None:
    """Before it listens, too: one word, the status that shells expect, no traceback, and no engine left behind."""
    with Server(folder) as server:
        wait(lambda: bool(server.engine_pids()))
        children = server.engine_pids()
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(2 * PATIENCE) in (0, 130)
        server._reader.join(PATIENCE)
        assert not {"Aborted!", "Traceback"} & {word for line in server.lines for word in line.split()}
        if server.process.returncode:
            assert server.lines[-1] == "Interrupted.\n"
    wait(lambda: not any(map(is_alive, children)))
