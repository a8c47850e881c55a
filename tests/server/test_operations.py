"""Health, metrics, the page's files, faults inside: what operators and supervisors rely on."""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from pathlib import Path
from types import FrameType

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from chatserve.config import ServerConfig
from chatserve.engine.protocol import EngineStats
from chatserve.server.metrics import Histogram, ServerMetrics
from chatserve.server.routes.ui import load_files, web_folder
from tests.fakes import FakeEngineClient, Script, say
from tests.server.live import HI, LiveServer, live_server
from tests.waiting import eventually


@pytest.mark.asyncio
async def test_health_follows_the_engine(live: LiveServer) -> None:
    """Liveness is this process's; readiness and health are the engine's, and flip at once."""
    for path in ("/livez", "/readyz", "/health"):
        assert (await live.get(path)).json == {"status": "ok"}
    live.engine.set_ready(False)
    assert (await live.get("/livez")).status == 200
    for path in ("/readyz", "/health"):
        reply = await live.get(path)
        assert (reply.status, reply.json) == (503, {"status": "loading"})
        assert reply.headers["retry-after"]
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize"):
        fields = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
        reply = await live.post(path, fields)
        assert (reply.status, reply.error["code"]) == (503, "engine_unavailable")
        assert reply.headers["retry-after"]
    assert (await live.get("/v1/models")).json["data"][0]["max_model_len"] is None
    live.engine.set_ready(True)
    assert (await live.get("/readyz")).status == 200
    assert set((await live.get("/version")).json) == {"version"}


@pytest.mark.asyncio
async def test_full_queue(tiny_folder: Path) -> None:
    """At the queue's limit: 429 with Retry-After, not ready, counted; running streams are not touched."""
    engine = FakeEngineClient(held := Script([120] * 3, delay=0.005, hang=True), max_running=1)
    async with live_server(tiny_folder, engine, max_queued=2, server=ServerConfig(port=0)) as live:
        running = []
        for waiting in range(3):
            running.append(asyncio.create_task(live.chat(stream=True)))
            await eventually(lambda waiting=waiting: (engine.num_running, engine.num_waiting) == (1, waiting))  # type: ignore[misc]
        reply = await live.chat()
        assert (reply.status, reply.error["code"], reply.error["type"]) == (429, "queue_full", "rate_limit_error")
        assert reply.headers["retry-after"] == "1"
        assert (await live.get("/readyz")).json == {"status": "queue_full"}
        assert (
            'vllm:admission_rejections_total{engine="0",model_name="tiny",reason="queue_full"} 1.0'
            in (await live.get("/metrics")).body.decode()
        )
        held.hang = False
        assert [reply.events[-1] for reply in await asyncio.gather(*running)] == ["[DONE]"] * 3


@pytest.mark.asyncio
async def test_metrics_tell_the_truth(live: LiveServer) -> None:
    """After a known load the histograms and counters hold exactly it, and the text parses."""
    live.engine.script = say("Hello!", delay=0.002)
    for _ in range(3):
        await live.chat(max_tokens=100)
    await live.chat(stream=True, max_tokens=2)
    live.engine.stats = EngineStats(steps=5, prompt_tokens=84, prefix_hit_tokens=21, blocks_total=64, blocks_held=16)
    assert (await live.get("/v1/models/tiny")).status == 200
    assert (await live.get("/v1/models/nope")).status == 404
    assert (await live.get("/nope")).status == 404
    text = (await live.get("/metrics")).body.decode()
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }

    def value(name: str, **labels: str) -> float:
        return samples[name, *sorted({"engine": "0", "model_name": "tiny", **labels}.items())]

    assert value("vllm:request_success_total", finished_reason="stop") == 3
    assert value("vllm:request_success_total", finished_reason="length") == 1
    assert value("vllm:request_generation_tokens_sum") == 3 * 7 + 2
    assert value("vllm:request_prompt_tokens_sum") == 4 * 21
    assert value("vllm:time_to_first_token_seconds_count") == 4
    assert value("vllm:inter_token_latency_seconds_count") == 3 * 6 + 1
    assert value("vllm:request_params_max_tokens_sum") == 302
    assert value("vllm:prompt_tokens_total") == 84
    assert value("vllm:prefix_cache_hits_total") == 21
    assert value("vllm:kv_cache_usage_perc") == 0.25
    key = ("http_requests_total", ("handler", "/v1/chat/completions"), ("method", "POST"), ("status", "200"))
    assert samples[key] == 4
    for handler, status in (("/v1/models/{model:path}", "200"), ("/v1/models/{model:path}", "404"), ("other", "404")):
        assert samples["http_requests_total", ("handler", handler), ("method", "GET"), ("status", status)] == 1


