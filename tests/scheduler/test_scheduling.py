"""Scheduling rules, one by one, on the oracle model."""

from __future__ import annotations

import pytest

from chatserve.scheduler.invariants import check_scheduler
from chatserve.scope import Scope
from tests.harness import Harness, numbers

OTHER = Scope("tenant", "t2")


def test_eight_identical_cold_prompts_cost_one() -> None:
    """Seven wait while the first computes, then find its blocks; no duplicate block stays (vllm#14073)."""
    engine = Harness(prefill_chunk=16)
    prompt = numbers(0, 42)
    streams = [engine.submit(prompt, 1) for _ in range(8)]
    engine.run()
    for stream in streams:
        engine.expect(stream)
    # 42 tokens for the leader; each follower computes the one token whose logits it needs.
    assert engine.executor.num_tokens == 42 + 7
    assert [stream.cached for stream in streams] == [0] + [41] * 7
    # Ten whole blocks and one partial tail.
    assert engine.pool.num_idle == 11


def test_identical_prompts_of_strangers_do_not_wait_for_each_other() -> None:
    """A claim of another tenant is invisible: no shared work, no timing to observe."""
    engine = Harness()
    prompt = numbers(0, 40)
    first, second = engine.submit(prompt, 1), engine.submit(prompt, 1, scopes=(OTHER,))
    engine.step()
    assert first.done
    assert second.done
    assert second.cached == 0


def test_a_lost_leader_blocks_nobody() -> None:
    """The claim lives one step: abort the leader in the middle of its prefill, the follower goes on from there."""
    engine = Harness(max_num_batched_tokens=16)
    prompt = numbers(0, 60)
    leader, follower = engine.submit(prompt, 1), engine.submit(prompt, 1)
    engine.step()
    engine.step()
    engine.abort(leader)
    engine.run(follower)
    engine.expect(follower)
    assert follower.cached == 32


def test_a_second_conversation_reuses_the_system_prompt_to_the_token() -> None:
    """All of it, the part of a block included, while the first still runs and after it ended."""
    for first_done in (False, True):
        engine = Harness(block_size=16, num_blocks=64)
        system = numbers(0, 70)
        first = engine.submit([*system, 1, 2, 3], 40)
        engine.run(first) if first_done else engine.step()
        second = engine.submit([*system, 4, 5, 6], 4)
        engine.run(second)
        engine.expect(second)
        # While the first is running only its whole blocks are published.
        assert second.cached == (70 if first_done else 64)


