"""Compiles the C++ sources of this package with the user's compiler, once, into a folder of the user's.

Knows sources, compilers and instruction sets; imports no torch and loads nothing. A library is named by everything
that went into it, so a changed source, compiler or CPU never meets an old one. `library` loads the result; the
callers decide when a compilation (about ten seconds) is acceptable.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
ISAS = ("amx", "avx512bf16", "avx512", "avx2", "portable")

_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mprefer-vector-width=512")
_ISA_FLAGS = {
    "amx": (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    "avx512bf16": (*_AVX512, "-mavx512bf16"),
    "avx512": _AVX512,
    "avx2": _AVX2,
    "portable": (),
}
_CPU_NEEDS = {
    "amx": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16"},
    "avx512bf16": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"},
    "avx2": {"avx2", "fma", "f16c", "bmi2"},
    "portable": set[str](),
}
_FLAGS = (
    *("-std=c++20", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd"),
    *("-fPIC", "-pthread", "-fvisibility=hidden"),
)
_COMPILE_SECONDS = 300


class BuildError(Exception):
    """No library could be made; the message says why in one line."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What would be compiled, and where the result is or would be."""

    compiler: str
    isa: str
    path: Path

    @property
    def is_built(self) -> bool:
        return self.path.is_file()


def supported_isas(cpuinfo: str | None = None) -> tuple[str, ...]:
    """Instruction sets that this CPU has and the kernels know, best first; the last is always ``portable``.

    Args:
        cpuinfo: contents of ``/proc/cpuinfo``; ``None`` reads it.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return ("portable",)
    if cpuinfo is None:
        with contextlib.suppress(OSError):
            cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    line = next((line for line in (cpuinfo or "").splitlines() if line.startswith("flags")), "")
    flags = set(line.partition(":")[2].split())
    return tuple(isa for isa in ISAS if flags >= _CPU_NEEDS[isa])


def plan(folder: Path, isa: str | None = None) -> Plan:
    """The library for this machine.

    Args:
        folder: where libraries are kept.
        isa: one of `ISAS`; ``None`` takes ``CHATSERVE_CPU_ISA``, or else the best that the CPU has.

    Raises:
        BuildError: no compiler, or an instruction set that the CPU lacks.
    """
    supported = supported_isas()
    isa = isa or os.environ.get("CHATSERVE_CPU_ISA") or supported[0]
    if isa not in supported:
        raise BuildError(f"instruction set {isa!r} is not available here; this CPU has {', '.join(supported)}")
    compiler = find_compiler()
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"the compiler {compiler} does not run ({error})") from error
    digest = hashlib.sha256(version)
    digest.update(repr((_FLAGS, _ISA_FLAGS[isa])).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return Plan(compiler, isa, folder / f"kernels-{isa}-{digest.hexdigest()[:16]}.so")


def find_compiler() -> str:
    """Path of ``$CXX``, or of the first C++ compiler found. Raises `BuildError` where there is none."""
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else ("g++", "c++", "clang++"):
        if path := shutil.which(name):
            return path
    raise BuildError(f"there is no C++ compiler ({wanted or 'g++, c++ or clang++'}); install one, or set CXX")


def build(planned: Plan, notice: Callable[[str], None]) -> Path:
    """Compile unless that is done; safe against other processes that do the same, and against being killed.

    Args:
        notice: told in one line before a compilation begins.

    Raises:
        BuildError: the compiler failed, or the folder cannot be written.
    """
    if planned.is_built:
        return planned.path
    try:
        planned.path.parent.mkdir(parents=True, exist_ok=True)
        with (planned.path.parent / "build.lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not planned.is_built:
                notice(f"Compiling CPU kernels ({planned.isa}) with {planned.compiler}, once; about ten seconds.")
                with tempfile.TemporaryDirectory(dir=planned.path.parent) as work:
                    os.replace(_compile(planned, Path(work)), planned.path)
    except OSError as error:
        raise BuildError(f"{planned.path.parent} cannot be used: {error.strerror or error}") from error
    return planned.path


def _compile(planned: Plan, work: Path) -> Path:
    flags = [*_FLAGS, *_ISA_FLAGS[planned.isa]]
    sources = sorted(SOURCES.glob("*.cpp"))
    objects = [work / f"{source.stem}.o" for source in sources]
    commands = [
        [planned.compiler, *flags, "-c", str(source), "-o", str(target)]
        for source, target in zip(sources, objects, strict=True)
    ]
    _run_all(commands, work)
    library = work / "kernels.so"
    _run_all([[planned.compiler, *flags, "-shared", *map(str, objects), "-o", str(library)]], work)
    return library


def _run_all(commands: list[list[str]], work: Path) -> None:
    """Run commands side by side; the first that fails is the error, with its compiler's first complaint."""
    logs = [(work / f"log-{number}").open("w+b") for number in range(len(commands))]
    running = [subprocess.Popen(command, stdout=log, stderr=log) for command, log in zip(commands, logs, strict=True)]
    try:
        for process, log in zip(running, logs, strict=True):
            if process.wait(timeout=_COMPILE_SECONDS) != 0:
                log.seek(0)
                lines = log.read().decode(errors="replace").splitlines()
                complaint = next((line for line in lines if "error" in line), (lines or ["no output"])[-1])
                raise BuildError(f"{Path(process.args[0]).name} failed: {complaint.strip()}")  # type: ignore[index,arg-type]
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"the compiler took longer than {_COMPILE_SECONDS} seconds") from error
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()
        for log in logs:
            log.close()
