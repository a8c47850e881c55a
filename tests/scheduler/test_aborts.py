"""Ten thousand clients that leave at a random moment, and what that costs the others: nothing."""

from __future__ import annotations

import os
import random
from collections import Counter

import numpy as np

from chatserve.engine.protocol import AddRequest
from chatserve.sampling_params import SamplingParams
from chatserve.scheduler.invariants import check_scheduler
from chatserve.scheduler.request import Request, Status
from chatserve.scope import Scope
from tests.harness import Harness
from tests.oracle import expected_output

ABORTS = int(os.environ.get("CHATSERVE_ABORTS", "10000"))
STATES = ("queued", "prefilling", "decoding", "forked", "preempted", "on the host")


class Client:
    """One request, and what it was told.

    Attributes:
        leaves_after: steps until it goes; ``None`` if it stays. A patient one counts from its start.
    """

    def __init__(self, prompt: list[int], sampling: SamplingParams, leaves_after: int | None, patient: bool) -> None:
        self.prompt = prompt
        self.sampling = sampling
        self.leaves_after = leaves_after
        self.patient = patient
        self.tokens: list[list[int]] = [[] for _ in range(sampling.n)]
        self.ends: dict[int, str] = {}


class Crowd:
    """Random clients of two tenants on an engine that is too small for them."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.engine = Harness(num_blocks=24, num_host_blocks=40, max_num_seqs=6, max_num_batched_tokens=24)
        self.core = self.engine.core
        self.clients: dict[int, Client] = {}
        self.next_id = 1
        self.seen: Counter[str] = Counter()
        self.texts = [[self.rng.randint(10, 900) for _ in range(40)] for _ in range(6)]

    def arrive(self) -> None:
        rng = self.rng
        prompt = [*rng.choice(self.texts)[: rng.randint(1, 40)], rng.randint(10, 900)]
        sampling = SamplingParams(
            n=rng.choice((1, 1, 1, 3)),
            max_tokens=rng.randint(1, 24),
            temperature=rng.choice((0.0, 1.0)),
            seed=rng.randint(0, 2**40),
            ignore_eos=True,
        )
        # Most leave within the time that most need; a few stay to the end, and are judged.
        leaves_after = None if rng.random() < 0.08 else rng.randint(0, 9)
        self.clients[self.next_id] = Client(prompt, sampling, leaves_after, rng.random() < 0.7)
        tenant = rng.choice("ab")
        self.core.add(
            AddRequest(
                self.next_id,
                np.array(prompt, np.int32).tobytes(),
                sampling,
                (Scope("public"), Scope("tenant", tenant)),
                priority_class=rng.choice((1, 1, 1, 0)),
                tenant=tenant,
            )
        )
        self.next_id += 1

    def leave(self, request_id: int) -> None:
        request = self.core.scheduler.requests.get(request_id)
        assert request is not None, "the engine forgot a request that was not ended"
        self.seen[self.state_of(request)] += 1
        self.core.abort((request_id,))

    def has_started(self, request_id: int) -> bool:
        request = self.core.scheduler.requests.get(request_id)
        return request is not None and request.started

    def state_of(self, request: Request) -> str:
        """Where an open request is, seen from its first open choice."""
        sequence = next(s for s in request.sequences if s.status is not Status.FINISHED)
        if sequence.status is Status.RUNNING:
            if len(request.sequences) > 1:
                return "forked"
            row = sequence.row
            batch = self.core.scheduler.batch
            return "prefilling" if batch.num_known(row) == request.num_prompt else "decoding"
        if not sequence.num_preemptions:
            return "queued"
        match = self.core.manager.match(sequence.tokens.tobytes(), request.scopes, -1)
        return "on the host" if match.host_blocks or match.tail_on_host else "preempted"

    def step(self) -> None:
        frame = self.core.step()
        ids = np.frombuffer(frame.request_ids, np.int64).tolist()
        choices = np.frombuffer(frame.choices, np.int32).tolist()
        for request_id, choice, token in zip(ids, choices, np.frombuffer(frame.tokens, np.int32).tolist(), strict=True):
            self.clients[request_id].tokens[choice].append(token)
        for end in frame.finished:
            client = self.clients[end.request_id]
            assert end.choice not in client.ends, "two ends of one choice"
            client.ends[end.choice] = end.reason
            self.judge(client, end.choice)
            if len(client.ends) == client.sampling.n:
                del self.clients[end.request_id]
        pool, host = self.engine.pool, self.engine.manager.host_pool
        assert pool.num_free + pool.num_idle + pool.num_held == pool.num_blocks
        assert host.num_free + host.num_idle + host.num_held == host.num_blocks

    def judge(self, client: Client, choice: int) -> None:
        """Whoever stayed got everything, and whoever left the beginning of it."""
        got, limit = client.tokens[choice], client.sampling.max_tokens or 0
        reason = client.ends[choice]
        if reason == "length":
            self.seen["survivors" if client.leaves_after is None else "finished before leaving"] += 1
            assert len(got) == limit
        else:
            assert reason == "abort"
            assert client.leaves_after is not None
            if self.rng.random() > 0.1:
                return  # what those who left were given is checked in samples
        assert got == expected_output(client.prompt, client.sampling.for_choice(choice), len(got))


def test_ten_thousand_aborts_leak_nothing_and_disturb_nobody() -> None:
    """Clients that leave while queued, prefilling, decoding, forked, preempted or swapped to the host (sglang#18701,
    vllm-ascend#15990): every block comes back on both tiers, and every token of those who stay is right.
    """
    crowd = Crowd(20261129)
    aborted = 0
    while aborted < ABORTS:
        while len(crowd.clients) < 12:
            crowd.arrive()
        if crowd.rng.random() < 0.1:
            crowd.core.scheduler.preempt_request(crowd.rng.choice(list(crowd.clients)))
        for request_id, client in list(crowd.clients.items()):
            if client.leaves_after is None or client.ends or (client.patient and not crowd.has_started(request_id)):
                continue
            if client.leaves_after == 0:
                crowd.leave(request_id)
                crowd.core.abort((request_id,))  # whoever says so twice changes nothing
                aborted += 1
            client.leaves_after -= 1
        crowd.step()
        if aborted % 500 < 3:
            check_scheduler(crowd.core.scheduler)
    while crowd.core.has_work:
        crowd.step()
    check_scheduler(crowd.core.scheduler)
    assert not crowd.clients, "a client was forgotten"
    assert crowd.engine.pool.num_held == 0
    assert crowd.engine.manager.host_pool.num_held == 0
    assert not len(crowd.core.scheduler.waiting)
    assert not len(crowd.core.scheduler.batch)

    empty = [state for state in (*STATES, "survivors") if not crowd.seen[state]]
    assert not empty, f"nobody left while {empty}"
    stats = crowd.core.stats()
    print(f"{aborted:,} aborts, 0 leaked blocks, 0 wrong tokens; {dict(crowd.seen)}; {stats.demotions} demotions")
