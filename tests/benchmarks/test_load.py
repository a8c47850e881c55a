"""Counts and times of the benchmark client: against a server that does as told, and on replies made by hand."""

from __future__ import annotations

import json
import threading

import pytest

from benchmarks._load import LoadError, Outcome, Summary, run_load
from benchmarks._stream_client import Reply, Target, _Exchange, parse_reply
from benchmarks._workload import Prompts, Tenant
from tests.benchmarks.sse_server import sse_server
from tests.waiting import PATIENCE

VOCAB = 5000


def reply(due: float, times: list[float], tokens: int | None = None) -> Reply:
    """A complete reply with one token per event unless told otherwise."""
    return Reply(due, times[-1], times, completion_tokens=len(times) if tokens is None else tokens)


def sse(*payloads: object) -> bytes:
    return b"".join(
        b"data: " + (p.encode() if isinstance(p, str) else json.dumps(p).encode()) + b"\n\n" for p in payloads
    )


def test_a_load_counts_what_the_server_says_and_asks_for_exact_work() -> None:
    """Every request asks for greedy, unending, streamed tokens with usage, and all counts come from usage."""
    with sse_server() as (port, told):
        conversations = Prompts(VOCAB, 1).conversations(6, prompt_tokens=10, output_tokens=4)
        outcome = run_load(Target("127.0.0.1", port, "m", {"extra": 1}), conversations, concurrency=2)
    summary = Summary(outcome)
    assert len(summary.replies) == 6
    assert summary.output_tokens == 24
    assert summary.tokens_per_event == 1.0
    assert [r.cached_tokens for r in summary.replies] == [3] * 6
    assert sorted(body["prompt"] for body in told.bodies) == sorted(c.prompt(0) for c in conversations)
    for body in told.bodies:
        assert body["max_tokens"] == 4
        assert body["temperature"] == 0
        assert body["ignore_eos"] is True
        assert body["stream_options"] == {"include_usage": True}
        assert body["extra"] == 1


def test_other_work_than_asked_for_is_no_result() -> None:
    """A server that stops early, or fails, would look fast: both are errors."""
    conversations = Prompts(VOCAB, 1).conversations(2, prompt_tokens=4, output_tokens=5)
    with sse_server() as (port, told):
        told.lost_tokens = 1
        with pytest.raises(LoadError, match="made 8 tokens where 10"):
            run_load(Target("127.0.0.1", port, "m"), conversations)
        told.lost_tokens, told.status = 0, 500
        with pytest.raises(LoadError, match=r"2 of 2 requests failed.*500"):
            run_load(Target("127.0.0.1", port, "m"), conversations)


