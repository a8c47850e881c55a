"""The model's own sampling defaults: used where a request says nothing, over every transport."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chatserve.errors import ModelLoadError
from chatserve.server.sampling_defaults import SamplingDefaults, sampling_defaults
from tests.fakes import FakeEngineClient, write_tokenizer_folder
from tests.server.live import live_server
from tests.server.ws_client import ws_client


def configured(path: Path, **values: object) -> Path:
    folder = write_tokenizer_folder(path)
    config = folder / "generation_config.json"
    known = json.loads(config.read_text()) if config.is_file() else {}
    config.write_text(json.dumps({**known, **values}))
    return folder


@pytest.mark.asyncio
async def test_the_models_defaults_stand_where_a_request_says_nothing(tmp_path: Path) -> None:
    """HTTP and WebSocket alike; a given field wins, and 1 is a given field."""
    folder = configured(tmp_path / "m", temperature=0.25, top_p=0.5, top_k=7)
    engine = FakeEngineClient()
    async with live_server(folder, engine) as live:
        assert (await live.chat(max_tokens=2)).status == 200
        assert (await live.complete(max_tokens=2, temperature=1, top_k=-1)).status == 200
        async with ws_client(live) as client:
            ack = await client.call("chat.send", content="hi", params={"max_tokens": 2})
            await client.end_of(ack["gens"][0]["gen"])
    chat, completion, socket = [(s.temperature, s.top_p, s.top_k) for s in (x.sampling for x in engine.submissions)]
    assert chat == socket == (0.25, 0.5, 7)
    assert completion == (1.0, 0.5, 0)


def test_what_the_file_says(tmp_path: Path) -> None:
    """No file, greedy by declaration, and a file that cannot be read."""
    assert sampling_defaults(tmp_path) == SamplingDefaults()
    path = tmp_path / "generation_config.json"
    path.write_text('{"do_sample": false, "temperature": 0.7, "eos_token_id": 2, "top_p": null}')
    assert sampling_defaults(tmp_path) == SamplingDefaults(temperature=0.0)
    path.write_text('{"temperature": "warm"}')
    with pytest.raises(ModelLoadError, match="temperature"):
        sampling_defaults(tmp_path)
