"""A chatserve of one's own for a benchmark: started on a free port, stopped at the end."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any


def free_port() -> int:
    """A TCP port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def local_server(model: str, *flags: str, timeout: float = 120.0) -> Iterator[str]:
    """Run ``chatserve serve MODEL`` and yield its base URL once it is ready."""
    port = free_port()
    command = [sys.executable, "-m", "chatserve", "serve", model, "--port", str(port), "--log-level", "warning", *flags]
    process = subprocess.Popen(command, stdout=sys.stderr, stderr=sys.stderr)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + timeout
        while not is_ready(url):
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with status {process.returncode} before it was ready")
            if time.monotonic() > deadline:
                raise RuntimeError(f"the server was not ready after {timeout:g} s")
            time.sleep(0.05)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def is_ready(url: str) -> bool:
    """Whether ``/readyz`` says 200."""
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def post(url: str, body: dict[str, Any], timeout: float = 600.0) -> Any:
    """POST JSON, return JSON."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as response:
        return json.load(response)
