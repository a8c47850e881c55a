"""All of the server around an oracle: engine process, scheduler, prefix cache, text and WebSocket, judged by it."""

from __future__ import annotations

import asyncio
from array import array
from pathlib import Path

import msgspec
import pytest

from chatserve.config import CacheConfig, ServerConfig
from chatserve.engine.client import EngineClient
from chatserve.sampling_params import SamplingParams
from chatserve.text.chat_template import ChatMessage, ChatTemplate
from chatserve.text.tokenizer import Tokenizer
from tests.e2e.byte_oracle import FACTORY, expected_tokens
from tests.fakes import make_config, write_tokenizer_folder
from tests.server.live import live_server
from tests.server.ws_client import ws_client
from tests.waiting import UNHURRIED

pytestmark = pytest.mark.asyncio

TURNS = 6


async def test_conversations_are_exact_and_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer is the oracle's for the exact history, also after a stop, and nothing known is computed again."""
    monkeypatch.setenv("CHATSERVE_TEST", "1")
    folder = write_tokenizer_folder(tmp_path / "tiny")
    config = make_config(folder, server=ServerConfig(port=0, drain_timeout=2.0))
    engine_config = msgspec.structs.replace(config.engine, executor=FACTORY, cache=CacheConfig(num_blocks=512))
    tokenizer = Tokenizer.from_folder(folder)
    template = ChatTemplate.from_folder(folder, tokenizer)
    engine = EngineClient(engine_config, limits=UNHURRIED)
    await engine.start()
    async with asyncio.timeout(100):
        await engine.wait_ready()
    async with live_server(folder, engine) as live, ws_client(live) as client:  # type: ignore[arg-type]
        history = [ChatMessage("system", "You are noise.")]
        where: dict[str, str] = {"system": "You are noise."}
        known = num_stopped = 0
        for turn in range(TURNS):
            to_stop = turn % 3 == 1
            limit = 1000 if to_stop else 60  # those to stop take 20 s
            params = {"temperature": 0, "max_tokens": limit, "ignore_eos": to_stop}
            history.append(ChatMessage("user", f"Question {turn} ä😀"))
            ack = await client.call("chat.send", content=history[-1].content, params=params, **where)
            gen = ack["gens"][0]["gen"]
            if to_stop:
                await client.until("gen.delta")
                await client.call("gen.cancel", gen=gen)
            end = await client.end_of(gen)
            text = client.texts[gen]
            prompt = array("i", template.render(history).token_ids).tolist()
            sampling = SamplingParams(temperature=0.0, seed=0, max_tokens=limit, ignore_eos=to_stop)
            answer = expected_tokens(prompt, sampling)
            assert end["usage"]["prompt_tokens"] == len(prompt)
            assert (end["reason"] == "cancelled") == to_stop
            if to_stop:
                num_stopped += 1
                whole = tokenizer.decode(answer)
                assert whole.startswith(text)
                answer = answer[: next(n for n in range(len(answer) + 1) if tokenizer.decode(answer[:n]) == text)]
            else:
                assert text == tokenizer.decode(answer)
            # All of the last prompt and answer is cached, except its very last token, which was sampled and never run.
            cached = end["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached >= known - 1
            known = len(prompt) + len(answer)
            history.append(ChatMessage("assistant", text, token_ids=array("i", answer).tobytes()))
            where = {"conv": ack["conv"], "parent": ack["gens"][0]["msg"]}
        assert num_stopped > 0
        state = await engine.state()
        assert state.live_requests == 0
        assert state.recounted_held == state.stats.blocks_held == 0
