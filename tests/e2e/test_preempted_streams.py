"""Clients of preempted requests, over the wire: no gap in the numbering, not a character or probability different."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from array import array
from pathlib import Path

import msgspec
import pytest

from chatserve.config import CacheConfig, SchedulerConfig, ServerConfig
from chatserve.engine.client import EngineClient
from chatserve.sampling_params import SamplingParams
from chatserve.text.chat_template import ChatMessage, ChatTemplate
from chatserve.text.tokenizer import Tokenizer
from tests.e2e.byte_oracle import FACTORY, expected_tokens, swap_space
from tests.fakes import make_config, write_tokenizer_folder
from tests.server.live import LiveServer, live_server
from tests.server.ws_client import ws_client
from tests.waiting import UNHURRIED, eventually

pytestmark = pytest.mark.asyncio

BLOCK = 4
OUTPUT = 90
NUM_CLIENTS = 8


@pytest.mark.parametrize("num_host_blocks", [0, 600], ids=["recompute", "swap"])
async def test_streams_of_victims_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_host_blocks: int
) -> None:
    """Eight WebSockets and eight event streams on a pool for three: every one of them is preempted on the way, or
    waits for those who are; offsets of deltas follow each other (the client checks each), texts are the oracle's, and
    the log-probabilities of each token are there once, in order.
    """
    monkeypatch.setenv("CHATSERVE_TEST", "1")
    folder = write_tokenizer_folder(tmp_path / "tiny")
    config = make_config(folder, server=ServerConfig(port=0, drain_timeout=2.0))
    cache = CacheConfig(num_blocks=120, block_size=BLOCK, swap_space_gib=swap_space(num_host_blocks, BLOCK))
    engine = EngineClient(
        msgspec.structs.replace(
            config.engine, executor=FACTORY, cache=cache, scheduler=SchedulerConfig(max_num_seqs=2 * NUM_CLIENTS)
        ),
        limits=UNHURRIED,
    )
    tokenizer = Tokenizer.from_folder(folder)
    template = ChatTemplate.from_folder(folder, tokenizer)
    await engine.start()
    async with asyncio.timeout(100):
        await engine.wait_ready()

    def answer_to(content: str) -> list[int]:
        prompt = array("i", template.render([ChatMessage("user", content)]).token_ids).tolist()
        return expected_tokens(prompt, SamplingParams(temperature=0.0, seed=0, max_tokens=OUTPUT))

    async def over_socket(live: LiveServer, number: int) -> None:
        content = f"{number} over a socket"
        async with ws_client(live) as client:
            _, text, end = await client.ask(content, params={"temperature": 0, "max_tokens": OUTPUT})
            assert text == tokenizer.decode(answer_to(content)), number
            assert end["usage"]["completion_tokens"] >= len(answer_to(content))

    async def over_events(live: LiveServer, number: int) -> None:
        content = f"{number} as events"
        body = {
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": OUTPUT,
            "stream": True,
            "logprobs": True,
        }
        reply = await live.post("/v1/chat/completions", body)
        choices = [chunk["choices"][0] for chunk in reply.chunks if chunk["choices"]]
        answer = answer_to(content)
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        assert text == tokenizer.decode(answer), number
        told = [entry["logprob"] for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]]
        prompt = len(template.render([ChatMessage("user", content)]).token_ids) // 4
        # The oracle's numbers name the token and its position, so a shifted, repeated or spliced one is seen.
        want = [-float(token) - (prompt + i) / 1e6 for i, token in enumerate(answer)]
        assert told[: len(want)] == pytest.approx(want, abs=1e-9), number
        assert len(told) - len(want) in (0, 1)  # the token that ended it
        assert json.loads(reply.events[-2])["choices"][0]["finish_reason"] in ("stop", "length")

    async with live_server(folder, engine) as live:  # type: ignore[arg-type]
        for _ in range(3):
            os.kill(engine.info.pid, signal.SIGSTOP)  # until all have come, so that they need the pool together
            everybody = asyncio.gather(
                *(ask(live, i) for i in range(NUM_CLIENTS) for ask in (over_socket, over_events))
            )
            await eventually(lambda: live.context.service.num_running == 2 * NUM_CLIENTS)
            os.kill(engine.info.pid, signal.SIGCONT)
            await everybody
        state = await engine.state()
        assert state.stats.preemptions > NUM_CLIENTS
        assert bool(state.stats.promotions) == bool(num_host_blocks)
        assert state.recounted_held == state.live_requests == 0
        print(f"{state.stats.preemptions} preemptions, {state.stats.promotions} promotions")
