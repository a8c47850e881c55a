"""Bad input is a 4xx that names the field, never a 5xx, and never reaches the engine; good edges still work."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from chatserve.config import ServerConfig
from chatserve.errors import ChatserveError
from chatserve.server.body import scan_structure
from chatserve.server.parse import parse_messages, parse_request
from chatserve.server.unsupported import NO_OPS
from chatserve.server.wire import ChatCompletionRequest, CompletionRequest
from chatserve.text.chat_template import ChatTemplate
from chatserve.text.tokenizer import Tokenizer
from tests.server.live import HI, LiveServer, Reply
from tests.server.ws_client import ws_client

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HUGE = "9" * 400
INTEGERS = [
    "2147483648", "-2147483649", "9223372036854775807", "-9223372036854775808", "9223372036854775808",
    "-9223372036854775809", "18446744073709551616", HUGE, "1e400", "-1e400", "-0", '"1"', "true", "[1]", "{}", "1.5",
    "NaN", "Infinity", "01", "+1", "0x1", "1e3",
]  # fmt: skip
INT_FIELDS = ["n", "max_tokens", "max_completion_tokens", "min_tokens", "top_k", "seed", "top_logprobs", "priority"]
FLOAT_FIELDS = {
    "temperature": (0, 2),
    "top_p": (1e-9, 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100),
}


FIELDS = sorted({*ChatCompletionRequest.__struct_fields__, *NO_OPS})
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def body(field: str, raw: str, **more: object) -> bytes:
    """A chat request with one field as raw JSON text."""
    rest = json.dumps({"messages": HI, **more})[1:]
    return f'{{"{field}": {raw}, {rest}'.encode()


async def refused(live: LiveServer, path: str, content: object, status: int = 400) -> Reply:
    """Expect a refusal with OpenAI's error body, no inside of ours, and nothing enqueued."""
    before = len(live.engine.submissions)
    reply = await live.post(path, content)
    assert reply.status == status, (content if len(str(content)) < 300 else "…", reply.body[:300])
    text = reply.error["message"]
    assert not any(word in text for word in ("Traceback", "msgspec", 'File "', "Exception", "<class"))
    assert len(live.engine.submissions) == before
    return reply


@pytest.mark.asyncio
async def test_every_integer_field_with_every_odd_value(live: LiveServer) -> None:
    """200 within the documented meaning, or 400 naming the field (or the JSON); never 5xx."""
    for field in INT_FIELDS:
        for raw in INTEGERS:
            more = {"logprobs": True} if field == "top_logprobs" else {}
            reply = await live.post(CHAT, body(field, raw, **more))
            assert reply.status in (200, 400), (field, raw, reply.body)
            if raw in ('"1"', "true", "[1]", "{}", "1.5", HUGE, "9223372036854775808", "-9223372036854775809"):
                assert reply.status == 400, (field, raw)
                assert reply.error["param"] == field, (field, raw, reply.body)
            if reply.status == 200:
                assert field in ("seed", "priority", "top_k", "min_tokens", "top_logprobs"), (field, raw)
    assert (await live.chat()).status == 200


@pytest.mark.asyncio
async def test_float_fields(live: LiveServer) -> None:
    """Limits are inclusive; just outside, not finite, or not a number is 400 with the field's name."""
    for field, (low, high) in FLOAT_FIELDS.items():
        for good in (low, high, None):
            assert (await live.chat(**{field: good}, max_tokens=1)).status == 200, (field, good)
        for raw in [str(high + 0.01), str(low - 0.01), "1e400", '"0.5"', "true", "[0.5]", "-1e308"]:
            reply = await refused(live, CHAT, body(field, raw))
            assert reply.error["param"] == field, (field, raw)
    for raw in ("1e-12", "5e-324", "1e-400"):
        assert (await live.post(CHAT, body("temperature", raw))).status == 200


