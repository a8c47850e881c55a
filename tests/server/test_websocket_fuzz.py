"""Anything may be sent to `/v1/ws`: the server answers or closes by the protocol, and never falls over."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosed

from tests.fakes import FakeEngineClient, say
from tests.server.live import LiveServer, live_server
from tests.server.ws_client import ws_client
from tests.waiting import eventually

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.sampled_from([2**31, -(2**63), 2**64, 1e308, "", "0", "\u0000", "\U0010ffff"])
)
VALUES = st.recursive(
    SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=8), v, max_size=3), max_leaves=5
)
PARAMS = st.dictionaries(
    st.sampled_from(["n", "max_tokens", "temperature", "stop", "seed", "logit_bias", "tools", "model", "x"]),
    VALUES,
    max_size=4,
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "content": VALUES | st.text(max_size=50),
        "conv": VALUES,
        "parent": VALUES,
        "system": VALUES,
        "params": VALUES | PARAMS,
        "gen": VALUES,
        "t": VALUES,
        "client": VALUES,
        "resume": VALUES,
        "ticket": VALUES,
        "from": VALUES,
        "later": VALUES,
    },
)
TYPES = st.sampled_from(["hello", "chat.send", "gen.cancel", "gen.attach", "sub", "ping", "welcome", "ack", ""])
COMMANDS = st.tuples(TYPES | st.text(max_size=10), FIELDS)
GOOD = st.tuples(
    st.just("chat.send"),
    st.fixed_dictionaries({"content": st.text(max_size=30)}, optional={"params": st.just({"n": 2}), "later": VALUES}),
)
RAW = st.text(max_size=60) | st.binary(max_size=20) | VALUES.map(json.dumps) | FIELDS.map(json.dumps)
ALLOWED_CODES = {None, 1000, 1003, 4400, 4429}


async def converse(live: LiveServer, frames: list[Any], greet: bool) -> None:
    """Send everything; each command is answered once, unless the socket was closed, with a code of the protocol."""
    async with ws_client(live, hello=greet) as client:
        sent: list[str] = []
        with contextlib.suppress(ConnectionClosed):
            for index, frame in enumerate(frames):
                if isinstance(frame, tuple):
                    kind, fields = frame
                    sent.append(f"{client.name}-f{index}")
                    await client.socket.send(json.dumps({**fields, "type": kind, "id": sent[-1]}))
                else:
                    await client.socket.send(frame)
            await client.call("ping", id="last")
            answered = Counter(message.get("re") for message in client.messages)
            assert [answered[command] for command in sent] == [1] * len(sent)
        assert client.socket.close_code in ALLOWED_CODES
    for message in client.messages:
        if message["type"] == "error":
            assert message["error"]["code"] != "internal_error", message
            assert "Traceback" not in message["error"]["message"]


def test_any_frames(tiny_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Wrong types, wrong order, unknown and malformed frames: no internal error, no 1011, no stack trace, no leak."""
    engine = FakeEngineClient(say("ok"))
    with asyncio.Runner() as runner:
        server = live_server(tiny_folder, engine)
        live = runner.run(server.__aenter__())
        try:

            @settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
            @given(st.lists(COMMANDS | GOOD | RAW, max_size=12), st.booleans())
            def check(frames: list[Any], greet: bool) -> None:
                runner.run(converse(live, frames, greet))

            check()
            runner.run(eventually(lambda: live.context.service.num_running == 0))
            assert engine.submissions, "some of it was good enough to be answered"
        finally:
            runner.run(server.__aexit__(None, None, None))
    assert "Traceback" not in "".join(capfd.readouterr())