def test_counters_never_fall_when_the_engine_restarts() -> None:
    """A new engine counts from zero; the exported series go on from where they were."""
    metrics = ServerMetrics()

    def tokens(stats: EngineStats) -> float:
        text = metrics.render(stats, {}, model_name="m", config_info={}).decode()
        return float(next(line for line in text.splitlines() if line.startswith("vllm:generation_tokens")).split()[-1])

    assert tokens(EngineStats(steps=10, generation_tokens=100)) == 100
    assert tokens(EngineStats()) == 100
    assert tokens(EngineStats(steps=3, generation_tokens=30)) == 130
    assert tokens(EngineStats(steps=4, generation_tokens=31)) == 131


def test_no_count_is_lost_however_rarely_metrics_are_read() -> None:
    """An engine dies and the next has run more steps than was last read of the first: both count, each once; one that
    was only slow, and not ready for it, counts as one.
    """
    metrics = ServerMetrics()

    def tokens(stats: EngineStats, restarts: int) -> float:
        text = metrics.render(stats, {}, restarts=restarts, model_name="m", config_info={}).decode()
        return float(next(line for line in text.splitlines() if line.startswith("vllm:generation_tokens")).split()[-1])

    assert tokens(EngineStats(steps=10, generation_tokens=100), 0) == 100
    metrics.observe_engine(EngineStats(steps=500, generation_tokens=5000), 0)  # its last word, when it was lost
    assert tokens(EngineStats(steps=900, generation_tokens=9000), 1) == 14_000
    metrics.observe_engine(EngineStats(steps=950, generation_tokens=9500), 1)  # not ready for a moment
    metrics.observe_engine(EngineStats(steps=950, generation_tokens=9500), 1)
    assert tokens(EngineStats(steps=960, generation_tokens=9600), 1) == 14_600
    metrics.observe_engine(EngineStats(), 1)  # gone, and its successor is not there yet
    assert tokens(EngineStats(), 1) == 14_600
    assert tokens(EngineStats(steps=2000, generation_tokens=1), 2) == 14_601


def test_histogram_buckets() -> None:
    """Upper edges are inclusive, counts cumulative."""
    histogram = Histogram((1.0, 2.0))
    for value, times in ((0.5, 1), (1.0, 2), (1.5, 1), (9.0, 3)):
        histogram.observe(value, times)
    assert histogram.buckets() == [("1.0", 3), ("2.0", 4), ("+Inf", 7)]
    assert histogram.sum == 0.5 + 2.0 + 1.5 + 27.0


@pytest.mark.asyncio
async def test_page_files(live: LiveServer) -> None:
    """The page comes with a strict policy and an ETag, by exact path only; ranges and traversal do nothing."""
    reply = await live.get("/")
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/html")
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["referrer-policy"] == "no-referrer"
    assert (await live.get("/", If_None_Match=reply.headers["etag"])).status == 304
    assert (await live.get("/", If_None_Match='W/"x", ' + reply.headers["etag"])).status == 304
    started = time.process_time()  # of this process alone: the machine may be busy
    ranged = await live.get("/", Range="bytes=" + ",".join(f"{i}-{i + 1}" for i in range(6000)))
    assert (ranged.status, ranged.body) == (200, reply.body)
    assert time.process_time() - started < 0.5
    head = await live.request("HEAD", "/")
    assert (head.status, head.body) == (200, b"")
    for path in (
        "/../pyproject.toml",
        "/..%2fpyproject.toml",
        "/app/../../pyproject.toml",
        "/tests/",
        "/.gitkeep",
        "/app/",
    ):
        assert (await live.get(path)).status in (400, 404), path
    assert (await live.post("/", b"")).status == 405