@pytest.mark.asyncio
async def test_text_whose_token_the_model_does_not_have(live: LiveServer) -> None:
    """A tokenizer may know tokens that its model has no embedding for: such text is refused with the token named, and
    all else is answered."""
    live.engine.info = msgspec.structs.replace(live.engine.info, vocab_size=ord("z"))
    reply = await refused(live, COMPLETIONS, {"prompt": "abz"})
    assert reply.error["param"] == "prompt"
    assert "'z', token 122" in reply.error["message"]
    assert (await live.post(COMPLETIONS, {"prompt": "aby", "max_tokens": 2})).status == 200
    chat = await refused(live, CHAT, {"messages": HI})  # the template's control tokens come last
    assert chat.error["param"] == "messages"
    async with ws_client(live) as client:
        error = (await client.call("chat.send", content="abz"))["error"]
    assert error["param"] == "content"


@pytest.mark.asyncio
async def test_a_conversation_that_renders_to_nothing(live: LiveServer) -> None:
    """An empty prompt is refused as what its client sent."""
    live.context.service.template = ChatTemplate("", live.context.service.tokenizer)
    reply = await refused(live, CHAT, {"messages": HI})
    assert (reply.error["param"], "empty" in reply.error["message"]) == ("messages", True)
    async with ws_client(live) as client:
        error = (await client.call("chat.send", content="hi"))["error"]
    assert (error["param"], "empty" in error["message"]) == ("content", True)
    assert live.engine.submissions == []


BAD: list[tuple[dict[str, Any], str | None]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [1]}, "messages[0]"),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": 5, "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [*HI, {"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages[1].tool_calls"),
    ({"messages": [*HI, *HI]}, "messages"),
    ({"messages": HI * 4097}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [["text"]]}]}, "messages[0].content[0]"),
    ({"messages": [*HI, {"role": "assistant", "content": "x", "reasoning_content": "y"}]},
     "messages[1].reasoning_content"),
    ({"messages": [*HI, {"role": "assistant", "content": "x", "refusal": "no"}]}, "messages[1].refusal"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}]}]},
     "messages[0].content[0].cache_control"),
    ({"model": 7}, "model"),
    ({"n": 0}, "n"), ({"n": 17}, "n"), ({"n": -1}, "n"), ({"n": 10**6}, "n"),
    ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": -1}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 10**12}, "max_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"), ({"min_tokens": -1}, "min_tokens"),
    ({"top_k": -2}, "top_k"),
    ({"logprobs": 5}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 259}, "top_logprobs"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"), ({"logit_bias": {"259": 1}}, "logit_bias"),
    ({"logit_bias": {"abc": 1}}, "logit_bias"), ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"1000000000": 1}}, "logit_bias"), ({"logit_bias": {"1": "x"}}, "logit_bias"),
    ({"logit_bias": {str(i): 0 for i in range(1025)}}, "logit_bias"), ({"logit_bias": {"9" * 30: 1}}, "logit_bias"),
    ({"stop": ""}, "stop"), ({"stop": ["a", ""]}, "stop"), ({"stop": ["x"] * 17}, "stop"), ({"stop": 5}, "stop"),
    ({"stop": "x" * 5000}, "stop"), ({"stop": [5]}, "stop[0]"), ({"stop": ["x" * 4000] * 3}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"), ({"stop_token_ids": [259]}, "stop_token_ids"),
    ({"stop_token_ids": list(range(129))}, "stop_token_ids"),
    ({"stream": "yes"}, "stream"), ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": 5}, "stream_options"),
    ({"cache_salt": ""}, "cache_salt"), ({"cache_salt": "x" * 1025}, "cache_salt"), ({"cache_salt": 5}, "cache_salt"),
    ({"user": 5}, "user"), ({"metadata": "x"}, "metadata"),
    ({"best_of": 2}, "best_of"), ({"prompt": "x"}, "prompt"),
]  # fmt: skip


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals_name_the_field(live: LiveServer, stream: bool) -> None:
    """The same refusal whether a stream was asked for or not: always before the 200."""
    for fields, param in BAD:
        content = {"messages": HI, **fields}
        if stream and "stream" not in fields and "stream_options" not in fields:
            content["stream"] = True
        reply = await refused(live, CHAT, content)
        assert reply.error["param"] == param, (str(fields)[:100], reply.error)
        assert reply.error["type"] == "invalid_request_error"