@pytest.mark.parametrize("chunk", [4, 8, 12])
def test_prompts_are_published_as_they_are_computed(chunk: int) -> None:
    """Every whole block after every chunk, also where a chunk has few: others may be waiting for them."""
    engine = Harness(prefill_chunk=chunk, num_blocks=128)
    engine.submit(numbers(500, 5), 200)  # with nobody to stall, one step would do
    engine.step()
    stream = engine.submit(numbers(0, 50), 1)
    [_, sequence] = [s for request in engine.core.scheduler.requests for s in request.sequences]
    seen = set()
    while not stream.done:
        engine.step()
        if sequence.table is not None:
            seen.add(sequence.table.num_published)
    assert seen == set(range(chunk // 4, 50 // 4 + 1, chunk // 4))


def test_an_answer_shows_itself_in_runs_while_it_decodes_and_whole_when_it_ends() -> None:
    """Whatever its length, it lags behind by less than a run of four blocks and one, but does lag, and each of several
    answers publishes its own; preempted or ended, all is there."""
    lags = set()
    for length in range(8, 40):
        engine = Harness()
        first = engine.submit(numbers(0, 9), 200, n=2, seed=3)
        while len(first.tokens[1]) < length:
            engine.step()
        for choice in (0, 1):
            asked = [*first.prompt, *first.tokens[choice], 5]
            running = engine.submit(asked, 1)
            engine.run(running)
            assert running.cached is not None
            assert len(asked) - running.cached <= 20
            lags.add((len(asked) - running.cached) // 4)
        asked = [*first.prompt, *first.tokens[1], 5]
        engine.preempt(first)
        after = engine.ask([*asked, 6], 1)
        assert after.cached is not None
        assert after.cached >= len(asked) - 2
        engine.run(first)
        engine.expect(first)
    assert len(lags) >= 4


def test_the_next_turn_reuses_the_whole_last_turn() -> None:
    """Prompt and answer, except the last sampled token, which never ran."""
    engine = Harness()
    first = engine.ask(numbers(0, 21), 13)
    second = engine.ask([*first.prompt, *first.tokens[0], 5, 6], 4)
    assert second.cached == 21 + 13 - 1


@pytest.mark.parametrize("length", [3, 4, 5, 8, 9])
@pytest.mark.parametrize("output", [3, 4, 5])
def test_block_edges(length: int, output: int) -> None:
    """Prompts and outputs of B-1, B, B+1 tokens, twice each (nano-vllm#66)."""
    engine = Harness()
    for _ in range(2):
        engine.ask(numbers(length, length), output)


@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
def test_the_block_size_changes_nothing_that_can_be_seen(block_size: int) -> None:
    """Same outputs for every unit of caching (kvcached#446)."""
    engine = Harness(block_size=block_size, num_blocks=512 // block_size)
    for offset in (0, 1, 15, 16, 17, 40):
        engine.ask([*numbers(0, offset), *numbers(300, 7)], 9)


def test_constant_hash_serves_three_tenants_correctly() -> None:
    """The hash is an index, never a proof: 300 random prompts, all colliding (vllm#12621)."""
    import random

    rng = random.Random(1)
    engine = Harness(num_blocks=128, hash_block=lambda _: 0)
    for _ in range(300):
        prompt = [rng.randint(10, 12) for _ in range(rng.randint(1, 30))]
        engine.ask(prompt, 3, scopes=(Scope("tenant", str(rng.randint(0, 2))),))


def test_another_tenant_never_hits_and_oneself_does() -> None:
    """Asserted in pairs: the second half alone passes when caching is broken."""
    engine = Harness()
    prompt = numbers(0, 33)
    assert engine.ask(prompt).cached == 0
    assert engine.ask(prompt, scopes=(OTHER,)).cached == 0
    assert engine.ask(prompt).cached == 32


def test_another_model_or_template_revision_never_hits() -> None:
    """Reloaded weights under the same name start cold (vllm#3264)."""
    engine = Harness()
    prompt = numbers(0, 33)
    engine.ask(prompt, scopes=(Scope("tenant", "t", "weights-1", "template-1"),))
    for weights, template in (("weights-2", "template-1"), ("weights-1", "template-2")):
        assert engine.ask(prompt, scopes=(Scope("tenant", "t", weights, template),)).cached == 0


@pytest.mark.parametrize("after", range(1, 14))
def test_preempted_at_any_moment_nothing_is_lost_or_repeated(after: int) -> None:
    """Tokens, log-probabilities and reason are those of an undisturbed run (vllm#16832, sglang#20724)."""
    engine = Harness(num_blocks=16, max_num_batched_tokens=8)
    quiet = Harness(num_blocks=16, max_num_batched_tokens=8)
    options = {"seed": 3, "temperature": 1.0, "logprobs": 0}
    stream = engine.submit(numbers(0, 19), 12, **options)  # type: ignore[arg-type]
    undisturbed = quiet.ask(numbers(0, 19), 12, **options)
    for _ in range(after):
        engine.step()
    engine.preempt(stream)
    if after % 2:
        # Somebody else takes the pool meanwhile, so that the resume is a recompute and not a hit.
        engine.ask(numbers(400, 50), 10)
    engine.run(stream)
    engine.expect(stream)
    assert stream.logprobs == undisturbed.logprobs
    assert stream.reasons == undisturbed.reasons


def test_preemption_gives_back_every_block() -> None:
    """At each offset inside a block (sglang#4977)."""
    for after in range(1, 10):
        engine = Harness(num_blocks=16)
        stream = engine.submit(numbers(0, 5), 20)
        for _ in range(after):
            engine.step()
        engine.preempt(stream)
        assert engine.pool.num_held == 0
        engine.run(stream)
        engine.expect(stream)


def test_a_batch_of_resumed_sequences_only() -> None:
    """Having output already does not make a resumed prefill a decode (nano-vllm#144)."""
    engine = Harness()
    streams = [engine.submit(numbers(i * 50, 9 + i), 10) for i in range(4)]
    for _ in range(4):
        engine.step()
    for stream in streams:
        engine.preempt(stream)
    engine.ask(numbers(400, 100), 10)
    engine.run()
    for stream in streams:
        engine.expect(stream)


def test_two_that_exceed_the_pool_together_both_finish_without_thrashing() -> None:
    """At most 4 preemptions each, at most 1.5 times the serial steps (vllm#25538, vllm#45388)."""
    serial = Harness(num_blocks=15)
    for start in (0, 400):
        serial.ask(numbers(start, 20), 20)
    serial_steps = serial.core.scheduler.step
    engine = Harness(num_blocks=15)
    streams = [engine.submit(numbers(start, 20), 20) for start in (0, 400)]
    engine.run()
    for stream in streams:
        engine.expect(stream)
    assert engine.core.stats().preemptions <= 8
    assert engine.core.scheduler.step <= 1.5 * serial_steps


def test_the_last_block_goes_to_one_and_the_other_waits() -> None:
    """Two sequences of one batch that need it in the same step: progress at every step (LightLLM#901)."""
    engine = Harness(num_blocks=6)
    streams = [engine.submit(numbers(start, 7), 6) for start in (0, 400)]
    while not all(stream.done for stream in streams):
        before = sum(len(stream.tokens[0]) for stream in streams)
        engine.step()
        assert sum(len(stream.tokens[0]) for stream in streams) > before
    for stream in streams:
        engine.expect(stream)


def test_one_request_may_grow_to_the_whole_pool() -> None:
    """It ends for length with every token right, and the next one works (sglang#15626)."""
    engine = Harness(num_blocks=8)
    stream = engine.ask(numbers(0, 5), None)
    assert stream.reasons == ["length"]
    assert len(stream.tokens[0]) == 8 * 4 + 1 - 5
    engine.ask(numbers(0, 5), None)


def test_what_can_never_fit_is_refused_and_exactly_fitting_is_served() -> None:
    """Refused at once, not parked at the head of the queue for ever (vllm#39734); in words that name no field, which
    the engine does not know."""
    engine = Harness(num_blocks=8)
    never = engine.submit(numbers(0, 20), 14)
    other = engine.submit(numbers(0, 3), 3)
    [refusal] = engine.step().finished
    assert "max_tokens" not in (refusal.error_message or "")
    assert never.reasons == ["error"]
    assert never.errors == ["context_length_exceeded"]
    engine.run(other)
    assert engine.ask(numbers(0, 20), 13).reasons == ["length"]


def test_context_length_edge() -> None:
    """prompt + max_tokens = limit gives exactly max_tokens tokens (sglang#33814)."""
    engine = Harness(max_model_len=40)
    assert len(engine.ask(numbers(0, 30), 10).tokens[0]) == 10
    assert len(engine.ask(numbers(0, 39), None).tokens[0]) == 1
    refused = engine.submit(numbers(0, 30), 11)
    engine.step()
    assert refused.errors == ["context_length_exceeded"]


def test_a_better_class_gets_a_slot_from_a_worse_one() -> None:
    """All slots hold long low-class outputs; the first token of a high-class request comes within 3 steps."""
    engine = Harness(max_num_seqs=2)
    low = [engine.submit(numbers(i * 100, 6), 60, priority_class=1) for i in range(2)]
    for _ in range(40):
        engine.step()
    now = engine.core.scheduler.step
    high = engine.submit(numbers(500, 6), 4, priority_class=0)
    engine.run(high)
    assert high.first_step is not None
    assert high.first_step - now <= 3
    engine.run()
    for stream in [high, *low]:
        engine.expect(stream)


def test_equals_never_take_each_others_slot() -> None:
    """No ping-pong between equal classes, whatever their priority field says (vllm#54530)."""
    engine = Harness(max_num_seqs=2)
    for i in range(5):
        engine.submit(numbers(i * 100, 6), 50, priority=-i)
    engine.run()
    assert engine.core.stats().preemptions == 0


def test_a_resumed_sequence_keeps_its_slot_for_a_quantum() -> None:
    """High-class requests one after the other cost the low one a preemption each quantum at most."""
    engine = Harness(max_num_seqs=1)
    low = engine.submit(numbers(0, 6), 40, priority_class=1)
    engine.step()
    for i in range(6):
        engine.submit(numbers(100 + i * 20, 6), 2, priority_class=0)
        for _ in range(8):
            engine.step()
    engine.run()
    engine.expect(low)
    assert engine.core.stats().preemptions <= 2


def test_a_preempted_request_resumes_before_later_arrivals() -> None:
    """Its place in the queue is that of its arrival (vllm#41951)."""
    engine = Harness(max_num_seqs=1)
    first = engine.submit(numbers(0, 6), 20)
    engine.step()
    later = engine.submit(numbers(100, 6), 2)
    engine.preempt(first)
    engine.run(first)
    assert not later.done
    engine.run()


def test_small_ones_pass_a_big_one_but_not_for_ever() -> None:
    """At most ``max_overtakes`` admissions pass it (vllm#33499)."""
    engine = Harness(num_blocks=16, max_num_seqs=4, max_overtakes=3)
    holder = engine.submit(numbers(0, 22), 30)
    engine.step()
    big = engine.submit(numbers(200, 40), 10)
    small = [engine.submit(numbers(300 + 10 * i, 3), 2) for i in range(12)]
    engine.run()
    for stream in [holder, big, *small]:
        engine.expect(stream)
    assert big.started_step is not None
    passed = [s for s in small if s.started_step is not None and s.started_step < big.started_step]
    assert 1 <= len(passed) <= 3


def test_a_finished_crowd_never_blocks_admission() -> None:
    """Cached blocks count as available, however many there are (sglang#6778)."""
    engine = Harness(num_blocks=12)
    for i in range(400):
        stream = engine.submit([10 + i % 7, i % 90, i % 31, *numbers(i, i % 9)], 3)
        engine.step()
        assert stream.started_step is not None
        engine.run(stream)


def test_prefill_beside_decodes_is_chunked() -> None:
    """A long prompt does not stall the streams: they get a token in every step of its prefill."""
    engine = Harness(prefill_chunk=8)
    talker = engine.submit(numbers(0, 5), 30)
    engine.step()
    long = engine.submit(numbers(100, 80), 2)
    while long.first_step is None:
        before = len(talker.tokens[0])
        engine.step()
        assert len(talker.tokens[0]) == before + 1
    assert long.started_step is not None
    assert long.first_step - long.started_step == 80 // 8 - 1


def test_a_prefill_finds_what_others_published_meanwhile() -> None:
    """It matches again before each chunk; what is there is adopted, not computed."""
    engine = Harness(max_num_batched_tokens=16, max_num_seqs=4)
    common = numbers(0, 48)
    first = engine.submit([*common, 900], 1)
    engine.step()
    second = engine.submit([*common, 901], 1)
    engine.run()
    for stream in (first, second):
        engine.expect(stream)
    assert engine.executor.num_tokens <= 49 + 16


def test_many_choices_equal_single_requests_with_their_seeds() -> None:
    """n=4 from a prompt that ends inside a block: each is the n=1 run with its seed (vllm#417)."""
    engine = Harness()
    group = engine.submit(numbers(0, 10), 9, n=4, seed=5, temperature=1.0)
    engine.run()
    engine.expect(group)
    assert len({tuple(tokens) for tokens in group.tokens}) == 4
    assert engine.core.manager.num_copies == 3
    for choice in range(4):
        single = Harness().ask(numbers(0, 10), 9, seed=5 + choice, temperature=1.0)
        assert single.tokens[0] == group.tokens[choice]


def test_choices_that_do_not_fit_the_batch_follow_later() -> None:
    """A child that cannot fork now is queued and finds the prompt by its prefix."""
    engine = Harness(max_num_seqs=3, num_blocks=40)
    group = engine.submit(numbers(0, 10), 9, n=7, seed=1, temperature=1.0)
    engine.run()
    engine.expect(group)
    # Prompt once, and for each late child at most the tokens behind the prompt's last whole block.
    assert engine.executor.num_tokens <= 10 + 4 * 2 + 7 * 8


def test_many_groups_in_little_memory() -> None:
    """64 requests of 4 choices on a pool that holds a few of them (vllm#5578)."""
    engine = Harness(num_blocks=24, max_num_seqs=12)
    groups = [engine.submit(numbers(i * 7, 6 + i % 5), 7, n=4, seed=i, temperature=1.0) for i in range(64)]
    engine.run(limit=20_000)
    for group in groups:
        engine.expect(group)
    assert engine.pool.num_held == 0


def test_broken_numbers_end_one_request_and_publish_nothing() -> None:
    """A NaN row fails alone; nothing it computed is reused, its neighbours are untouched (vllm#22881)."""
    engine = Harness(max_num_batched_tokens=16)
    engine.executor.nan_tokens = frozenset({999})
    good = engine.submit(numbers(300, 10), 12)
    bad_prompt = [*numbers(0, 20), 999, *numbers(50, 20)]
    bad = engine.submit(bad_prompt, 5)
    engine.run()
    engine.expect(good)
    assert bad.reasons == ["error"]
    assert bad.tokens == [[]]
    engine.executor.nan_tokens = frozenset()
    assert engine.ask(bad_prompt, 5).cached == 0


def test_an_answer_of_the_wrong_length_is_refused_at_once() -> None:
    """Shifted by one, every later token would be somebody else's; the engine ends and is replaced."""
    from chatserve.scheduler.output import ModelRunnerOutput

    engine = Harness()
    for i in range(3):
        engine.submit(numbers(100 * i, 5), 6)
    engine.step()
    for tokens in (b"\1\0\0\0" * 2, b"\1\0\0\0" * 4, b""):
        assert engine.core.scheduler.schedule() is not None
        with pytest.raises(RuntimeError, match="tokens for 3 rows"):
            engine.core.scheduler.update(ModelRunnerOutput(tokens))


@pytest.mark.parametrize("token", [-1, 1000, 2**31 - 1])
def test_a_token_outside_the_vocabulary_ends_one_request(token: int) -> None:
    """An id the worker made up reaches nobody; the others go on (vllm#47346)."""
    import numpy as np

    from chatserve.scheduler.output import ModelRunnerOutput, SchedulerOutput

    engine = Harness()
    bad, good = engine.submit(numbers(0, 5), 6), engine.submit(numbers(200, 6), 6)
    execute = engine.executor.execute

    def lie(plan: SchedulerOutput) -> ModelRunnerOutput:
        output = execute(plan)
        tokens = np.frombuffer(output.tokens, np.int32).copy()
        tokens[0] = token
        return ModelRunnerOutput(tokens.tobytes(), output.failed, output.logprobs)

    engine.step()
    engine.executor.execute = lie  # type: ignore[method-assign]
    engine.step()
    engine.executor.execute = execute  # type: ignore[method-assign]
    engine.run()
    assert bad.reasons == ["error"]
    assert len(bad.tokens[0]) == 1
    engine.expect(good)


def test_stop_tokens_and_minimum_length() -> None:
    """Stop ids end the output, but not before ``min_tokens``; the end token is delivered last."""
    prompt = numbers(0, 8)
    free = Harness().ask(prompt, 12).tokens[0]
    stopped = Harness().ask(prompt, 12, stop_token_ids=(free[4],))
    cut = free.index(free[4])
    assert stopped.tokens[0] == free[: cut + 1]
    assert stopped.reasons == ["stop"]
    later = Harness().ask(prompt, 12, stop_token_ids=(free[1],), min_tokens=4)
    assert len(later.tokens[0]) > 4


def test_abort_in_every_state_gives_everything_back() -> None:
    """Waiting, prefilling, forked, decoding, preempted, finished, unknown: blocks return, others go on."""
    for moment in range(12):
        engine = Harness(max_num_batched_tokens=8, num_blocks=24)
        bystander = engine.submit(numbers(300, 9), 15)
        victim = engine.submit(numbers(0, 18), 10, n=2)
        for _ in range(moment):
            engine.step()
        if moment % 3 == 2:
            engine.preempt(victim)
        engine.abort(victim)
        engine.abort(victim)
        engine.run()
        assert set(victim.reasons) <= {"abort", "length"}
        engine.expect(bystander)
        assert engine.pool.num_held == 0
        assert not len(engine.core.scheduler.waiting)


def test_finish_and_abort_in_the_same_step_release_once() -> None:
    """The second is a no-op (UCM#1053)."""
    engine = Harness()
    stream = engine.submit(numbers(0, 5), 1)
    engine.step()
    assert stream.done
    engine.abort(stream)
    assert not engine.core.has_work
    check_scheduler(engine.core.scheduler)
