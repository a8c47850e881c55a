"""An engine core under a clocked load, for benchmarks that need no network.

Requests are submitted between two steps, when their time has come; first tokens and ends are timed when the step that
brought them returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from chatserve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from chatserve.engine.core import EngineCore
from chatserve.engine.protocol import AddRequest, EngineInfo, Publish, PublishReply
from chatserve.model import store
from chatserve.sampling_params import SamplingParams
from chatserve.scheduler.output import Executor
from chatserve.scope import Scope
from chatserve.worker.executor import create_executor

Prompt = npt.NDArray[np.int32]
PUBLIC = Scope("public")


@dataclass
class Timeline:
    """What happened to one request, in seconds of `time.perf_counter`."""

    tenant: str
    submitted: float
    cached: int = 0
    prompt_tokens: int = 0
    first_token: float | None = None
    finished: float | None = None
    reason: str | None = None
    tokens: list[int] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        """Seconds from submission to the first token."""
        if self.first_token is None:
            raise RuntimeError("the request has no token yet")
        return self.first_token - self.submitted


class Load:
    """One engine and the requests that were sent to it."""

    def __init__(self, executor: Executor, info: EngineInfo, config: EngineConfig) -> None:
        self.core = EngineCore(config, executor, info)
        self.info = info
        self.requests: dict[int, Timeline] = {}
        self.step_seconds: list[float] = []
        self._rng = np.random.default_rng(7)

    def fresh_prompt(self, length: int) -> Prompt:
        """Random tokens that nothing else begins with."""
        return self._rng.integers(1000, self.info.vocab_size, length, dtype=np.int32)

    def submit(
        self, prompt: Prompt, max_tokens: int, tenant: str, *, priority_class: int = 0, public: bool = True
    ) -> Timeline:
        """Greedy, end of text ignored, in the tenant's own scope under the public one."""
        request_id = len(self.requests) + 1
        timeline = Timeline(tenant, time.perf_counter(), prompt_tokens=len(prompt))
        self.requests[request_id] = timeline
        scopes = (PUBLIC, Scope("tenant", tenant)) if public else (Scope("tenant", tenant),)
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=0, ignore_eos=True)
        self.core.add(
            AddRequest(request_id, prompt.tobytes(), sampling, scopes, priority_class=priority_class, tenant=tenant)
        )
        return timeline

    def step(self) -> None:
        """One step, timed and booked."""
        began = time.perf_counter()
        frame = self.core.step()
        now = time.perf_counter()
        self.step_seconds.append(now - began)
        for started in frame.started:
            self.requests[started.request_id].cached = started.cached_tokens
        ids = np.frombuffer(frame.request_ids, np.int64).tolist()
        for request_id, token in zip(ids, np.frombuffer(frame.tokens, np.int32).tolist(), strict=True):
            request = self.requests[request_id]
            request.tokens.append(token)
            request.first_token = request.first_token or now
        for end in frame.finished:
            self.requests[end.request_id].finished = now
            self.requests[end.request_id].reason = end.reason

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Step until ``until`` says so, or until nothing is left."""
        while self.core.has_work and not (until is not None and until()):
            self.step()

    def publish(self, prompt: Prompt) -> None:
        """Compute and pin a public prefix."""
        self.core.publish(Publish(0, prompt.tobytes(), (PUBLIC,)))
        self.run()
        reply = self.core.replies.pop()
        if not isinstance(reply, PublishReply) or reply.error_code is not None:
            raise RuntimeError(f"the prefix was not published: {reply}")

    def check_at_rest(self) -> None:
        """Nothing held but pins, every request ended for length."""
        held = self.core.manager.pool.num_held - self.core.manager.num_pinned
        wrong = [r for r in self.requests.values() if r.reason != "length"]
        if held or wrong:
            raise RuntimeError(f"{held} blocks leaked, {len(wrong)} requests ended otherwise than for length")


class Loader:
    """Makes engines over one model with different pools and slots."""

    def __init__(self, model: str, threads: int | None = None) -> None:
        self._prepared = store.resolve(model)
        self._threads = threads

    def load(
        self,
        *,
        num_blocks: int,
        max_num_seqs: int = 16,
        swap_blocks: int = 0,
        max_num_batched_tokens: int = 2048,
        block_bytes: int = 16 * 23040,
    ) -> Load:
        """A fresh engine."""
        config = EngineConfig(
            model=ModelConfig(path=str(self._prepared.path), name=self._prepared.name),
            cache=CacheConfig(num_blocks=num_blocks, swap_space_gib=(swap_blocks + 0.5) * block_bytes / 2**30),
            scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens),
            threads=self._threads,
        )
        executor, info = create_executor(config)
        return Load(executor, info, config)
