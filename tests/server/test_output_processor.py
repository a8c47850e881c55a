"""`OutputProcessor` alone: any split of the engine's events gives the same text, reasons and counts."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chatserve.engine.client import Delta
from chatserve.engine.protocol import Finished, Started
from chatserve.server.output_processor import ChoiceDone, OutputOptions, OutputProcessor, PromptStarted, TextDelta
from chatserve.text.stop_strings import StopAutomaton
from chatserve.text.tokenizer import Tokenizer
from tests.fakes import IM_END


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(tiny_folder)


def expected(tokens: list[int], stop: tuple[str, ...], tokenizer: Tokenizer) -> tuple[str, str | None]:
    """The obvious way: decode longer and longer prefixes until a stop is complete in settled text."""
    text = tokenizer.decode(tokens)
    found = [(text.index(s) + len(s), -len(s), s) for s in stop if s in text]
    if not found:
        return text, None
    end, _, which = min(found)
    return text[: end - len(which)], which


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_split_gives_the_same_result(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Deltas concatenated are the full decode, cut before the earliest stop; one end per choice; every id counted."""
    alphabet = st.sampled_from([*b"abST", 0xF0, 0x9F, 0x98, 0x80, 0xC3, 0xA9, 0xFF, IM_END])
    num_choices = data.draw(st.integers(1, 3))
    streams = [data.draw(st.lists(alphabet, max_size=25)) for _ in range(num_choices)]
    stop = tuple(data.draw(st.lists(st.text("abST", min_size=1, max_size=3), max_size=2)))
    by_token = [data.draw(st.booleans()) for _ in streams]
    steps: list[list[Started | Delta | Finished]] = [[Started(1, 5, 2)]]
    for position in range(26):
        step: list[Started | Delta | Finished] = []
        for choice, tokens in enumerate(streams):
            if position < len(tokens):
                step.append(Delta(choice, tokens[position]))
            elif position == len(tokens) and by_token[choice]:
                step += [Delta(choice, 7), Finished(1, choice, "stop", 7)]
            elif position == len(tokens):
                step.append(Finished(1, choice, "length"))
        steps.append(step)
    output = OutputProcessor(
        tokenizer,
        OutputOptions(stop=StopAutomaton(stop)),
        num_choices=num_choices,
        prompt_tokens=5,
        observe_gap=lambda *_: None,
    )
    texts, ends, ids = [""] * num_choices, list[ChoiceDone](), [list[int]() for _ in streams]
    while steps:
        size = data.draw(st.integers(1, 4))
        batch = [event for step in steps[:size] for event in step]
        del steps[:size]
        for event in output.process(batch, 0.0):
            if isinstance(event, TextDelta):
                assert event.choice not in {end.choice for end in ends}
                texts[event.choice] += event.text
                ids[event.choice] += event.token_ids
            elif isinstance(event, ChoiceDone):
                ends.append(event)
            else:
                assert event == PromptStarted(5, 2)
    assert output.failure is None
    assert output.num_open == 0
    assert sorted(end.choice for end in ends) == list(range(num_choices))
    for end in ends:
        tokens = streams[end.choice]
        text, which = expected(tokens, stop, tokenizer)
        assert texts[end.choice] == output.text(end.choice) == text
        assert end.stop_reason == which
        if which is None:
            assert (end.finish_reason, end.stop_token) == (("stop", 7) if by_token[end.choice] else ("length", None))
            assert output.token_ids(end.choice).tolist() == tokens
        else:
            assert end.finish_reason == "stop"
            assert output.token_ids(end.choice).tolist() == tokens[: len(output.token_ids(end.choice))]
    counted = sum(
        len(output.token_ids(end.choice)) + (end.stop_token is not None and end.stop_reason is None) for end in ends
    )
    assert output.usage.completion_tokens == counted


def test_failure_keeps_the_text_before_it(tokenizer: Tokenizer) -> None:
    """An error in a batch ends the request, but what came before it in the same batch is shown."""
    output = OutputProcessor(tokenizer, OutputOptions(), num_choices=2, prompt_tokens=1, observe_gap=lambda *_: None)
    events = output.process([Delta(0, 97), Delta(1, 98), Finished(1, 0, "error", error_message="bad row")], 0.0)
    assert [event.text for event in events if isinstance(event, TextDelta)] == ["a", "b"]
    assert not any(isinstance(event, ChoiceDone) for event in events)
    assert output.failure is not None
    assert output.failure.message == "bad row"
