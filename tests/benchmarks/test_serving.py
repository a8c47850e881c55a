"""``scripts/bench serving`` as a command."""

from __future__ import annotations

import json
import sys

import pytest
from click.testing import CliRunner

from benchmarks.serving import main
from tests.benchmarks.sse_server import sse_server


def run(port: int, *options: str) -> str:
    arguments = ["--url", f"http://127.0.0.1:{port}", "--output-tokens", "3", "--prompt-tokens", "4", *options]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_tenants_turns_and_goodput_are_in_the_json() -> None:
    with sse_server() as (port, told):
        tenants = ("--tenant", "a=key-a", "--tenant", "b=key-b:3")
        objectives = ("--ttft-objective", "1000", "--itl-objective", "1000")
        load = ("--num-conversations", "12", "--turns", "2", "--rate", "200", "--seed", "1")
        result = json.loads(run(port, *tenants, *objectives, *load, "--json"))
    assert result["requests"] == 24
    assert result["output_tokens"] == 72
    assert result["prompt_tokens"] == 24 * 7
    assert result["cached_tokens"] == 24 * 3
    assert result["goodput"]["share"] == 1.0
    assert result["load"] == {"rate": 200.0}
    assert set(result["tenants"]) == {"a", "b"}
    assert result["turns"]["0"]["requests"] == result["turns"]["1"]["requests"] == 12
    assert result["client_cpu_us_per_token"] > 0
    assert set(told.keys) == {"Bearer key-a", "Bearer key-b"}


def test_the_table_is_for_people() -> None:
    with sse_server() as (port, _):
        text = run(port, "--num-conversations", "4")
    assert "12 output tokens" in text
    assert "µs of CPU per token" in text


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--rate", "1", "--concurrency", "2"), "choose"),
        (("--tenant", "a=k", "--api-key", "x"), "choose"),
        (("--tenant", "nokey"), "NAME=KEY"),
        (("--url", "ftp://x"), "not an http:// address"),
        (("--url", "http://127.0.0.1:9"), "Connect"),
    ],
)
def test_mistakes_are_explained(options: tuple[str, ...], complaint: str) -> None:
    result = CliRunner().invoke(main, options)
    assert result.exit_code != 0
    assert complaint in result.output


def test_a_plot_without_matplotlib_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with sse_server() as (port, _):
        result = CliRunner().invoke(
            main, ["--url", f"http://127.0.0.1:{port}", "--num-conversations", "2", "--plot", "never.png"]
        )
    assert result.exit_code == 1
    assert "pip install 'chatserve[bench]'" in result.output
