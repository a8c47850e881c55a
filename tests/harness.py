"""An engine core over the oracle model, driven by hand: the usual tool of cache and scheduler tests."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from chatserve.cache.kv_cache_manager import xxh3_hash
from chatserve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from chatserve.engine.core import EngineCore
from chatserve.engine.protocol import AddRequest, StepFrame
from chatserve.sampling_params import SamplingParams
from chatserve.scheduler.invariants import check_scheduler
from chatserve.scope import Scope
from tests.oracle import OracleExecutor, expected_output, oracle_info

TENANT = Scope("tenant", "t1")


class Stream:
    """Everything one request was told."""

    def __init__(self, prompt: list[int], sampling: SamplingParams) -> None:
        self.prompt = prompt
        self.sampling = sampling
        self.tokens: list[list[int]] = [[] for _ in range(sampling.n)]
        self.logprobs: list[list[float]] = [[] for _ in range(sampling.n)]
        self.reasons: list[str | None] = [None] * sampling.n
        self.errors: list[str | None] = [None] * sampling.n
        self.cached: int | None = None
        self.started_step: int | None = None
        self.first_step: int | None = None

    @property
    def done(self) -> bool:
        """Every choice has its terminal event."""
        return all(self.reasons)


class Harness:
    """A small engine; ``submit``, then ``step`` or ``run``, then look at the streams."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 256,
        max_model_len: int = 2048,
        prefill_chunk: int = 64,
        ageing_steps: int = 1024,
        max_overtakes: int = 16,
        num_host_blocks: int = 0,
        hash_block: Callable[[bytes], int] | None = None,
    ) -> None:
        config = EngineConfig(
            model=ModelConfig(max_model_len=max_model_len),
            cache=CacheConfig(block_size=block_size, num_blocks=num_blocks),
            scheduler=SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                long_prefill_token_threshold=prefill_chunk,
                ageing_steps=ageing_steps,
                max_overtakes=max_overtakes,
            ),
        )
        info = oracle_info(config, num_host_blocks=num_host_blocks)
        self.executor = OracleExecutor(num_blocks, block_size, num_host_blocks=num_host_blocks)
        self.core = EngineCore(config, self.executor, info, hash_block=hash_block or xxh3_hash(0))
        self.manager = self.core.manager
        self.pool = self.core.manager.pool
        self.streams: dict[int, Stream] = {}
        self.ids: dict[int, int] = {}

    def submit(
        self,
        prompt: list[int],
        max_tokens: int | None = 8,
        *,
        scopes: tuple[Scope, ...] = (TENANT,),
        priority: int = 0,
        priority_class: int = 0,
        n: int = 1,
        seed: int = 0,
        temperature: float = 0.0,
        ignore_eos: bool = True,
        logprobs: int | None = None,
        stop_token_ids: tuple[int, ...] = (),
        min_tokens: int = 0,
        tenant: str = "",
    ) -> Stream:
        """Enqueue a request; ids count up from 1."""
        sampling = SamplingParams(
            n=n,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            ignore_eos=ignore_eos,
            logprobs=logprobs,
            stop_token_ids=stop_token_ids,
            min_tokens=min_tokens,
        )
        request_id = len(self.streams) + 1
        stream = Stream(prompt, sampling)
        self.streams[request_id] = stream
        self.ids[id(stream)] = request_id
        self.core.add(
            AddRequest(
                request_id, np.array(prompt, np.int32).tobytes(), sampling, scopes, priority, priority_class, tenant
            )
        )
        return stream

    def abort(self, stream: Stream) -> None:
        self.core.abort((self.ids[id(stream)],))

    def preempt(self, stream: Stream) -> None:
        self.core.scheduler.preempt_request(self.ids[id(stream)])

    def step(self) -> StepFrame:
        """One step, booked, with every invariant checked afterwards."""
        frame = self.core.step()
        for started in frame.started:
            self.streams[started.request_id].cached = started.cached_tokens
            self.streams[started.request_id].started_step = frame.step
        ids = np.frombuffer(frame.request_ids, np.int64).tolist()
        choices = np.frombuffer(frame.choices, np.int32).tolist()
        tokens = np.frombuffer(frame.tokens, np.int32).tolist()
        logprobs = frame.logprobs or (None,) * len(ids)
        for request_id, choice, token, logprob in zip(ids, choices, tokens, logprobs, strict=True):
            stream = self.streams[request_id]
            stream.tokens[choice].append(token)
            stream.first_step = stream.first_step or frame.step
            if logprob is not None:
                stream.logprobs[choice].append(logprob.chosen)
        for end in frame.finished:
            stream = self.streams[end.request_id]
            assert stream.reasons[end.choice] is None, "two terminal events"
            stream.reasons[end.choice] = end.reason
            stream.errors[end.choice] = end.error_code
        check_scheduler(self.core.scheduler, self.core.publications.tables)
        return frame

    def run(self, *streams: Stream, limit: int = 5000) -> int:
        """Step until the given streams (or all) are done; returns the steps taken."""
        wanted = streams or tuple(self.streams.values())
        for steps in range(limit):
            if all(stream.done for stream in wanted):
                return steps
            self.step()
        raise AssertionError(f"not done after {limit} steps")

    def expect(self, stream: Stream) -> None:
        """The stream carries exactly what a fresh server would have given."""
        room = self.core.scheduler.max_total_tokens() - len(stream.prompt)
        limit = stream.sampling.max_tokens or room
        for choice in range(stream.sampling.n):
            want = expected_output(stream.prompt, stream.sampling.for_choice(choice), limit)
            assert stream.tokens[choice] == want, f"choice {choice} differs from the oracle"

    def ask(self, prompt: list[int], max_tokens: int | None = 8, **options: object) -> Stream:
        """Submit, run to the end, compare with the oracle."""
        stream = self.submit(prompt, max_tokens, **options)  # type: ignore[arg-type]
        self.run(stream)
        self.expect(stream)
        return stream


def numbers(start: int, count: int) -> list[int]:
    """``count`` distinct tokens, none of them the end token."""
    return [100 + (start + i) % 800 for i in range(count)]
