"""The race's bookkeeping: missing servers, ratios, floors, the JSON object, and the processes it runs."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

import pytest

from benchmarks._fleet import Fleet
from benchmarks._local_server import free_port
from benchmarks._race_rows import PEERS, Metric, compare, line_of, load_rows
from benchmarks._race_run import ROWS, Race
from benchmarks._workload import Prompts
from benchmarks.peers import ours
from benchmarks.peers.process import Launch, Model, Need, Server, ServerError
from benchmarks.race import report, table
from tests.waiting import PATIENCE

MODEL = Model("m", Path("/folder"), Path("/m.gguf"), 49152, 100_000_000, 270_000_000, 20_000)
RATE, SECONDS = Metric("r", "tokens/s", True), Metric("s", "s", False)


@pytest.fixture(autouse=True)
def no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LLAMA", "VLLM", "HF"):
        monkeypatch.delenv(f"CHATSERVE_PEER_{name}", raising=False)


def sleeper(code: str, port: int, patience: float = PATIENCE) -> Launch:
    """A server of a few lines."""
    return Launch([sys.executable, "-c", code], port, 1, "m", ready_path="/", patience=patience)


SERVE = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("child", child.pid, flush=True)
http.server.HTTPServer(("127.0.0.1", {port}), http.server.SimpleHTTPRequestHandler).serve_forever()
"""


def test_missing_servers_are_named_with_what_to_do() -> None:
    fleet = Fleet(MODEL, ["ours", *PEERS], threads=2)
    assert fleet.names == ["ours"]
    assert set(fleet.missing) == set(PEERS)
    assert "CHATSERVE_PEER_LLAMA" in fleet.missing["llama"]
    assert "CHATSERVE_PEER_VLLM" in fleet.missing["vllm"]
    assert "CHATSERVE_PEER_HF" in fleet.missing["hf"]


def test_a_wrong_path_is_a_mistake_and_not_an_absence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CHATSERVE_PEER_LLAMA", str(tmp_path / "nothing"))
    with pytest.raises(ServerError, match=r"CHATSERVE_PEER_LLAMA.*nothing"):
        Fleet(MODEL, ["llama"], threads=2)


def test_every_server_is_told_its_threads_port_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LLAMA", "VLLM", "HF"):
        monkeypatch.setenv(f"CHATSERVE_PEER_{name}", sys.executable)
    fleet = Fleet(MODEL, ["ours", *PEERS], threads=2, first_port=9000)
    assert fleet.missing == {}
    need = Need(streams=4, context=512, kv_tokens=1280)
    for index, name in enumerate(("ours", *PEERS)):
        launch = fleet.launch(name, need)
        assert launch.threads == 2
        assert str(9000 + index) in launch.command
    assert "80" in fleet.launch("ours", need).command  # 1,280 tokens in blocks of 16
    assert "1280" in fleet.launch("llama", need).command
    assert "11" in fleet.launch("vllm", need).command  # ten blocks of 128, and its placeholder
    assert fleet.launch("vllm", Need(streams=16)) == fleet.launch("vllm", Need(streams=32, context=512))
    assert ours.launch(MODEL, Need(weights="bfloat16"), 1, 2) != ours.launch(MODEL, Need(), 1, 2)


def test_ratios_are_medians_over_rounds_and_above_one_where_ours_is_better() -> None:
    samples = {"ours": [{"r": 10.0}, {"r": 40.0}, {"r": 30.0}], "vllm": [{"r": 5.0}, {"r": 10.0}, {"r": 15.0}]}
    assert compare(RATE, samples) == {
        "unit": "tokens/s",
        "ours": 30.0,
        "llama": None,
        "vllm": 10.0,
        "hf": None,
        "over_llama": None,
        "over_vllm": 2.0,
        "over_hf": None,
    }
    times = {"ours": [{"s": 0.5}], "llama": [{"s": 2.0}]}
    assert compare(SECONDS, times)["over_llama"] == 4.0


def test_floors_count_weights_once_a_step_and_shared_context_once() -> None:
    """At 1 GB/s; the figures are worked out by hand."""
    rows = load_rows()
    floors = {n: row.floor(MODEL, 1e9) for n, row in rows.items() if row.floor is not None}
    assert floors["1"] == pytest.approx(1e9 / (1e8 + (64 + 128) * 2e4))
    assert floors["2"] == pytest.approx(16e9 / (1e8 + 16 * (256 + 64) * 2e4))
    assert floors["2_bf16"] == pytest.approx(16e9 / (2.7e8 + 16 * (256 + 64) * 2e4))
    assert floors["4"] == pytest.approx(16e9 / (1e8 + (1024 + 16 * (64 + 64)) * 2e4))
    assert floors["5"] == pytest.approx((1e8 + 1024 * 2e4) / 1e9)
    assert floors["6"] == pytest.approx((1e8 + 2080 * 2e4) / 1e9)
    assert rows["7"].floor is None


