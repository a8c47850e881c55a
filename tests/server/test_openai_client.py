"""The official ``openai`` client as the judge: sync, async, raw and ``.stream()``, and its error classes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from chatserve.config import ServerConfig
from tests.fakes import FakeEngineClient, Script, say
from tests.server.live import LiveServer, live_server
from tests.waiting import PATIENCE

MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest_asyncio.fixture
async def client(live: LiveServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.mark.asyncio
async def test_async_whole_and_streamed(live: LiveServer, client: openai.AsyncOpenAI) -> None:
    """Typed objects come out of both modes, request id and usage included."""
    whole = await client.chat.completions.create(model="tiny", messages=MESSAGES)
    assert whole.choices[0].message.content == "Hello!"
    assert whole._request_id
    stream = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, n=2, stream_options={"include_usage": True}
    )
    texts = {0: "", 1: ""}
    usage = None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {0: "Hello!", 1: "Hello!"}
    assert usage is not None
    assert whole.usage is not None
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    assert usage.prompt_tokens_details is not None


@pytest.mark.asyncio
async def test_models(live: LiveServer, client: openai.AsyncOpenAI) -> None:
    """The served model is listed and found by its name; another is refused by name, whatever slashes it holds."""
    (listed,) = (await client.models.list()).data
    assert listed.id == "tiny"
    assert await client.models.retrieve("tiny") == listed
    for other in ("gpt-4", "org/tiny", "tiny/"):
        with pytest.raises(openai.NotFoundError, match=f"'{other}' is not served here") as caught:
            await client.models.retrieve(other)
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert (await live.get("/v1/models/org/tiny")).error["code"] == "model_not_found"


@pytest.mark.asyncio
async def test_stream_helper_accumulates(live: LiveServer, client: openai.AsyncOpenAI) -> None:
    """``.stream()`` indexes choices by position and overwrites usage: order and last chunk must suit it."""
    live.engine.script = lambda _, choice: say(f"answer {choice}", cached_tokens=3)
    options: Any = {"include_usage": True}
    async with client.chat.completions.stream(
        model="tiny", messages=MESSAGES, n=3, stream_options=options, logprobs=True, top_logprobs=1
    ) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == ["answer 0", "answer 1", "answer 2"]
    assert {choice.finish_reason for choice in final.choices} == {"stop"}
    assert final.usage is not None
    assert final.usage.prompt_tokens_details is not None
    assert final.usage.prompt_tokens_details.cached_tokens == 3
    assert final.choices[0].logprobs is not None
    assert len(final.choices[0].logprobs.content or []) == len("answer 0")


@pytest.mark.asyncio
async def test_sync_client(live: LiveServer) -> None:
    """The blocking client, in a thread: whole, streamed, raw, and the legacy endpoint."""

    def talk() -> tuple[str | None, str, str, str | None]:
        with openai.OpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=0) as client:
            whole = client.chat.completions.create(model="tiny", messages=MESSAGES).choices[0].message.content
            chunks = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
            streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            legacy = client.completions.create(model="tiny", prompt="hi").choices[0].text
            raw = client.chat.completions.with_raw_response.create(model="tiny", messages=MESSAGES)
            return whole, streamed, legacy, raw.headers.get("x-request-id")

    whole, streamed, legacy, request_id = await asyncio.to_thread(talk)
    assert (whole, streamed, legacy) == ("Hello!", "Hello!", "Hello!")
    assert request_id


@pytest.mark.asyncio
async def test_early_close_frees_the_engine(live: LiveServer, client: openai.AsyncOpenAI) -> None:
    """Leaving a stream in the middle aborts the request in the engine at once."""
    live.engine.script = Script([120] * 5, hang=True)
    stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    async for _ in stream:
        break
    await stream.close()
    await asyncio.wait_for(live.engine.submissions[0].aborted_event.wait(), PATIENCE)


@pytest.mark.asyncio
async def test_error_classes(live: LiveServer, client: openai.AsyncOpenAI) -> None:
    """Each refusal becomes the client's own exception class with code and param."""
    create = client.chat.completions.create
    with pytest.raises(openai.BadRequestError) as bad:
        await create(model="tiny", messages=MESSAGES, temperature=3)
    assert bad.value.param == "temperature"
    assert bad.value.request_id
    with pytest.raises(openai.NotFoundError) as missing:
        await create(model="gpt-4", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        await create(model="tiny", messages=MESSAGES, max_tokens=5000, stream=True)
    assert long.value.code == "context_length_exceeded"
    live.engine.set_ready(False)
    with pytest.raises(openai.InternalServerError) as unavailable:
        await create(model="tiny", messages=MESSAGES)
    assert unavailable.value.status_code == 503
    assert unavailable.value.code == "engine_unavailable"


@pytest.mark.asyncio
async def test_engine_death_in_the_middle_of_a_stream_raises(live: LiveServer, client: openai.AsyncOpenAI) -> None:
    """A dead engine is an ``APIError`` for the reader, never silence; text that came before it was delivered."""
    live.engine.script = Script([120] * 5, hang=True)
    stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    seen: list[str] = []

    async def read() -> None:
        async for chunk in stream:
            seen.append(chunk.choices[0].delta.content or "")
            if "".join(seen) == "xxxxx":
                live.engine.die(ready_again=True)

    with pytest.raises(openai.APIError) as failed:
        await read()
    assert failed.value.code == "engine_unavailable"
    assert "".join(seen) == "xxxxx"
    live.engine.script = say("back")
    again = await client.chat.completions.create(model="tiny", messages=MESSAGES)
    assert again.choices[0].message.content == "back"


@pytest.mark.asyncio
async def test_full_queue_is_retried_by_the_client(tiny_folder: Any) -> None:
    """429 carries retry-after-ms, which the client honours: a retry succeeds once there is room."""
    engine = FakeEngineClient(Script([], hang=True), max_running=0)
    async with (
        live_server(tiny_folder, engine, max_queued=1, server=ServerConfig(port=0)) as live,
        openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=1) as client,
    ):
        waiting = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        with pytest.raises(openai.RateLimitError) as full:
            await client.with_options(max_retries=0).chat.completions.create(model="tiny", messages=MESSAGES)
        assert full.value.code == "queue_full"
        assert int(full.value.response.headers["retry-after-ms"]) == 1000
        assert full.value.response.headers["retry-after"] == "1"
        await waiting.close()
