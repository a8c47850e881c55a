"""A request's start is told before its first step runs, so that a long prefill is not taken for waiting."""

from __future__ import annotations

import pytest

from chatserve.engine.protocol import StepFrame
from chatserve.scheduler.output import ModelRunnerOutput, SchedulerOutput
from tests.harness import Harness, numbers


def test_starts_are_told_before_the_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Announced once, ahead of the executor and of the frame that brings the first token; a step without starts
    announces nothing.
    """
    harness = Harness()
    log: list[str] = []
    execute = harness.executor.execute

    def execute_and_log(plan: SchedulerOutput) -> ModelRunnerOutput:
        log.append("execute")
        return execute(plan)

    def announce(frame: StepFrame) -> None:
        assert (frame.tokens, frame.finished) == (b"", ())
        log.extend(f"started {each.request_id}" for each in frame.started)

    monkeypatch.setattr(harness.executor, "execute", execute_and_log)
    harness.submit(numbers(1, 20), 3)
    harness.submit(numbers(50, 9), 3)
    frame = harness.core.step(announce)
    assert log == ["started 1", "started 2", "execute"]
    assert frame.started == ()
    assert frame.tokens
    harness.core.step(announce)
    assert log == ["started 1", "started 2", "execute", "execute"]
