"""A seeded storm of operations on the real cache, scheduler and engine core over the oracle model.

Every request's tokens are compared with what a fresh server would have given; block accounting is checked after
every operation and recounted from the holders every so often. The report says what the storm contained, because a
driver that never preempted proves nothing about preemption. Run it alone for longer storms:
``python -m tests.random_driver --operations 1000000 --seed 5``.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from chatserve.cache.kv_cache_manager import xxh3_hash
from chatserve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from chatserve.engine.core import EngineCore
from chatserve.engine.protocol import AddRequest, Explain, ExplainReply, Publish, Purge, StepFrame
from chatserve.sampling_params import SamplingParams
from chatserve.scheduler.invariants import check_scheduler
from chatserve.scope import Scope
from tests.delayed_oracle import DelayedOracleExecutor
from tests.oracle import OracleExecutor, expected_output, oracle_info

PUBLIC, GROUP = Scope("public"), Scope("group", "g")
VISIBLE = (
    (PUBLIC,),
    (Scope("tenant", "a"),),
    (PUBLIC, Scope("tenant", "b")),
    (PUBLIC, GROUP, Scope("tenant", "c")),
    (PUBLIC, GROUP),
)
"""What each kind of caller sees; a tenant always sees the same, so a foreign block is a fault, not a demotion."""


class Live:
    """What one request has been given so far, per choice."""

    def __init__(self, prompt: list[int], sampling: SamplingParams, max_total: int) -> None:
        self.prompt = prompt
        self.max_total = max_total
        self.sampling = sampling
        self.tokens: list[list[int]] = [[] for _ in range(sampling.n)]
        self.logprobs: list[list[float]] = [[] for _ in range(sampling.n)]
        self.reasons: dict[int, str] = {}
        self.aborted = False


class Storm:
    """One engine under random load, and everything known about its requests."""

    def __init__(
        self,
        seed: int,
        *,
        block_size: int = 4,
        num_blocks: int = 48,
        max_num_seqs: int = 8,
        num_host_blocks: int = 0,
        hash_block: Callable[[bytes], int] | None = None,
        delayed_copies: bool = False,
    ) -> None:
        self.random = random.Random(seed)
        config = EngineConfig(
            model=ModelConfig(max_model_len=160),
            cache=CacheConfig(block_size=block_size, num_blocks=num_blocks),
            scheduler=SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=96,
                long_prefill_token_threshold=24,
                ageing_steps=32,
                max_overtakes=4,
            ),
        )
        info = oracle_info(config, num_host_blocks=num_host_blocks)
        executor = partial(DelayedOracleExecutor, seed=seed) if delayed_copies else OracleExecutor
        self.executor = executor(info.num_blocks, info.block_size, num_host_blocks=num_host_blocks)
        self.core = EngineCore(config, self.executor, info, hash_block=hash_block or xxh3_hash(seed))
        # Pins take a quarter of the pool at most; what the storm asks for fits beside them.
        self.max_total = min(160, num_blocks * 3 // 4 * block_size + 1)
        self.live: dict[int, Live] = {}
        self.next_id = 0
        self.histories: list[list[int]] = [[self._token() for _ in range(self.random.randint(1, 40))]]
        self.published: list[tuple[list[int], tuple[Scope, ...]]] = []
        kinds = "requests steps forks purges epochs publications withdrawals refusals finished tokens"
        self.counts = dict.fromkeys(kinds.split(), 0)

    def purge(self, purge: Callable[[], object]) -> None:
        """Purge, and count the scopes whose epoch that raised."""
        epochs = self.core.manager._epochs
        before = dict(epochs)
        purge()
        self.counts["purges"] += 1
        self.counts["epochs"] += sum(epoch > before.get(scope, 0) for scope, epoch in epochs.items())

    def _token(self) -> int:
        # Few values, so that prompts meet inside blocks too; the end token is among them.
        return self.random.randint(0, 20)

    # ------------------------------------------------------------------ operations

    def operate(self) -> None:
        """One random operation."""
        draw = self.random.random()
        if draw < 0.24 and len(self.live) < 40:
            self.submit()
        elif draw < 0.29:
            self.abort()
        elif draw < 0.30 and self.live:
            self.core.scheduler.preempt_request(self.random.choice(list(self.live)))
        elif draw < 0.301:
            scope = self.random.randint(0, 3)
            self.purge(lambda: self.core.manager.purge(scope))
        elif draw < 0.302:
            tenant = self.random.choice("abc")
            self.purge(lambda: self.core.purge(Purge(0, tenant)))
        elif draw < 0.305:
            self.publish()
        elif draw < 0.310:
            self.explain()
        else:
            self.step()

    def submit(self) -> None:
        rng = self.random
        history = rng.choice(self.histories)
        prompt = history[: rng.randint(1, len(history))] + [self._token() for _ in range(rng.choice((0, 1, 3, 9)))]
        prompt = prompt[: self.max_total - 1]
        room = self.max_total - len(prompt)
        max_tokens = rng.choice((None, 1, rng.randint(1, min(room, 40)), rng.randint(1, room)))
        if rng.random() < 0.02:
            max_tokens = 160 - len(prompt) + 1
        sampling = SamplingParams(
            n=rng.choice((1, 1, 1, 2, 4)),
            max_tokens=max_tokens,
            min_tokens=rng.choice((0, 0, 1 if max_tokens is None or max_tokens > 1 else 0)),
            temperature=rng.choice((0.0, 1.0)),
            seed=rng.randint(0, 2**62),
            stop_token_ids=tuple(rng.sample(range(900), rng.choice((0, 40)))),
            ignore_eos=rng.random() < 0.3,
            logprobs=rng.choice((None, None, 0)),
        )
        scopes = rng.choice(VISIBLE)
        self.next_id += 1
        # Pins change what can ever fit; what counts is what could when the request came.
        self.live[self.next_id] = Live(prompt, sampling, self.core.scheduler.max_total_tokens())
        self.counts["requests"] += 1
        self.core.add(
            AddRequest(
                self.next_id,
                np.array(prompt, np.int32).tobytes(),
                sampling,
                scopes,
                priority=rng.choice((0, 0, -1, 2)),
                priority_class=rng.choice((0, 1, 1)),
                tenant=rng.choice("abc"),
            )
        )

    def publish(self) -> None:
        """Publish the beginning of a conversation, or withdraw something."""
        withdraw = bool(self.published) and self.random.random() < 0.5
        if withdraw:
            prompt, scopes = self.published.pop(self.random.randrange(len(self.published)))
            self.counts["withdrawals"] += 1
        else:
            prompt, scopes = self.random.choice(self.histories)[:12], self.random.choice(((PUBLIC,), (PUBLIC, GROUP)))
            self.published.append((prompt, scopes))
            self.counts["publications"] += 1
        self.core.publish(Publish(1, np.array(prompt, np.int32).tobytes(), scopes, withdraw))

    def explain(self) -> None:
        """What is explained is what a request would be told."""
        prompt, scopes = self.random.choice(self.histories), self.random.choice(VISIBLE)
        used = [node.last_used for node in self.core.manager.tree.nodes()]
        self.core.explain(Explain(2, np.array(prompt, np.int32).tobytes(), scopes))
        reply = self.core.replies.pop()
        assert isinstance(reply, ExplainReply)
        assert reply.device_tokens + reply.host_tokens < len(prompt)
        assert used == [node.last_used for node in self.core.manager.tree.nodes()], "explaining left a trace"

    def abort(self) -> None:
        # Also ids that were never given out or have just ended.
        request_id = self.random.choice([*self.live, self.next_id, self.next_id + 5])
        if request_id in self.live:
            self.live[request_id].aborted = True
        self.core.abort((request_id,))

    def step(self) -> None:
        if self.core.has_work:
            self.counts["steps"] += 1
            self.take(self.core.step())

    # ------------------------------------------------------------------ judging

    def take(self, frame: StepFrame) -> None:
        """Book one frame, and judge every choice that ended."""
        ids = np.frombuffer(frame.request_ids, np.int64).tolist()
        choices = np.frombuffer(frame.choices, np.int32).tolist()
        tokens = np.frombuffer(frame.tokens, np.int32).tolist()
        self.counts["tokens"] += len(tokens)
        logprobs = frame.logprobs or (None,) * len(ids)
        for request_id, choice, token, logprob in zip(ids, choices, tokens, logprobs, strict=True):
            live = self.live[request_id]
            assert choice not in live.reasons, "a token after the end"
            live.tokens[choice].append(token)
            if live.sampling.logprobs is not None:
                assert logprob is not None, "a log-probability is missing"
                live.logprobs[choice].append(logprob.chosen)
        for end in frame.finished:
            live = self.live[end.request_id]
            assert end.choice not in live.reasons, "two terminal events for one choice"
            live.reasons[end.choice] = end.reason
            self._judge(live, end.choice, end.reason)
            if len(live.reasons) == live.sampling.n:
                del self.live[end.request_id]
                self._remember(live)

    def _judge(self, live: Live, choice: int, reason: str) -> None:
        self.counts["finished"] += 1
        got = live.tokens[choice]
        sampling = live.sampling.for_choice(choice)
        if reason == "error":
            too_long = (live.sampling.max_tokens or 1) + len(live.prompt) > live.max_total
            assert too_long, "an error that nobody expects"
            assert not got, "tokens before a refusal"
            self.counts["refusals"] += 1
            return
        room = live.max_total - len(live.prompt)
        limit = min(room, live.sampling.max_tokens or room)
        want = expected_output(live.prompt, sampling, len(got) if reason == "abort" else limit)
        assert got == want[: len(got)], f"wrong tokens: {got} instead of {want}"
        assert len(set(live.logprobs[choice])) == len(live.logprobs[choice]), "a log-probability was repeated"
        if reason == "abort":
            assert live.aborted, "aborted without being asked"
            return
        assert got == want, "output ended too early"
        assert (reason == "length") == (len(got) == limit and not self._is_stop(sampling, got)), "wrong finish reason"

    @staticmethod
    def _is_stop(sampling: SamplingParams, tokens: list[int]) -> bool:
        if len(tokens) <= sampling.min_tokens:
            return False
        return (tokens[-1] == 7 and not sampling.ignore_eos) or tokens[-1] in sampling.stop_token_ids

    def _remember(self, live: Live) -> None:
        """Later prompts continue conversations, or branch off inside them."""
        if live.sampling.n > 1 and max(len(t) for t in live.tokens):
            self.counts["forks"] += 1
        history = live.prompt + self.random.choice(live.tokens)
        if len(history) < self.max_total - 1:
            self.histories.append(history)
        if len(self.histories) > 12:
            del self.histories[self.random.randrange(12)]

    def check_counts(self) -> None:
        """The invariant that is cheap enough for every operation."""
        pool = self.core.manager.pool
        assert pool.num_free + pool.num_idle + pool.num_held == pool.num_blocks
        assert min(pool.num_free, pool.num_idle, pool.num_held) >= 0

    def drain(self, limit: int = 20_000) -> None:
        """Run to the end: everything must finish, and no block may stay held."""
        for _ in range(limit):
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.has_work, "the engine is wedged"
        assert not self.live, "a request was forgotten"
        for prompt, scopes in self.published:
            self.core.publish(Publish(3, np.array(prompt, np.int32).tobytes(), scopes, withdraw=True))
        assert self.core.manager.num_pinned == 0, "a pin was forgotten"
        assert self.core.manager.pool.num_held == 0, "blocks leaked"
        check_scheduler(self.core.scheduler, self.core.publications.tables)

    def report(self) -> dict[str, int]:
        """What the storm contained."""
        stats = self.core.stats()
        return self.counts | {
            "preemptions": stats.preemptions,
            "copies": stats.copies,
            "partial_hits": stats.partial_hits,
            "evictions": stats.evictions,
            "demotions": stats.demotions,
            "promotions": stats.promotions,
            "host_drops": stats.host_drops,
            "aborts": stats.aborts,
            "hit_tokens": stats.prefix_hit_tokens,
            "computed_tokens": self.executor.num_tokens,
            **self._late_copies(),
        }

    def _late_copies(self) -> dict[str, int]:
        executor = self.executor
        if not isinstance(executor, DelayedOracleExecutor):
            return {}
        return {
            "late_copies": executor.num_late,
            "awaited_copies": executor.num_forced,
            "checked_swaps": executor.num_checked,
        }


def run_storm(operations: int, seed: int, *, full_check_every: int = 1000, progress: bool = False) -> dict[str, int]:
    """Run one storm to its end; raises at the first wrong token or count, naming the operation."""
    storm = Storm(seed, num_host_blocks=64, delayed_copies=True)
    for index in range(operations):
        try:
            storm.operate()
            storm.check_counts()
            if index % full_check_every == 0:
                check_scheduler(storm.core.scheduler, storm.core.publications.tables)
        except Exception as error:
            raise AssertionError(f"seed {seed}, operation {index}: {error}") from error
        if progress and index % 50_000 == 0:
            print(f"{index:>9,} operations, {len(storm.live)} live", file=sys.stderr)
    storm.drain()
    return storm.report()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    started = time.perf_counter()
    report = run_storm(arguments.operations, arguments.seed, progress=True)
    seconds = time.perf_counter() - started
    print(f"{arguments.operations:,} operations in {seconds:.1f} s, 0 wrong tokens, 0 leaked blocks")
    print("  ".join(f"{key}={value:,}" for key, value in report.items()))


if __name__ == "__main__":
    main()
