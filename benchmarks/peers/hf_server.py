"""``POST /v1/completions`` over ``transformers`` ``generate``, in static batches; run by a Python of its own.

Stands alone: standard library, torch and transformers. Requests that arrive together are one batch if they have equal
lengths; every token is streamed when its step ends. Run: PYTHON hf_server.py FOLDER PORT THREADS BATCH.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
import transformers

GATHER_SECONDS = 0.03
"""How long the first request of a batch waits for others."""


class Job:
    """One request: token ids come out of ``tokens``, and then ``None``."""

    def __init__(self, prompt: list[int], max_tokens: int) -> None:
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.tokens: queue.SimpleQueue[int | None] = queue.SimpleQueue()


class Batcher(threading.Thread):
    """Takes what has arrived, runs it as one batch, and so on."""

    def __init__(self, folder: str, max_batch: int) -> None:
        super().__init__(daemon=True)
        self.jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        self._max_batch = max_batch

    def run(self) -> None:
        while True:
            batch = [self.jobs.get()]
            deadline = time.monotonic() + GATHER_SECONDS
            while len(batch) < self._max_batch and (left := deadline - time.monotonic()) > 0:
                try:
                    batch.append(self.jobs.get(timeout=left))
                except queue.Empty:
                    break
            groups: dict[tuple[int, int], list[Job]] = {}
            for job in batch:
                groups.setdefault((len(job.prompt), job.max_tokens), []).append(job)
            for group in groups.values():
                self._generate(group)

    def _generate(self, jobs: list[Job]) -> None:
        ids = torch.tensor([job.prompt for job in jobs])

        def stream(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            for job, token in zip(jobs, input_ids[:, -1].tolist(), strict=True):
                job.tokens.put(token)
            return torch.zeros(len(input_ids), dtype=torch.bool)

        try:
            with torch.inference_mode():
                self._model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=jobs[0].max_tokens,
                    min_new_tokens=jobs[0].max_tokens,
                    do_sample=False,
                    pad_token_id=0,
                    stopping_criteria=transformers.StoppingCriteriaList([stream]),
                )
        finally:
            for job in jobs:
                job.tokens.put(None)


class Handler(BaseHTTPRequestHandler):
    """Answers of one connection."""

    batcher: Batcher

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        job = Job(body["prompt"], body["max_tokens"])
        self.batcher.jobs.put(job)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        count = 0
        while (token := job.tokens.get()) is not None:
            count += 1
            self._event({"choices": [{"index": 0, "text": self.batcher.tokenizer.decode([token])}]})
        usage = {"prompt_tokens": len(job.prompt), "completion_tokens": count}
        self._event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, data: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(data).encode() + b"\n\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a line per request would be noise."""


class Listener(ThreadingHTTPServer):
    """A thread per request, and room for a whole batch of connections that arrive at once."""

    daemon_threads = True
    request_queue_size = 128


def main() -> None:
    folder, port, threads, max_batch = sys.argv[1:5]
    torch.set_num_threads(int(threads))
    transformers.utils.logging.set_verbosity_error()
    Handler.batcher = Batcher(folder, int(max_batch))
    Handler.batcher.start()
    Listener(("127.0.0.1", int(port)), Handler).serve_forever()


if __name__ == "__main__":
    main()
