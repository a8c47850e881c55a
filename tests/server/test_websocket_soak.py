"""Many sockets at once, cancelling, dropping and coming back at random: nobody's stream is lost, mixed or left over."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import msgspec
import pytest

from tests.fakes import FakeEngineClient, Script, Submission, say
from tests.server.live import LiveServer, live_server
from tests.server.ws_client import WsClient, ws_client
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio

SOCKETS = 24
TURNS = 6
SEED = 20


def expected(question: str) -> str:
    """The one right answer to a question."""
    return f"[{question}] " + "ä😀x" * len(question)


def script(submission: Submission, choice: int) -> Script:
    """Answer the last question of the prompt."""
    question = bytes(t for t in submission.prompt if t < 256).decode().rpartition("user\n")[2].partition("\n")[0]
    return say(expected(question), delay=0.001)


async def one_turn(client: WsClient, rng: random.Random, number: int, conv: str | None) -> tuple[str | None, bool]:
    """Ask; then wait, cancel or drop. Returns the conversation and whether the socket is still there."""
    question = f"q{number} {rng.randrange(10**6)}"
    fields = {} if conv is None else {"conv": conv}
    ack = await client.call("chat.send", content=question, **fields)
    assert ack["type"] == "ack", ack
    gen = ack["gens"][0]["gen"]
    fate = rng.random()
    if fate < 0.25:
        await asyncio.sleep(rng.random() * 0.05)
        await client.send("gen.cancel", gen=gen)
    elif fate < 0.4:
        await asyncio.sleep(rng.random() * 0.05)
        client.socket.transport.abort()
        return ack["conv"], False
    end = await client.end_of(gen)
    text = client.texts[gen]
    if end["reason"] == "stop":
        assert text == expected(question)
    else:
        assert end["reason"] == "cancelled"
        assert expected(question).startswith(text)
    return ack["conv"], True


async def one_user(live: LiveServer, rng: random.Random, number: int) -> int:
    """A user with one conversation over as many sockets as it takes; the number of turns that were dropped."""
    conv: str | None = None
    turn = dropped = 0
    while turn < TURNS:
        async with ws_client(live, hello=False) as client:
            # The server may not have noticed yet that the last socket has gone; welcome says what still runs.
            for active in (await client.hello())["active"]:
                if active["conv"] == conv:
                    await client.call("gen.cancel", gen=active["gen"])
            there = True
            while there and turn < TURNS:
                conv, there = await one_turn(client, rng, 100 * number + turn, conv)
                turn += 1
                dropped += not there
    return dropped


async def test_many_unsteady_sockets(tiny_folder: Path) -> None:
    """Every shown text is a prefix of the right one, and whole where it ended by itself; nothing runs on afterwards."""
    engine = FakeEngineClient(script, max_running=16)
    engine.info = msgspec.structs.replace(engine.info, max_model_len=10**6, max_tokens_in_pool=10**6)
    async with live_server(tiny_folder, engine) as live:
        users = [one_user(live, random.Random(f"{SEED}/{number}"), number) for number in range(SOCKETS)]
        dropped = sum(await asyncio.gather(*users))
        await eventually(lambda: live.context.service.num_running == 0)
        await eventually(
            lambda: not [task for task in asyncio.all_tasks() if task.get_name().startswith(("turn ", "w_"))]
        )
    assert dropped > 0
    assert any(submission.aborted for submission in engine.submissions)
    assert len(engine.submissions) == SOCKETS * TURNS
