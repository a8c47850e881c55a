"""A server that speaks OpenAI's completion streams over chunked HTTP and does exactly as it is told."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Told:
    """What to do, and what was asked.

    Attributes:
        first_delay, delay: seconds before the first token and between tokens.
        lost_tokens: so many fewer are made than asked for.
        status: anything but 200 is an error.
        bodies, keys: of every request, in order of arrival.
        sent: moments just before each token left, by the request's prompt.
        after_token: called when a token has left.
    """

    first_delay: float = 0.0
    delay: float = 0.0
    lost_tokens: int = 0
    status: int = 200
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    sent: dict[tuple[int, ...], list[float]] = field(default_factory=dict)
    after_token: Callable[[], None] = lambda: None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    told: Told

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.told.bodies.append(body)
        self.told.keys.append(self.headers["Authorization"])
        self.send_response(self.told.status)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        is_chat = self.path.endswith("/chat/completions")
        count = body["max_tokens"] - self.told.lost_tokens
        sent = self.told.sent.setdefault(tuple(body.get("prompt", ())), [])
        time.sleep(self.told.first_delay)
        for index in range(count):
            if index:
                time.sleep(self.told.delay)
            text = f"t{index} "
            choice = {"delta": {"content": text}} if is_chat else {"text": text}
            sent.append(time.perf_counter())
            self._event({"choices": [{"index": 0, "finish_reason": None, **choice}], "usage": None})
            self.told.after_token()
        details = {"cached_tokens": 3}
        usage = {"prompt_tokens": 7, "completion_tokens": count, "prompt_tokens_details": details}
        self._event({"choices": [], "usage": usage})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")
        self.close_connection = True

    def _event(self, data: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(data).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@contextmanager
def sse_server() -> Iterator[tuple[int, Told]]:
    """(port, what it does and saw)."""
    told = Told()
    handler = type("Handler", (_Handler,), {"told": told})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_address[1], told
        finally:
            server.shutdown()
            thread.join()