def test_only_the_pages_own_kinds_of_files_are_loaded(tmp_path: Path) -> None:
    """Tests, hidden files and other kinds stay out; ``/`` is ``index.html``."""
    for name in ("index.html", "app/main.js", "css/app.css", "tests/a.js", ".secret.js", "notes.md", "app/.x/y.js"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    assert set(load_files(tmp_path)) == {"/", "/index.html", "/app/main.js", "/css/app.css"}
    assert load_files(tmp_path)["/app/main.js"].media_type == "text/javascript"
    assert (web_folder() / "index.html").is_file()


@pytest.mark.asyncio
async def test_without_the_page(tiny_folder: Path) -> None:
    """``--no-ui`` leaves nothing at ``/``."""
    async with live_server(tiny_folder, FakeEngineClient(), server=ServerConfig(port=0, ui=False)) as live:
        assert (await live.get("/")).status == 404


@pytest.mark.asyncio
async def test_unknown_paths_and_methods(live: LiveServer) -> None:
    """404 and 405 come in OpenAI's shape, like every other error."""
    assert (await live.get("/v1/nope")).error["code"] == "not_found"
    reply = await live.get("/v1/chat/completions")
    assert (reply.status, reply.error["code"]) == (405, "method_not_allowed")
    assert "POST" in reply.headers["allow"]


@pytest.mark.asyncio
async def test_a_fault_inside_is_a_500_without_its_inside(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unexpected exception fails one request only; the client gets no word of it, before or during a stream."""

    def explode(*_: object, **__: object) -> None:
        raise KeyError("secret prompt text")

    with monkeypatch.context() as patch:
        patch.setattr(live.context.service, "start", explode)
        for stream in (False, True):
            reply = await live.chat(stream=stream)
            assert (reply.status, reply.error["code"]) == (500, "internal_error")
            assert "secret" not in reply.body.decode()
    with monkeypatch.context() as patch:
        patch.setattr("chatserve.server.encode.ChunkEncoder.text", explode)
        reply = await live.chat(stream=True)
        assert reply.status == 200
        assert "internal_error" in reply.events[-1]
        assert "secret" not in reply.body.decode()
        assert "[DONE]" not in reply.events
    assert (await live.chat()).status == 200


@pytest.mark.asyncio
async def test_engine_errors(live: LiveServer) -> None:
    """A failed row is a 500 with its code, or an error event after the text that came before it; never "length"."""
    live.engine.script = say("ab", reason="error", error_code="internal_error", error_message="Not finite.")
    reply = await live.chat()
    assert (reply.status, reply.error["message"]) == (500, "Not finite.")
    streamed = await live.chat(stream=True)
    assert "Not finite." in streamed.events[-1]
    contents = [chunk["choices"][0]["delta"].get("content") for chunk in streamed.chunks[:-1]]
    assert "".join(filter(None, contents)) == "ab"
    assert not any(chunk["choices"][0]["finish_reason"] for chunk in streamed.chunks[:-1])


@pytest.mark.asyncio
async def test_what_the_engine_has_no_room_for_is_named_as_it_was_sent(live: LiveServer) -> None:
    """Pinned prefixes may leave less room than the edge knows of: the engine refuses then, and knows no fields."""
    live.engine.script = say("", reason="error", error_code="context_length_exceeded", error_message="No room.")
    for param in ("max_tokens", "max_completion_tokens", None):
        reply = await live.chat(**({} if param is None else {param: 5}))
        assert (reply.status, reply.error["param"]) == (400, param)


@pytest.mark.asyncio
async def test_token_outside_the_vocabulary_fails_that_request_only(live: LiveServer) -> None:
    """A bad id from a worker ends its own stream with an error; the one beside it goes on."""
    bad = {"bad": [104, 2**31 - 1], "low": [104, -1], "good": [104, 105]}
    live.engine.script = lambda s, _: Script(bad[s.scopes[-1].salt], delay=0.01)
    replies = await asyncio.gather(*(live.chat(stream=True, cache_salt=salt) for salt in bad))
    assert ["[DONE]" in reply.events for reply in replies] == [False, False, True]
    assert all('"error"' in reply.events[-1] for reply in replies[:2])
    assert [s.aborted for s in live.engine.submissions] == [True, True, False]


@pytest.mark.asyncio
async def test_per_token_cost_of_the_api_process(live: LiveServer) -> None:
    """A streamed token costs the API process few calls of Python functions (client and fake engine included), so that
    it keeps up; what they take, `scripts/bench streaming` measures.
    """
    engine = live.engine
    engine.script = Script([120] * 1000)
    engine.info = msgspec.structs.replace(engine.info, max_model_len=100_000, max_tokens_in_pool=100_000)
    await live.chat(stream=True)
    calls = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        reply = await live.chat(stream=True)
    finally:
        sys.setprofile(before)
    assert len(reply.chunks) > 1000
    print(f"{calls / 1000:.0f} calls per token, client and fake engine included")
    assert calls / 1000 < 100


@pytest.mark.asyncio
async def test_exactness_of_the_history_is_reported(tiny_folder: Path, tmp_path: Path) -> None:
    """Operators see how many quoted answers went into prompts as sampled, and how many the template changed."""
    folder = tmp_path / "trimming"
    shutil.copytree(tiny_folder, folder)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("message['content']", "message['content'].replace('secret', '')"))
    for place, counts in ((tiny_folder, (1, 0)), (folder, (0, 1))):
        async with live_server(place, FakeEngineClient(say("a secret"))) as live:
            answer = (await live.chat()).json["choices"][0]["message"]["content"]
            await live.chat(messages=[*HI, {"role": "assistant", "content": answer}, *HI])
            text = (await live.get("/metrics")).body.decode()
            values = {line.split("{")[0]: float(line.split()[-1]) for line in text.splitlines() if line[0] != "#"}
            names = ("chatserve:answers_spliced_total", "chatserve:answers_unspliceable_total")
            assert tuple(values[name] for name in names) == counts
