"""Long runs of steps in which all rows decode: books that are kept lazily are as right as others, at every step."""

from __future__ import annotations

import random

import pytest

from chatserve.scheduler.batch import Batch
from tests.harness import Harness, Stream, numbers


def check_tokens(engine: Harness, streams: list[Stream]) -> None:
    """Every running row knows exactly what its client was sent."""
    batch = engine.core.scheduler.batch
    running = {s.request.request_id: s for s in batch.sequences if s is not None}
    for stream in streams:
        sequence = running.get(engine.ids[id(stream)])
        if sequence is not None:
            assert batch.known_tokens(sequence.row).tolist() == [*stream.prompt, *stream.tokens[0]]


def test_rows_that_come_and_go_between_long_runs() -> None:
    """Runs longer than the log, ended by arrivals, aborts, preemptions and lengths; tokens, blocks and counts are
    compared after each step, and every answer with the oracle."""
    rng = random.Random(4)
    engine = Harness(num_blocks=512, max_num_seqs=6)
    streams: list[Stream] = []
    longest = 0
    for step in range(1200):
        if step % 290 == 0:
            streams += [engine.submit(numbers(len(streams), 5 + i), rng.randint(100, 400)) for i in range(3)]
        if step % 307 == 150:
            engine.abort(rng.choice([stream for stream in streams if not stream.done]))
        if step % 411 == 200:
            engine.preempt(next(stream for stream in streams if not stream.done))
        engine.step()
        if step % 7 == 0:  # looking brings them up to date, so not every time
            check_tokens(engine, streams)
        run = engine.core.scheduler.batch.run
        if run is not None:
            assert run.num_logged < 128  # memory is bounded
            longest = max(longest, run.num_steps)
    engine.run()
    reasons = [stream.reasons[0] for stream in streams]
    assert {"length", "abort"} == set(reasons)
    for stream, reason in zip(streams, reasons, strict=True):
        if reason == "length":
            engine.expect(stream)
    assert longest > 140


@pytest.mark.parametrize("length", [64, 130, 200])
def test_a_long_answer_is_found_while_it_is_written(length: int) -> None:
    """What a run of steps has published is right: a prompt that repeats it reuses it, but for a few blocks."""
    engine = Harness(num_blocks=512)
    first = engine.submit(numbers(1, 10), 400)
    engine.submit(numbers(2, 7), 400)
    while len(first.tokens[0]) < length:
        engine.step()
    second = engine.submit([*first.prompt, *first.tokens[0], 5], 20)
    engine.run(second)
    engine.expect(second)
    assert second.cached >= 10 + length - 5 * engine.core.manager.block_size


def test_stop_tokens_of_ones_own_end_a_run() -> None:
    """Only whoever asked for them, and whoever leaves takes them along."""
    engine = Harness(num_blocks=512)
    plain = engine.submit(numbers(1, 6), 300)
    expected = engine.submit(numbers(2, 6), 300)
    while len(expected.tokens[0]) < 40:
        engine.step()
    stop = expected.tokens[0][30]
    first = expected.tokens[0].index(stop)
    stopped = engine.submit(numbers(2, 6), 300, stop_token_ids=(stop,))
    engine.run(stopped)
    assert stopped.tokens[0] == expected.tokens[0][: first + 1]
    batch: Batch = engine.core.scheduler.batch
    assert not batch.own_stop_ids
    engine.run()
    engine.expect(plain)
    engine.expect(expected)
