"""The cache folder's mechanics: locks, temporary folders, converter processes, and when a result counts.

Everything here is safe against being killed at any moment and against other processes doing the same: work happens
in a temporary folder under a lock, and one rename publishes it, manifest included. Used by `chatserve.model.store`
only; knows neither names nor where models come from.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import msgspec

from chatserve.errors import ModelLoadError

CONVERTER_VERSION = 2
COPY_BYTES = 1024 * 1024
_MANIFEST = "chatserve.json"


class Progress(msgspec.Struct, frozen=True):
    """One step of preparing a model: ``done`` of ``total`` bytes (or of 1 where a step has no size)."""

    step: str
    done: int = 0
    total: int | None = None


ProgressCallback = Callable[[Progress], None]


class Manifest(msgspec.Struct, frozen=True):
    """Marks a converted folder as complete.

    Attributes:
        source: what was converted, for people to read.
        sha256: identity of that, by which a changed source is noticed.
        revision: identity of the result.
        converter: version of the converter; another version converts again.
    """

    source: str
    sha256: str
    revision: str
    converter: int


class _FileIdentity(msgspec.Struct, frozen=True):
    """What says that a file is still the one whose SHA-256 is known, without reading it again."""

    path: str
    num_bytes: int
    mtime_ns: int
    inode: int
    sha256: str = ""


class _ConverterLine(msgspec.Struct, frozen=True):
    step: str = ""
    done: int = 0
    total: int | None = None
    error: str = ""


def cache_root() -> Path:
    """``$CHATSERVE_HOME``, else ``$XDG_CACHE_HOME/chatserve``, else ``~/.cache/chatserve``."""
    if home := os.environ.get("CHATSERVE_HOME"):
        return Path(home)
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "chatserve"
    return Path.home() / ".cache" / "chatserve"


def ignore_progress(_: Progress) -> None:
    """The progress callback of those who do not want to know."""


def model_folder(name: str) -> Path:
    """Where the prepared folder of ``name`` is or will be."""
    return cache_root() / "models" / name


def revision_of(sha256: str) -> str:
    """Identity of a conversion: of its source, and of the way it was converted."""
    return f"{sha256[:16]}-{CONVERTER_VERSION}"


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a converted folder; ``None`` unless it is complete and made by this converter."""
    try:
        manifest = msgspec.json.decode((folder / _MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError):
        return None
    return manifest if manifest.converter == CONVERTER_VERSION else None


def convert(
    module: str, source: Path, folder: Path, description: str, sha256: str, progress: ProgressCallback
) -> Manifest:
    """Run a converter process into a temporary folder, and publish that by one rename. Needs the folder's lock."""
    manifest = Manifest(description, sha256, revision_of(sha256), CONVERTER_VERSION)
    with temporary_folder(folder.name) as work:
        result = work / "model"
        result.mkdir()
        error = ""
        with (work / "stderr").open("w+b") as stderr:
            # -P: a torch.py in the user's current folder is not ours to import. The open stdin tells the converter
            # that we live; when it closes, the converter ends.
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(source), str(result)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    with contextlib.suppress(msgspec.DecodeError):
                        message = msgspec.json.decode(line, type=_ConverterLine)
                        error = error or message.error
                        if message.step:
                            progress(Progress(f"convert: {message.step}", message.done, message.total))
                process.wait()
            finally:
                end_process(process)
            stderr.seek(0)
            trace = stderr.read().decode(errors="replace").strip().splitlines()
        if process.returncode != 0 or error:
            reason = error or " ".join(trace[-1:]) or f"the converter ended with status {process.returncode}"
            raise ModelLoadError(f"{source.name} could not be converted: {reason}")
        with (result / _MANIFEST).open("wb") as output:
            output.write(msgspec.json.format(msgspec.json.encode(manifest)))
            sync(output)
        # The manifest goes first: a folder half removed must not look complete.
        (folder / _MANIFEST).unlink(missing_ok=True)
        _remove(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        result.replace(folder)
    return manifest


def known_sha256(file: Path, progress: ProgressCallback) -> str:
    """SHA-256 of a large file, remembered by path, size, time and inode."""
    stat = file.stat()
    identity = _FileIdentity(str(file), stat.st_size, stat.st_mtime_ns, stat.st_ino)
    record = cache_root() / "index" / f"{hashlib.sha256(str(file).encode()).hexdigest()[:16]}.json"
    with contextlib.suppress(OSError, msgspec.DecodeError):
        known = msgspec.json.decode(record.read_bytes(), type=_FileIdentity)
        if msgspec.structs.replace(known, sha256="") == identity:
            return known.sha256
    sha256 = sha256_of(file, progress)
    write_atomically(record, msgspec.json.encode(msgspec.structs.replace(identity, sha256=sha256)))
    return sha256


def sha256_of(file: Path, progress: ProgressCallback) -> str:
    """SHA-256 of a file as hexadecimal digits, with progress."""
    total = file.stat().st_size
    digest = hashlib.sha256()
    done = 0
    with file.open("rb") as stream:
        while chunk := stream.read(COPY_BYTES):
            digest.update(chunk)
            done += len(chunk)
            progress(Progress(f"verify {file.name}", done, total))
    return digest.hexdigest()


@contextlib.contextmanager
def lock(name: str, progress: ProgressCallback) -> Iterator[None]:
    """Hold ``name`` against every other process; a dead holder's lock is free."""
    path = cache_root() / "locks" / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(Progress(f"wait for another process that prepares {name}"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def temporary_folder(name: str) -> Iterator[Path]:
    """A fresh folder for making ``name`` in, on the cache's own disk. Clears what a killed predecessor left.

    Called with the lock of ``name`` held, so no living process owns any other folder of that name.
    """
    parent = cache_root() / "partial" / name
    parent.mkdir(parents=True, exist_ok=True)
    for leftover in parent.iterdir():
        _remove(leftover)
    folder = Path(tempfile.mkdtemp(dir=parent))
    try:
        yield folder
    finally:
        _remove(folder)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a small file so that readers see the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    os.replace(file.name, path)


def sync(file: IO[bytes]) -> None:
    """Have everything written so far on disk, so that a rename never comes before it."""
    file.flush()
    os.fsync(file.fileno())


def _remove(folder: Path) -> None:
    # An orphan of a killed run may still be writing into it; whatever is left is unused and goes next time.
    shutil.rmtree(folder, ignore_errors=True)


def tree_size(folder: Path) -> int:
    """Bytes in all files below ``folder``, which may be changing."""
    total = 0
    for parent, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(parent, file)).st_size
    return total


def end_process(process: subprocess.Popen[bytes]) -> None:
    """End a process for certain, and close our ends of its pipes."""
    if process.poll() is None:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


@contextlib.contextmanager
def disk_errors() -> Iterator[None]:
    """Turn what the disk refuses into an error that says where and what to check."""
    try:
        yield
    except OSError as error:
        where = f" at {error.filename}" if error.filename else ""
        raise ModelLoadError(
            f"The model cannot be stored or read{where}: {error.strerror or error}. "
            f"Check space and permissions of {cache_root()} (CHATSERVE_HOME moves it)."
        ) from error