def test_a_line_has_the_share_of_its_floor_in_both_directions() -> None:
    rows = load_rows()
    rate = line_of(rows["2"], {"ours": [{"decode_only": 50.0, "end_to_end": 40.0, "ttft": 1.0}]}, floor=100.0)
    assert (rate["ours"], rate["floor"], rate["floor_share"]) == (50.0, 100.0, 0.5)
    assert rate["end_to_end"]["ours"] == 40.0
    time_ = line_of(rows["5"], {"ours": [{"ttft": 0.4}], "vllm": [{"ttft": 0.8}]}, floor=0.1)
    assert (time_["over_vllm"], time_["floor_share"]) == (2.0, 0.25)


def test_work_is_fresh_and_sized_as_the_rows_say() -> None:
    prompts = Prompts(MODEL.vocab_size, 0)
    sizes = {}
    for number, row in load_rows().items():
        work = row.make(prompts)
        first = work.timed[0]
        sizes[number] = (len(work.timed), len(first.prompt(0)), first.max_tokens)
        assert work.timed[0].prompt(0)[0] != row.make(prompts).timed[0].prompt(0)[0]
    assert sizes["1"] == (1, 64, 256)
    assert sizes["2"] == sizes["2_bf16"] == (16, 256, 128)
    assert sizes["3"] == (32, 256, 128)
    assert sizes["4"] == (16, 1088, 128)
    assert sizes["5"][1] == 1024
    assert sizes["6"][1] == 2080
    work = load_rows()["6"].make(prompts)
    assert work.before[0].prompt(0)[:2048] == work.timed[0].prompt(0)[:2048]
    working_set = sum(c.num_tokens for c in load_rows()["7"].make(prompts).timed)
    kv_tokens = load_rows()["7"].need.kv_tokens
    assert kv_tokens is not None
    assert kv_tokens / working_set == pytest.approx(0.6, abs=0.01)
    assert kv_tokens % 128 == 0


def test_the_report_has_every_row_and_says_who_was_missing() -> None:
    assert ROWS == ("1", "2", "2_bf16", "3", "4", "5", "6", "7", "8", "9")
    race = Race(Fleet(MODEL, ["ours", "llama"], threads=2), rounds=1, seed=0)
    race.speeds = {"loop": 2e9}
    result = report(race, {"1": {"ours": [{"end_to_end": 10.0, "decode_only": 11.0, "ttft": 0.1}]}}, ["llama"], 0)
    row = result["rows"]["1"]
    for key in ("ours", "llama", "vllm", "hf", "over_llama", "over_vllm", "floor_share"):
        assert key in row
    assert row["floor_share"] == pytest.approx(10 * (1e8 + 192 * 2e4) / 2e9, rel=1e-3)
    text = table(result)
    assert "llama is missing: set CHATSERVE_PEER_LLAMA" in text
    assert "vllm was not asked for" in text


def test_a_row_goes_on_without_a_server_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half an hour of measuring does not end because one peer dies; the failure is in the report."""
    race = Race(Fleet(MODEL, ["ours"], threads=2), rounds=2, seed=0)
    race.fleet.names = ["ours", "llama"]
    monkeypatch.setattr(race, "measure_bandwidth", lambda: None)

    def run_once(row: object, name: str, work: object) -> dict[str, float]:
        if name == "llama":
            raise ServerError("illegal instruction")
        return {"end_to_end": 3.0}

    monkeypatch.setattr(race, "_run_once", run_once)
    assert race.run("1") == {"ours": [{"end_to_end": 3.0}] * 2}
    assert race.failures == {"1, llama": "illegal instruction"}


def test_a_server_is_waited_for_paused_and_ended_with_its_children() -> None:
    port = free_port()
    server = Server("test", sleeper(SERVE.format(port=port), port))
    try:
        assert server.start_seconds > 0
        assert server.num_os_threads() >= 2
        assert server.cpu_seconds() > 0
        server.pause()
        server.resume()
        child = int(server.log_tail().split("child ")[1].split()[0])
        os.kill(child, 0)
    finally:
        server.stop()
    server.stop()
    deadline = time.monotonic() + PATIENCE
    while Path(f"/proc/{child}").exists() and "State:\tZ" not in Path(f"/proc/{child}/status").read_text():
        assert time.monotonic() < deadline, "the child outlived its server"
        time.sleep(0.01)


def test_a_server_that_dies_or_never_gets_ready_says_what_it_said() -> None:
    with pytest.raises(ServerError, match=r"status 3.*\n.*no such weights"):
        Server("test", sleeper("print('no such weights', flush=True); raise SystemExit(3)", free_port()))
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(ServerError, match="is taken"):
        Server("test", sleeper("raise SystemExit(3)", other.getsockname()[1]))
    with pytest.raises(ServerError, match=r"not ready after 0\.2"):
        Server("test", sleeper("import time; time.sleep(60)", free_port(), patience=0.2))