@pytest.mark.asyncio
async def test_edges_that_are_allowed(live: LiveServer) -> None:
    """The last good value on each side of a limit works."""
    for fields in (
        {"logit_bias": {"258": -100, "0": 100}},
        {"stop": ["x"] * 16},
        {"stop": None, "n": None, "max_tokens": None, "tools": None, "logit_bias": None, "stream": None, "seed": None},
        {"stop_token_ids": [0, 258]},
        {"logprobs": True, "top_logprobs": 20},
        {"n": 16},
        {"top_k": -1}, {"top_k": 0}, {"seed": -(2**63)}, {"seed": 2**63 - 1},
        {"unknown_field": {"deep": [1, 2]}, "another": "x"},
        {"messages": [{"role": "user", "content": "x", "unknown": 1, "name": "n"}]},
        {"messages": [{"role": "system", "content": "only a system message"}]},
        {"messages": [{"role": "assistant", "content": "first"}]},
        {"logprobs": False, "top_logprobs": 0},
    ):  # fmt: skip
        assert (await live.chat(**fields)).status == 200, fields


@pytest.mark.asyncio
async def test_completion_prompts(live: LiveServer) -> None:
    """Empty, mixed, foreign or oversized prompts are refused by name."""
    bad: list[Any] = ["", [""], [[]], [], [-1], [259], [2**31], [2**63], [[-1]], [True], [1.5], ["a", 1], ["a", [1]],
                      [[1], 2], [["a"]], 5, None, {"a": 1}, ["a"] * 129, [None]]  # fmt: skip
    for prompt in bad:
        reply = await refused(live, COMPLETIONS, {"prompt": prompt})
        assert reply.error["param"].startswith("prompt"), (prompt, reply.error)
    for fields, param in [
        ({"logprobs": 21}, "logprobs"), ({"logprobs": -1}, "logprobs"), ({"logprobs": True}, "logprobs"),
        ({"echo": True}, "echo"), ({"suffix": "x"}, "suffix"), ({"best_of": 3, "n": 2}, "best_of"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"), ({"messages": HI}, "messages"),
    ]:  # fmt: skip
        assert (await refused(live, COMPLETIONS, {"prompt": "x", **fields})).error["param"] == param
    good: list[dict[str, Any]] = [{"echo": False}, {"suffix": None}, {"suffix": ""}, {"best_of": 2, "n": 2}]
    for fields in good:
        assert (await live.complete(**fields)).status == 200, fields


@pytest.mark.asyncio
async def test_known_but_missing_features_are_refused_by_name(live: LiveServer) -> None:
    """Every field of the table: a value that asks for something is 400 with its name; ``null`` and the values that
    ask for nothing are fine.
    """
    for field, no_ops in NO_OPS.items():
        for path, base in ((CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": "x"})):
            reply = await refused(live, path, {**base, field: {"type": "something", "x": [1]}})
            assert reply.error["param"] == field
            assert reply.error["code"] == "unsupported_parameter"
            assert field in reply.error["message"]
            assert (await live.post(path, {**base, field: None})).status == 200, field
        for value in no_ops:
            assert (await live.chat(**{field: value})).status == 200, (field, value)


@pytest.mark.asyncio
async def test_log_probabilities_are_bounded_as_a_whole(live: LiveServer) -> None:
    """Not the number of alternatives alone, but all of them over all tokens, choices and prompts; streams keep none."""
    live.engine.info = msgspec.structs.replace(live.engine.info, max_model_len=32_768, max_tokens_in_pool=32_768)
    chat = {"messages": HI, "logprobs": True, "top_logprobs": 15}
    for path, body in (
        (CHAT, {**chat, "n": 2}),
        (CHAT, {**chat, "n": 16, "max_tokens": 2049}),
        (COMPLETIONS, {"prompt": ["x"] * 128, "n": 16, "logprobs": 15, "max_tokens": 17}),
    ):
        assert (await refused(live, path, body)).error["param"] == "logprobs"
    for allowed in ({**chat, "n": 16, "max_tokens": 2048}, {**chat, "n": 2, "stream": True}, chat):
        assert (await live.post(CHAT, allowed)).status == 200


@pytest.mark.asyncio
async def test_the_other_endpoints_drop_nothing_known_either(live: LiveServer) -> None:
    """A template of the caller's own, or tools, would change the ids that /tokenize tells: refused by name."""
    for field in ("chat_template", "chat_template_kwargs", "tools", "continue_final_message"):
        reply = await refused(live, "/tokenize", {"messages": HI, field: {"x": 1}})
        assert reply.error["param"] == field
    assert (await refused(live, "/tokenize", {"messages": HI, "add_special_tokens": True})).error["param"]
    assert (await live.post("/tokenize", {"messages": HI, "tools": None, "add_special_tokens": False})).status == 200


def test_table_and_wire_types_do_not_overlap() -> None:
    """A field is implemented or refused, never both."""
    implemented = set(ChatCompletionRequest.__struct_fields__) | set(CompletionRequest.__struct_fields__)
    assert not implemented & NO_OPS.keys()


def nested(depth: int, opening: str = "[", closing: str = "]") -> bytes:
    return (opening * depth + closing * depth).encode()


@pytest.mark.asyncio
async def test_deep_nesting(live: LiveServer) -> None:
    """Depth 100 to 1,000,000, in known and unknown fields, closed or not, is 400 at once; depth inside a string is
    text.
    """
    for depth in (100, 1_000, 20_000, 1_000_000):
        for opening, closing in (("[", "]"), ('{"a":', "}")):
            deep = nested(min(depth, 4_000_000 // len(opening + closing)), opening, closing).replace(b":}", b":1}", 1)
            for field in (b"messages", b"unknown", b"tools", b"metadata", b"stop"):
                started = time.process_time()  # of this process alone: the machine may be busy
                await refused(live, CHAT, b'{"%s":%s}' % (field, deep))
                assert time.process_time() - started < 1.0
    await refused(live, CHAT, b"[" * 1_000_000)
    await refused(live, CHAT, b'{"messages":' * 300_000)
    text = "[" * 5000 + '\\"{' * 100
    assert (await live.chat(messages=[{"role": "user", "content": "x"}], unknown=text)).status == 200
    at_limit = b'{"messages":[{"role":"user","content":"x"}],"unknown":%s}' % nested(63)
    assert (await live.post(CHAT, at_limit)).status == 200
    over = at_limit.replace(nested(63), nested(64))
    assert "nested" in (await refused(live, CHAT, over)).error["message"]


@pytest.mark.asyncio
async def test_surrogates(live: LiveServer) -> None:
    """A lone surrogate is 400 wherever it stands; a pair is a character."""
    for raw in ('"\\ud800"', '"\\udc00"', '"a\\ud83dx"', '"\\ud83d\\ud83d"', '"\\udead\\ud83d"'):
        for content in (
            '{"messages":[{"role":"user","content":@}]}',
            '{"messages":[{"role":"user","content":"x","name":@}]}',
            '{"messages":[{"role":@,"content":"x"}]}',
            '{"messages":[{"role":"user","content":"x"}],"stop":@}',
            '{"messages":[{"role":"user","content":"x"}],"user":@}',
            '{"messages":[{"role":"user","content":"x"}],"stream":true,"cache_salt":@}',
            '{"messages":[{"role":"user","content":"x"}],"unknown":@}',
            '{"messages":[{"role":"user","content":"x"}],@:1}',
            '{"messages":[{"role":"user","content":"x"}],"model":@}',
        ):
            await refused(live, CHAT, content.replace("@", raw).encode())
        await refused(live, COMPLETIONS, f'{{"prompt":{raw}}}'.encode())
        await refused(live, "/tokenize", f'{{"prompt":{raw}}}'.encode())
    assert (await live.post(CHAT, b'{"messages":[{"role":"user","content":"\\ud83d\\ude00 \\\\ud800"}]}')).status == 200


@pytest.mark.asyncio
async def test_encodings_and_media_types(live: LiveServer) -> None:
    """JSON in UTF-8 is the only body; everything else is 400 or 415 before it is parsed."""
    text = json.dumps({"messages": [{"role": "user", "content": "你好"}]}, ensure_ascii=False)
    for content in (
        text.encode("gbk"), text.encode("utf-16"), text.encode("utf-32"), text.encode("utf-8-sig"),
        text.encode() + b"\x00", b"\x00" + text.encode(), b"", b"null", b"[]", b'"x"', b"{", b"{}{}", b"{}",
        b'{"messages": [}', b"{'messages': 1}", b'{"messages":NaN}',
    ):  # fmt: skip
        await refused(live, CHAT, content or b" ")
    assert (await refused(live, CHAT, b"{}")).error["param"] == "messages"
    empty = await live.request("POST", CHAT, headers={"Content-Type": "application/json", "Content-Length": "0"})
    assert empty.status == 400
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "",
                 "application/json; charset=gbk", "application/json; charset=utf-16", "text/json"):  # fmt: skip
        reply = await live.post(CHAT, text.encode(), Content_Type=kind)
        assert (reply.status, reply.error["code"]) == (415, "unsupported_media_type"), kind
    assert (await live.post(CHAT, text.encode(), Content_Encoding="gzip")).status == 415
    for kind in ("application/json", "Application/JSON; charset=UTF-8", 'application/json;charset="utf-8"'):
        assert (await live.post(CHAT, text.encode(), Content_Type=kind)).status == 200, kind


@pytest.mark.asyncio
async def test_context_length(live: LiveServer) -> None:
    """Prompt plus output exactly at the limit works; one more is 400 with the true numbers, streamed or not."""
    exact = await live.complete(prompt=[120] * 1000, max_tokens=24)
    assert exact.status == 200
    for stream in (False, True):
        reply = await refused(live, COMPLETIONS, {"prompt": [120] * 1000, "max_tokens": 25, "stream": stream})
        assert reply.error["code"] == "context_length_exceeded"
        for number in ("1024", "1025", "1000", "25"):
            assert number in reply.error["message"]
    assert (await live.complete(prompt=[120] * 1023, max_tokens=1)).status == 200
    assert (await refused(live, COMPLETIONS, {"prompt": [120] * 1024, "max_tokens": 1})).error["param"] is None
    for field in ("max_tokens", "max_completion_tokens"):
        reply = await refused(live, CHAT, {"messages": HI, field: 2000})
        assert reply.error["param"] == field
        assert f"lower {field}." in reply.error["message"]
    chat = await refused(live, CHAT, {"messages": [{"role": "user", "content": "x" * 2000}]})
    assert chat.error["code"] == "context_length_exceeded"
    await refused(live, CHAT, {"messages": HI, "min_tokens": 5000})
    # Beyond what even the longest tokens could hold, the count is a bound and nothing is encoded.
    for path, fields in (
        (COMPLETIONS, {"prompt": "x" * 3_000_000}),
        (CHAT, {"messages": [{**HI[0], "content": "x" * 3_000_000}]}),
    ):
        reply = await refused(live, path, fields)
        assert reply.error["code"] == "context_length_exceeded"
        assert "at least" in reply.error["message"]


@pytest.mark.asyncio
async def test_big_prompts_do_not_block_the_loop(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """While megabyte prompts are tokenised, only to be refused, others are answered."""
    roomy = {"max_model_len": 100_000, "max_tokens_in_pool": 100_000}  # else their length alone would refuse them
    live.engine.info = msgspec.structs.replace(live.engine.info, **roomy)
    big = json.dumps({"messages": [{"role": "user", "content": "word " * 150_000}]}).encode()
    encode, answered, meanwhile = Tokenizer.encode, 0, []

    def counting(tokenizer: Tokenizer, text: str, **options: bool) -> bytes:
        before = answered
        ids = encode(tokenizer, text, **options)
        if len(text) > 500_000:
            meanwhile.append(answered - before)
        return ids

    monkeypatch.setattr(Tokenizer, "encode", counting)
    hogs = [asyncio.create_task(live.post(CHAT, big)) for _ in range(2)]
    while not all(hog.done() for hog in hogs):
        assert (await live.get("/livez")).status == 200
        answered += 1
        await asyncio.sleep(0.001)
    for hog in hogs:
        reply = await hog
        assert (reply.status, "750" in reply.error["message"]) == (400, True)
    # It takes as long as hundreds of answers do: where it holds the loop or the interpreter, nobody is answered.
    assert len(meanwhile) == 2
    assert min(meanwhile) >= 5


@pytest.mark.asyncio
async def test_too_many_values(live: LiveServer) -> None:
    """Millions of tiny values are refused before they become objects; as many commas inside a text are text."""
    for field in (b"unknown", b"messages", b"stop", b"metadata"):
        many = b'{"%s":[%s1],"messages":[]}' % (field, b"1," * 1_000_000)
        assert "values" in (await refused(live, CHAT, many)).error["message"]
    assert "values" in (await refused(live, COMPLETIONS, {"prompt": [1] * 200_000})).error["message"]
    assert (await live.chat(unknown="," * 1_000_000)).status == 200


@settings(max_examples=200, deadline=None)
@given(JSON_VALUES)
def test_nesting_is_counted_as_json_counts_it(value: Any) -> None:
    """The bracket counter agrees with the real depth of any JSON value."""

    def depth(node: Any) -> int:
        if isinstance(node, dict):
            return 1 + max((depth(child) for child in node.values()), default=0)
        return 1 + max((depth(child) for child in node), default=0) if isinstance(node, list) else 0

    text = json.dumps(value).encode()
    actual = depth(value)
    list(scan_structure(text, actual))
    if actual:
        with pytest.raises(ChatserveError):
            list(scan_structure(text, actual - 1))


@example(fields={"messages": []})
@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, max_size=5))
def test_any_json_in_any_field_is_understood_or_refused(fields: dict[str, Any]) -> None:
    """Decoding any value in any known field ends in a request or in a typed error, nothing else."""
    content = msgspec.json.encode({"messages": HI, **fields})
    with contextlib.suppress(ChatserveError):
        request, _ = parse_request(content, ChatCompletionRequest, "tiny")
        assert parse_messages(request.messages, ServerConfig())


@pytest.mark.asyncio
async def test_types_are_named_as_json_names_them(live: LiveServer) -> None:
    """Whoever sends JSON is told of strings and integers, over HTTP and over WebSocket; values are left alone."""
    told = {
        "max_tokens": ("seven", "Expected integer | null, got string"),
        "temperature": ("hot", "Expected number | null, got string"),
        "ignore_eos": (1, "Expected boolean | null, got integer"),
    }
    for field, (value, words) in told.items():
        assert words in (await live.chat(**{field: value})).error["message"]
    async with ws_client(live) as client:
        refused = await client.call("chat.send", content=7)
        assert refused["error"]["message"] == "Expected string, got integer."
        refused = await client.call("chat.send", content="x", params={"max_tokens": "seven"})
        assert "Expected integer | null, got string" in refused["error"]["message"]
