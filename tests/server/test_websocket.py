"""Chatting over `/v1/ws`: whole conversations, cancelling, idempotency, failures; real sockets, a scripted engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from chatserve.config import ServerConfig
from chatserve.server import ws_hub, ws_transport
from chatserve.server.generation import Generation
from chatserve.server.ws_hub import ChatHub
from chatserve.server.ws_recent import Recent
from chatserve.server.ws_timing import Stopwatch
from chatserve.sessions.memory_store import MemoryStore
from tests.fakes import IM_END, FakeEngineClient, Script, Submission, ids, say
from tests.server.live import LiveServer, live_server
from tests.server.ws_client import ws_client
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio


async def test_welcome_tells_what_a_page_needs(live: LiveServer) -> None:
    """Model, limits, boot id and running answers are known before the first message."""
    async with ws_client(live, hello=False) as client:
        assert client.socket.subprotocol == "chatserve.v1"
        welcome = await client.hello()
    assert welcome["server"]["model"] == "tiny"
    assert welcome["server"]["boot"]
    assert welcome["limits"]["max_context"] == 1024
    assert welcome["active"] == []
    assert welcome["heartbeat_ms"] > 0


async def test_one_turn(live: LiveServer) -> None:
    """A message is acknowledged first, then started, streamed and ended with usage, timings and hash."""
    live.engine.script = say("Grüße 😀!", delay=0.02, cached_tokens=7)
    async with ws_client(live) as client:
        _ack, text, end = await client.ask("hi", params={"max_tokens": 64})
        types = [message["type"] for message in client.messages[1:]]
    assert text == "Grüße 😀!"
    assert types[:2] == ["ack", "gen.started"]
    assert types[-1] == "gen.done"
    assert types.count("gen.delta") >= 3, "it streams"
    assert end["reason"] == "stop"
    prompt = len(live.engine.submissions[0].prompt)
    answer = len(ids("Grüße 😀!")) + 1
    assert end["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": 7},
    }
    assert end["timings"]["ttft"] >= 0
    assert end["timings"]["tok_s"] > 0
    assert sum(message["n"] for message in client.messages if message["type"] == "gen.delta") == answer - 1


async def test_history_is_token_exact(live: LiveServer) -> None:
    """The next prompt continues the last one with exactly the ids that were sampled, system prompt included."""
    odd = [*ids("caf"), 0xC3, 0xA9, *ids(" ok")]
    live.engine.script = Script(tokens=odd)
    async with ws_client(live) as client:
        ack, text, _ = await client.ask("one", system="Be brief.")
        await client.ask("two", conv=ack["conv"], parent=ack["gens"][0]["msg"])
    first, second = (submission.prompt for submission in live.engine.submissions)
    assert text == "café ok"
    assert live.engine.submissions[0].text.startswith("<257>system\nBe brief.<258>")
    assert second[: len(first) + len(odd) + 1] == [*first, *odd, IM_END]
    assert live.engine.submissions[1].text.endswith("<257>user\ntwo<258>\n<257>assistant\n")


async def test_parent_makes_branches(live: LiveServer) -> None:
    """The same parent twice gives siblings; null starts over; absent continues from the latest message."""
    async with ws_client(live) as client:
        ack, _, _ = await client.ask("one")
        conv, answer = ack["conv"], ack["gens"][0]["msg"]
        await client.ask("two", conv=conv, parent=answer)
        await client.ask("other", conv=conv, parent=answer)
        await client.ask("latest", conv=conv)
        await client.ask("over", conv=conv, parent=None)
    texts = [submission.text for submission in live.engine.submissions]
    assert "two" not in texts[2]
    assert "other" in texts[3]
    assert "one" not in texts[4]
    assert texts[4].startswith("<257>user\nover<258>")


async def test_a_store_that_fails_still_ends_the_answer(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in storage becomes the answer's explicit end, not a client that waits for ever."""

    async def broken(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(MemoryStore, "finish", broken)
    async with live_server(tiny_folder, FakeEngineClient()) as live, ws_client(live) as client:
        _, text, end = await client.ask("hi")
        assert text == "Hello!"
        assert end["type"] == "gen.failed"
        assert end["error"]["code"] == "internal_error"
        assert "disk" not in end["error"]["message"]


async def test_a_fault_inside_is_logged_and_ends_the_answer(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client learns that it was the server's fault and nothing more; the log has the exception."""

    def explode(*_: object) -> None:
        raise KeyError("secret prompt text")

    async with ws_client(live) as client:
        with monkeypatch.context() as patch, capture_logs() as logs:
            patch.setattr(ChatHub, "_note_start", explode)
            ack = await client.call("chat.send", content="hi")
            end = await client.end_of(ack["gens"][0]["gen"])
        assert (end["type"], end["error"]["code"]) == ("gen.failed", "internal_error")
        assert "secret" not in end["error"]["message"]
        (entry,) = (entry for entry in logs if entry["event"] == "answer_failed")
        assert entry["generations"] == [end["gen"]]
        assert entry["exc_info"]
        assert (await client.ask("again"))[1] == "Hello!"


async def test_a_fault_inside_frees_the_engine_before_the_store_is_waited_for(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several answers, too: nothing is computed for a turn that has failed."""
    freed, finish = list[bool](), MemoryStore.finish

    async def watched(*arguments: Any, **options: Any) -> None:
        freed.append(live.engine.submissions[0].aborted)
        await finish(*arguments, **options)

    def explode(*_: object) -> None:
        raise KeyError

    live.engine.script = say("Hello!", hang=True)
    monkeypatch.setattr(MemoryStore, "finish", watched)
    monkeypatch.setattr(ChatHub, "_note_start", explode)
    async with ws_client(live) as client:
        ack = await client.call("chat.send", content="hi", params={"n": 2})
        for answer in ack["gens"]:
            await client.end_of(answer["gen"])
    assert freed == [True, True]


async def test_a_fault_while_a_failed_answer_ends_hides_no_failure(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the client can do something about is what it is told."""

    def explode(*_: object) -> None:
        raise KeyError

    live.engine.script = say("", reason="error", error_code="context_length_exceeded", error_message="No room.")
    monkeypatch.setattr(ws_hub, "exact_token_ids", explode)
    async with ws_client(live) as client:
        ack = await client.call("chat.send", content="hi")
        end = await client.end_of(ack["gens"][0]["gen"])
    assert end["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("owner", "name"),
    [(Generation, "choice_token_ids"), (ws_hub, "exact_token_ids"), (Stopwatch, "timings")],
)
@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_fault_while_an_answer_ends_still_ends_it(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, cancelled: bool
) -> None:
    """Each answer of the turn, by itself or by its client's wish: once, in the log too, and not running any more."""

    def explode(*_: object) -> None:
        raise KeyError("secret prompt text")

    live.engine.script = say("Hello!", hang=cancelled)
    async with ws_client(live) as client:
        with monkeypatch.context() as patch, capture_logs() as logs:
            patch.setattr(owner, name, explode)
            ack = await client.call("chat.send", content="hi", params={"n": 2})
            gens = [answer["gen"] for answer in ack["gens"]]
            for gen in gens:
                while client.texts.get(gen) != "Hello!":
                    await client.receive()
                if cancelled:
                    assert (await client.call("gen.cancel", gen=gen))["type"] == "ack"
            ends = [await client.end_of(gen) for gen in gens]
        assert [(end["type"], end["error"]["code"]) for end in ends] == [("gen.failed", "internal_error")] * 2
        assert "secret" not in str(ends)
        faults = [entry for entry in logs if entry["event"] == "answer_failed"]
        assert sorted(entry["generations"] for entry in faults) == sorted([gen] for gen in gens)
        assert all(entry["exc_info"] for entry in faults)
        live.engine.script = say("Hello!")
        for answer in ack["gens"]:
            assert (await client.ask("again", conv=ack["conv"], parent=answer["msg"]))[1] == "Hello!"
    async with ws_client(live, hello=False) as other:
        assert (await other.hello())["active"] == []


async def test_a_fault_inside_is_no_conflict_of_a_second_sender(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever sends the same id while the first send fails is not told that its sender has left."""
    fail, num_lookups, find_send = asyncio.Event(), 0, Recent.find_send

    async def broken(*_: object) -> str:
        await fail.wait()
        raise OSError("disk full")

    def counting(recent: Recent[Any], tenant: str, command: str) -> Any:
        nonlocal num_lookups
        num_lookups += 1
        return find_send(recent, tenant, command)

    monkeypatch.setattr(MemoryStore, "create", broken)
    monkeypatch.setattr(Recent, "find_send", counting)
    async with ws_client(live) as first, ws_client(live) as second:
        for number, client in enumerate((first, second), 1):
            await client.send("chat.send", id="same", content="hi")
            await eventually(lambda number=number: num_lookups == number)  # type: ignore[misc]
        fail.set()
        for client in (first, second):
            assert (await client.reply("same"))["error"]["code"] == "internal_error"


async def test_several_answers(live: LiveServer) -> None:
    """n answers are n generations and sibling messages; each can be cancelled on its own and continued from."""

    def script(_: Submission, choice: int) -> Script:
        return say("short") if choice == 0 else say("long " * 40, delay=0.01)

    live.engine.script = script
    async with ws_client(live) as client:
        ack = await client.call("chat.send", content="hi", params={"n": 2})
        first, second = ack["gens"]
        assert first["msg"] != second["msg"]
        assert (await client.end_of(first["gen"]))["reason"] == "stop"
        await client.call("gen.cancel", gen=second["gen"])
        assert (await client.end_of(second["gen"]))["reason"] == "cancelled"
        live.engine.script = say("fine")
        await client.ask("more", conv=ack["conv"], parent=second["msg"])
        assert client.texts[first["gen"]] == "short"
        assert client.texts[second["gen"]] in live.engine.submissions[1].text
    assert live.engine.submissions[0].aborted, "the last open answer takes the request with it"


@pytest.mark.parametrize("wait", [0.0, 0.001, 0.005, 0.012, 0.02])
async def test_cancel_then_send(live: LiveServer, wait: float) -> None:
    """A message right after a stop gets its full answer, and history holds exactly what was delivered before it."""
    live.engine.script = lambda s, _: (
        say("abcdefghij" * 30, delay=0.001) if len(live.engine.submissions) == 1 else say("full")
    )
    async with ws_client(live) as client:
        ack = await client.call("chat.send", content="one")
        gen, msg = ack["gens"][0]["gen"], ack["gens"][0]["msg"]
        await client.until("gen.delta")
        await asyncio.sleep(wait)
        await client.send("gen.cancel", gen=gen)
        await asyncio.sleep(wait)
        _, text, end = await client.ask("two", conv=ack["conv"], parent=msg)
        delivered = client.texts[gen]
    assert (text, end["reason"]) == ("full", "stop")
    assert client.ends[gen]["reason"] == "cancelled"
    assert "abcdefghij".startswith(delivered[:10])
    first, second = live.engine.submissions
    assert first.aborted
    assert second.prompt[: len(first.prompt) + len(delivered) + 1] == [*first.prompt, *ids(delivered), IM_END]


async def test_cancel_in_the_middle_of_a_character(live: LiveServer) -> None:
    """Bytes that were never shown are not in the history either."""
    live.engine.script = Script(tokens=[*ids("ok"), 0xF0, 0x9F], hang=True)
    async with ws_client(live) as client:
        ack = await client.call("chat.send", content="one")
        gen = ack["gens"][0]["gen"]
        while client.texts.get(gen) != "ok":
            await client.receive()
        await eventually(lambda: live.engine.submissions[0].num_sent == 4)
        await client.call("gen.cancel", gen=gen)
        end = await client.end_of(gen)
        live.engine.script = say("fine")
        await client.ask("two", conv=ack["conv"])
    assert end["end"] == 2
    first, second = live.engine.submissions
    assert second.prompt[: len(first.prompt) + 3] == [*first.prompt, *ids("ok"), IM_END]


async def test_cancel_is_idempotent(live: LiveServer) -> None:
    """Cancelling twice, or after the end, is acknowledged and changes nothing; an unknown id is not found."""
    live.engine.script = say("x" * 500, delay=0.01)
    async with ws_client(live) as client:
        ack = await client.call("chat.send", content="hi")
        gen = ack["gens"][0]["gen"]
        for _ in range(3):
            assert (await client.call("gen.cancel", gen=gen))["type"] == "ack"
        assert (await client.end_of(gen))["reason"] == "cancelled"
        assert (await client.call("gen.cancel", gen=gen))["type"] == "ack"
        error = await client.call("gen.cancel", gen="g_unknown")
        assert error["error"]["code"] == "not_found"


async def test_send_is_idempotent(live: LiveServer) -> None:
    """The same id again, also on another socket, gets the same ack and asks the engine nothing."""
    async with ws_client(live) as client:
        first = await client.call("chat.send", id="same", content="hi")
        again = await client.call("chat.send", id="same", content="hi")
        await client.end_of(first["gens"][0]["gen"])
        async with ws_client(live) as other:
            third = await other.call("chat.send", id="same", content="hi")
            gen = third["gens"][0]["gen"]
            await other.end_of(gen)
            assert other.texts[gen] == client.texts[gen] == "Hello!"
    assert first == again == third
    assert len(live.engine.submissions) == 1


async def test_a_refused_send_may_be_sent_again(live: LiveServer) -> None:
    """Idempotency remembers successes only."""
    async with ws_client(live) as client:
        live.engine.set_ready(False)
        refused = await client.call("chat.send", id="retry", content="hi")
        assert refused["error"]["code"] == "engine_unavailable"
        assert refused["error"]["retry_after_ms"] > 0
        live.engine.set_ready(True)
        assert (await client.call("chat.send", id="retry", content="hi"))["type"] == "ack"


async def test_a_dead_engine_ends_every_answer(live: LiveServer) -> None:
    """gen.failed, with the partial text kept; the conversation goes on when the engine is back."""
    live.engine.script = Script(tokens=ids("par"), hang=True)
    async with ws_client(live) as client:
        ack = await client.call("chat.send", content="one")
        gen = ack["gens"][0]["gen"]
        while client.texts.get(gen) != "par":
            await client.receive()
        live.engine.die(ready_again=True)
        end = await client.end_of(gen)
        assert end["type"] == "gen.failed"
        assert end["error"]["code"] == "engine_unavailable"
        live.engine.script = say("back")
        _, text, _ = await client.ask("two", conv=ack["conv"])
    assert text == "back"
    assert live.engine.submissions[1].text.count("par<258>") == 1


async def test_queue_position_is_told(tiny_folder: Path) -> None:
    """Who waits hears about it, before it starts and never after."""
    held = say("x", delay=0.005, hang=True)
    engine = FakeEngineClient(lambda s, _: held if s.request_id == 0 else say("y"), max_running=1)
    async with live_server(tiny_folder, engine) as live, ws_client(live) as client:
        first = await client.call("chat.send", content="one")
        second = await client.call("chat.send", content="two")
        gen = second["gens"][0]["gen"]
        await client.until("gen.queued")
        held.hang = False
        await client.end_of(gen)
        mine = [message["type"] for message in client.messages if message.get("gen") == gen]
        await client.end_of(first["gens"][0]["gen"])
    assert mine == ["gen.queued", "gen.started", "gen.delta", "gen.done"]


async def test_disconnect_stops_the_answer(tiny_folder: Path) -> None:
    """When the socket goes, waiting or answering, the engine is told at once and nothing is left running."""
    engine = FakeEngineClient(say("x" * 1000, delay=0.005), max_running=1)
    async with live_server(tiny_folder, engine) as live:
        async with ws_client(live) as client:
            await client.call("chat.send", content="running")
            await client.until("gen.delta")
            await client.call("chat.send", content="waiting")
            assert live.context.service.num_running == 2
            client.socket.transport.abort()
        await eventually(lambda: live.context.service.num_running == 0)
        assert all(submission.aborted for submission in engine.submissions)


async def test_conversation_of_nobody(live: LiveServer) -> None:
    """Unknown conversations and parents are not found; an answer that is still written cannot be continued."""
    live.engine.script = say("x", hang=True, delay=0.01)
    async with ws_client(live) as client:
        for fields in ({"conv": "c_none"}, {"conv": "c_none", "parent": "m_none"}, {"conv": "c_none", "parent": None}):
            assert (await client.call("chat.send", content="hi", **fields))["error"]["code"] == "not_found"
        ack = await client.call("chat.send", content="hi")
        conv, msg = ack["conv"], ack["gens"][0]["msg"]
        for parent in ("m_none",):
            error = await client.call("chat.send", content="hi", conv=conv, parent=parent)
            assert (error["error"]["code"], error["error"]["param"]) == ("not_found", "parent")
        for parent in (msg, ack["user_msg"]):
            error = await client.call("chat.send", content="hi", conv=conv, parent=parent)
            assert error["error"]["code"] == "conversation_conflict"
        error = await client.call("chat.send", content="hi", conv=conv, parent=msg, system="no")
        assert error["error"]["param"] == "system"
    assert len(live.engine.submissions) == 1


async def test_params_are_those_of_a_chat_completion(live: LiveServer) -> None:
    """Sampling fields reach the engine; a bad, foreign or unimplemented one is refused by its name."""
    async with ws_client(live) as client:
        params = {"temperature": 0.5, "top_k": -1, "seed": 9, "max_completion_tokens": 3, "stop": ["zz"], "priority": 4}
        _, text, end = await client.ask("hi", params={**params, "model": "tiny", "later_field": 1})
        assert (text, end["reason"]) == ("Hel", "length")
        sampling = live.engine.submissions[0].sampling
        assert (sampling.temperature, sampling.top_k, sampling.seed, sampling.max_tokens) == (0.5, 0, 9, 3)
        assert live.engine.submissions[0].priority == 4
        for name, value in {
            "temperature": 3,
            "top_p": 0,
            "n": 17,
            "max_tokens": 0,
            "max_completion_tokens": "5",
            "seed": True,
            "stop": [""],
            "tools": [{"type": "function"}],
            "response_format": {"type": "json_object"},
            "logprobs": True,
            "messages": [{"role": "user", "content": "x"}],
            "stream": False,
            "model": "other",
        }.items():
            error = (await client.call("chat.send", content="hi", params={name: value}))["error"]
            assert error["param"] == f"params.{name}", (name, error)
        for name in ("max_tokens", "max_completion_tokens"):
            long = (await client.call("chat.send", content="hi", params={name: 5000}))["error"]
            assert (long["code"], long["param"]) == ("context_length_exceeded", f"params.{name}")
            assert "1024" in long["message"]
        private_use = "".join(map(chr, range(0xE000, 0xF900)))
        assert (await client.call("chat.send", content=private_use))["error"]["param"] == "content"
        both = (await client.call("chat.send", content="hi", system=private_use))["error"]
        assert both["code"] == "invalid_value"
        assert "param" not in both, "which of the two is not known"
    assert len(live.engine.submissions) == 1


async def test_stop_strings(live: LiveServer) -> None:
    """A stop string ends the answer, is not shown, and the history holds the text before it."""
    live.engine.script = say("Hello STOP and more")
    async with ws_client(live) as client:
        ack, text, end = await client.ask("hi", params={"stop": " STOP"})
        await client.ask("two", conv=ack["conv"])
    assert (text, end["reason"]) == ("Hello", "stop")
    assert "assistant\nHello<258>" in live.engine.submissions[1].text


@pytest.mark.parametrize(
    "params", [{}, {"stop": "🙂"}, {"stop": [" and", "zz"]}, {"max_tokens": 9}, {"stop": "x", "n": 2}]
)
async def test_same_answer_as_over_http(live: LiveServer, params: dict[str, Any]) -> None:
    """Text, reason and usage of one request do not depend on the transport."""
    live.engine.script = say("Grüße 🙂 and more, ünd more")
    fields = {"messages": [{"role": "user", "content": "hi"}], "seed": 5, **params}
    whole = (await live.chat(**fields)).json
    events = (await live.chat(**fields, stream=True)).chunks
    async with ws_client(live) as client:
        ack = await client.call("chat.send", content="hi", params={"seed": 5, **params})
        for index, answer in enumerate(ack["gens"]):
            end = await client.end_of(answer["gen"])
            choice = whole["choices"][index]
            assert client.texts[answer["gen"]] == choice["message"]["content"]
            assert end["reason"] == choice["finish_reason"]
            streamed = [c for event in events for c in event["choices"] if c["index"] == index]
            assert client.texts[answer["gen"]] == "".join(c["delta"].get("content", "") for c in streamed)
            assert end["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
        spent = [client.ends[answer["gen"]]["usage"]["completion_tokens"] for answer in ack["gens"]]
        assert sum(spent) == whole["usage"]["completion_tokens"]
    assert len({tuple(submission.prompt) for submission in live.engine.submissions}) == 1


async def test_full_queue(tiny_folder: Path) -> None:
    """A full queue refuses with a hint when to try again, and stores nothing."""
    engine = FakeEngineClient(say("x", hang=True, delay=0.01), max_running=1)
    async with live_server(tiny_folder, engine, max_queued=1) as live, ws_client(live) as client:
        running = await client.call("chat.send", content="one")
        await client.until("gen.started")
        await client.call("chat.send", content="two")
        error = (await client.call("chat.send", content="three", conv=running["conv"], parent=None))["error"]
        assert error["code"] == "queue_full"
        assert error["type"] == "rate_limit_error"
        assert error["retry_after_ms"] > 0
    assert len(engine.submissions) == 2


async def test_two_sockets_share_nothing_but_the_tenant(live: LiveServer) -> None:
    """Each socket hears its own generations only; a conversation can be continued from the other."""
    live.engine.script = say("abc", delay=0.005)
    async with ws_client(live) as one, ws_client(live) as two:
        (ack, text, _), (_, other, _) = await asyncio.gather(one.ask("first"), two.ask("second"))
        assert text == other == "abc"
        assert len(one.ends) == len(two.ends) == 1
        await two.ask("third", conv=ack["conv"], parent=ack["gens"][0]["msg"])
        assert "first" in live.engine.submissions[2].text


async def test_draining(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM: a notice, no new messages, running answers get their end, then a close that asks to come back."""
    monkeypatch.setattr(ws_transport, "GOODBYE_SECONDS", 1.0)
    engine = FakeEngineClient(held := say("x" * 40, delay=0.005, hang=True))
    config = ServerConfig(port=0, drain_timeout=3600.0)
    async with live_server(tiny_folder, engine, server=config) as live, ws_client(live) as client:
        ack = await client.call("chat.send", content="one")
        await client.until("gen.started")
        live.server.drain()
        notice = await client.until("server.draining")
        assert notice["deadline_ms"] == 3_600_000
        assert (await client.call("chat.send", content="two"))["error"]["code"] == "draining"
        held.hang = False
        end = await client.end_of(ack["gens"][0]["gen"])
        assert end["reason"] == "stop"
        await client.socket.wait_closed()
        assert client.socket.close_code in (1001, 1012)


async def test_drain_timeout_is_explicit(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that outlasts the drain ends with an error before the socket closes."""
    monkeypatch.setattr(ws_transport, "GOODBYE_SECONDS", 1.0)
    engine = FakeEngineClient(Script(tokens=ids("par"), hang=True))
    config = ServerConfig(port=0, drain_timeout=0.3)
    async with live_server(tiny_folder, engine, server=config) as live, ws_client(live) as client:
        ack = await client.call("chat.send", content="one")
        await client.until("gen.delta")
        live.server.drain()
        end = await client.end_of(ack["gens"][0]["gen"])
        assert end["type"] == "gen.failed"
        assert end["error"]["code"] == "draining", end
        await client.socket.wait_closed()
        assert client.socket.close_code in (1001, 1012)