def test_time_to_first_token_begins_when_a_request_was_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delays of the server are seen as they are, and an open loop starts when it should.

    The server goes on once its last token was read, so that each token's time lies between it and the next.
    """
    read = threading.Condition()
    num_read, receive = 0, _Exchange.data_received

    def data_received(exchange: _Exchange, data: bytes) -> None:
        nonlocal num_read
        receive(exchange, data)
        with read:
            num_read += data.count(b'"text"')
            read.notify_all()

    monkeypatch.setattr(_Exchange, "data_received", data_received)
    with sse_server() as (port, told):

        def follow() -> None:
            with read:
                read.wait_for(lambda: num_read >= sum(map(len, told.sent.values())), PATIENCE)

        told.first_delay, told.delay, told.after_token = 0.06, 0.02, follow
        conversations = Prompts(VOCAB, 1).conversations(2, prompt_tokens=4, output_tokens=3)
        outcome = run_load(Target("127.0.0.1", port, "m"), conversations, starts=[0.0, 0.1])
    summary = Summary(outcome)
    dues = [r.due - outcome.began for r in summary.replies]
    assert dues == pytest.approx([0.0, 0.1])
    assert all(ttft >= 0.06 for ttft in summary.ttfts)
    assert len(summary.itls) == 4
    assert all(r.mean_itl >= 0.02 for r in summary.replies)
    for conversation, r in zip(conversations, summary.replies, strict=True):
        first, second, third = told.sent[tuple(conversation.prompt(0))]
        assert first <= r.times[0] <= second <= r.times[1] <= third <= r.times[2]


def test_conversations_repeat_the_recorded_history_and_chats_the_real_one() -> None:
    """Ids of later turns are the same for every server; a chat sends back what it was answered."""
    with sse_server() as (port, told):
        target = Target("127.0.0.1", port, "m")
        conversations = Prompts(VOCAB, 2).conversations(
            1, prompt_tokens=5, output_tokens=3, turns=3, turn_tokens=2, tenants=[Tenant("a", "key-a")]
        )
        run_load(target, conversations)
        run_load(target, conversations, endpoint="chat")
    prompts = [body["prompt"] for body in told.bodies[:3]]
    assert [len(p) for p in prompts] == [5, 5 + 3 + 2, 5 + 2 * (3 + 2)]
    assert prompts[2][: len(prompts[1])] == prompts[1]
    last = told.bodies[5]["messages"]
    assert [m["role"] for m in last] == ["user", "assistant", "user", "assistant", "user"]
    assert last[1]["content"] == "t0 t1 t2 "
    assert set(told.keys) == {"Bearer key-a"}


@pytest.mark.parametrize("step", [1, 2, 7, 1000])
def test_events_are_found_however_the_bytes_arrive(step: int) -> None:
    """An event counts when its last byte is there, chunk boundaries in the middle of anything."""
    body = sse(
        {"choices": [{"text": "a", "finish_reason": None}]},
        {"choices": [{"text": "", "finish_reason": None}]},
        {"choices": [{"text": "", "finish_reason": "length"}]},
        {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 2}},
        "[DONE]",
    )
    pieces = [body[:13], body[13:50], body[50:]]
    chunked = b"".join(b"%X;x=1\r\n%s\r\n" % (len(p), p) for p in pieces) + b"0\r\n\r\n"
    raw = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: Chunked\r\n\r\n" + chunked
    reads = [(float(i), raw[i : i + step]) for i in range(0, len(raw), step)]
    parsed = parse_reply(0.0, float(len(raw)), reads)
    assert parsed.error is None
    assert (parsed.text, parsed.prompt_tokens, parsed.completion_tokens) == ("a", 4, 2)
    assert parsed.cached_tokens is None
    # A token without text counts as output, the end without text does not.
    assert len(parsed.times) == 2
    end_of_first = raw.index(b"null}]}\n\n") + len(b"null}]}\n\n")
    assert parsed.times[0] == float((end_of_first - 1) // step * step)


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (sse({"choices": [{"text": "a"}], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}), "before [DONE]"),
        (sse({"error": {"message": "broken"}}, "[DONE]"), "broken"),
        (sse({"choices": [{"text": "a"}]}, "[DONE]"), "no usage"),
    ],
)
def test_incomplete_answers_are_errors(body: bytes, complaint: str) -> None:
    parsed = parse_reply(0.0, 1.0, [(0.5, b"HTTP/1.1 200 OK\r\n\r\n" + body)])
    assert parsed.error is not None
    assert complaint in parsed.error


def test_decode_only_is_the_time_in_which_all_decode() -> None:
    """Prefill of the slowest and the tail after the first end do not count."""
    a = reply(0.0, [1.0, 2.0, 3.0, 4.0])
    b = reply(0.0, [2.0, 3.0, 4.0, 5.0])
    summary = Summary(Outcome([a, b], 0.0, 0.0))
    assert summary.decode_only == pytest.approx(4 / 2)  # tokens at 3 and 4 of both, between 2 and 4
    assert summary.end_to_end == pytest.approx(8 / 5)
    assert summary.tokens_between(0.0, 2.0) == 3
    with pytest.raises(LoadError, match="at no time"):
        _ = Summary(Outcome([a, reply(0.0, [9.0, 10.0])], 0.0, 0.0)).decode_only


def test_events_with_several_tokens_keep_the_count_right() -> None:
    """Where a server sends fewer events than tokens, rates are of tokens all the same."""
    summary = Summary(Outcome([reply(0.0, [1.0, 2.0, 3.0], tokens=6)], 0.0, 0.0))
    assert summary.tokens_per_event == 2.0
    assert summary.decode_only == pytest.approx(4 / 2)


def test_goodput_counts_requests_that_met_both_objectives() -> None:
    quick = reply(0.0, [0.1, 0.2, 0.3])
    late = reply(0.0, [0.5, 0.6, 0.7])
    slow = reply(0.0, [0.1, 0.6, 1.0])
    goodput = Summary(Outcome([quick, late, slow], 0.0, 0.0)).goodput(ttft=0.2, itl=0.2)
    assert goodput == pytest.approx({"share": 1 / 3, "requests_per_second": 1.0, "tokens_per_second": 3.0})


def test_prompts_differ_from_the_first_token_on_and_are_reproducible() -> None:
    prompts, again = Prompts(VOCAB, 3), Prompts(VOCAB, 3)
    made = [prompts.fresh(6) for _ in range(500)]
    assert len({p[0] for p in made}) == 500
    assert all(1000 <= token < VOCAB and len(p) == 6 for p in made for token in p)
    assert made == [again.fresh(6) for _ in range(500)]


def test_prompts_run_out_instead_of_repeating() -> None:
    prompts = Prompts(1010, 0)
    for _ in range(10):
        prompts.fresh(2)
    with pytest.raises(RuntimeError, match="no more first tokens"):
        prompts.fresh(2)


def test_shared_prefix_and_tenant_weights() -> None:
    prompts = Prompts(20000, 4)
    shared = prompts.fresh(50)
    tenants = [Tenant("small", "s", 1.0), Tenant("large", "l", 3.0)]
    made = prompts.conversations(2000, prompt_tokens=2, output_tokens=1, shared=shared, tenants=tenants)
    assert all(c.prompt(0)[:50] == list(shared) and len(c.prompt(0)) == 52 for c in made)
    assert len({c.prompt(0)[50] for c in made}) == 2000
    share = sum(c.tenant.name == "large" for c in made) / len(made)
    assert share == pytest.approx(0.75, abs=0.04)


def test_poisson_schedule_has_its_rate_and_its_spread() -> None:
    """Gaps of a Poisson process are exponential: the deviation equals the mean."""
    starts = Prompts(VOCAB, 5).poisson(4000, rate=8.0)
    gaps = [b - a for a, b in zip([0.0, *starts], starts, strict=False)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((g - mean) ** 2 for g in gaps) / len(gaps)) ** 0.5
    assert min(gaps) > 0
    assert mean == pytest.approx(1 / 8, rel=0.06)
    assert deviation == pytest.approx(mean, rel=0.08)
