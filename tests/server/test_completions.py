"""``/v1/completions``, ``/tokenize`` and ``/detokenize``: prompts as texts and ids, several prompts, logprobs."""

from __future__ import annotations

from typing import Any

import pytest

from chatserve.config import ServerConfig
from tests.fakes import IM_END, FakeEngineClient, Script, Submission, ids, say
from tests.server.live import LiveServer, live_server


def echo(submission: Submission, choice: int) -> Script:
    """Answers with the prompt and the choice's number."""
    return say(submission.text + str(choice))


def texts(chunks: list[dict[str, Any]]) -> dict[int, str]:
    """Concatenated texts by choice."""
    out: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            out[choice["index"]] = out.get(choice["index"], "") + choice["text"]
    return out


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [[97, 98]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
        ("a<|im_end|>", [[97, IM_END]]),
    ],
)
async def test_every_form_of_prompt(live: LiveServer, prompt: object, expected: list[list[int]]) -> None:
    """The ids that reach the engine are the prompt's own; a raw prompt may contain control tokens."""
    live.engine.script = echo
    reply = await live.complete(prompt=prompt, max_tokens=20)
    assert reply.status == 200
    assert [submission.prompt for submission in live.engine.submissions] == expected
    answer = reply.json
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))


@pytest.mark.asyncio
async def test_several_prompts_and_choices_streamed_and_whole(live: LiveServer) -> None:
    """Choice ``c`` of prompt ``p`` has index ``p * n + c``; both modes agree, usage summed over prompts."""
    live.engine.script = echo
    fields: dict[str, Any] = {"prompt": ["one", "two", "three"], "n": 2, "max_tokens": 20}
    whole = (await live.complete(**fields)).json
    reply = await live.complete(**fields, stream=True, stream_options={"include_usage": True})
    expected = ["one0", "one1", "two0", "two1", "three0", "three1"]
    assert [choice["text"] for choice in whole["choices"]] == expected
    assert texts(reply.chunks) == dict(enumerate(expected))
    assert reply.chunks[-1]["usage"] == whole["usage"]
    assert whole["usage"]["prompt_tokens"] == 11
    assert reply.events[-1] == "[DONE]"
    reasons = [c["index"] for chunk in reply.chunks for c in chunk["choices"] if c["finish_reason"]]
    assert sorted(reasons) == list(range(6))


@pytest.mark.asyncio
async def test_sixteen_tokens_by_default(live: LiveServer) -> None:
    """OpenAI's default of this endpoint."""
    live.engine.script = say("x" * 100)
    choice = (await live.complete()).json["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("x" * 16, "length")


@pytest.mark.asyncio
async def test_logprobs_shape(live: LiveServer) -> None:
    """Tokens, their log-probabilities, the alternatives and offsets line up, streamed and whole."""
    live.engine.script = say("abc", delay=0.002)
    whole = (await live.complete(logprobs=2)).json["choices"][0]["logprobs"]
    assert whole["tokens"] == ["a", "b", "c"]
    assert whole["token_logprobs"] == [-0.5] * 3
    assert whole["text_offset"] == [0, 1, 2]
    assert whole["top_logprobs"][0] == {"a": -0.5, "b": -1.5}
    chunks = (await live.complete(logprobs=2, stream=True)).chunks
    streamed = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    for key, values in whole.items():
        assert [value for entry in streamed for value in entry[key]] == values
    assert (await live.complete(logprobs=0)).json["choices"][0]["logprobs"]["top_logprobs"] is None


@pytest.mark.asyncio
async def test_a_failing_prompt_ends_the_whole_response(live: LiveServer) -> None:
    """One engine error ends the stream with an error event and no [DONE]; the other prompts are aborted."""
    broken = Script([1], reason="error", error_message="Not a number.", delay=0.01)
    live.engine.script = lambda s, _: broken if s.prompt == ids("b") else Script([120], hang=True)
    reply = await live.complete(prompt=["a", "b", "c"], stream=True)
    assert '"error"' in reply.events[-1]
    assert b"[DONE]" not in reply.body
    whole = await live.complete(prompt=["b", "c"])
    assert whole.status == 500
    assert whole.error["type"] == "server_error"
    assert [s.aborted for s in live.engine.submissions] == [True, False, True, False, True]


@pytest.mark.asyncio
async def test_prompts_are_admitted_together_or_not_at_all(tiny_folder: Any) -> None:
    """Where the queue has room for some of a request's prompts only, none is enqueued."""
    engine = FakeEngineClient(Script([], hang=True), max_running=0)
    async with live_server(tiny_folder, engine, max_queued=2, server=ServerConfig(port=0)) as live:
        reply = await live.complete(prompt=["a", "b", "c"])
        assert (reply.status, reply.error["code"]) == (429, "queue_full")
        assert not engine.submissions


@pytest.mark.asyncio
async def test_tokenize_and_detokenize(live: LiveServer) -> None:
    """Ids of a text and of a conversation, and back; lengths are the engine's."""
    reply = (await live.post("/tokenize", {"prompt": "hi", "return_token_strs": True})).json
    assert reply == {"count": 2, "max_model_len": 1024, "tokens": [104, 105], "token_strs": ["h", "i"]}
    chat = (await live.post("/tokenize", {"messages": [{"role": "user", "content": "<|im_end|>"}]})).json
    await live.chat(messages=[{"role": "user", "content": "<|im_end|>"}])
    assert chat["tokens"] == live.engine.submissions[0].prompt
    short = {"messages": [{"role": "user", "content": "x"}], "add_generation_prompt": False}
    assert (await live.post("/tokenize", short)).json["tokens"][-1] == ids("\n")[0]
    back = await live.post("/detokenize", {"model": "tiny", "tokens": [104, 105, IM_END]})
    assert back.json == {"prompt": "hi<|im_end|>"}
    for path, body in [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": []}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [2**31]}),
        ("/detokenize", {"tokens": [2**63]}),
        ("/detokenize", {"tokens": "hi"}),
    ]:
        assert (await live.post(path, body)).status == 400, body
    assert (await live.post("/tokenize", {"model": "other", "prompt": "a"})).status == 404
