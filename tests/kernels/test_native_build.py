"""Compiling on the user's machine: once, safely, and with a clear word where it cannot be done."""

from __future__ import annotations

import platform
import subprocess
import threading
from pathlib import Path

import pytest
from chatserve_kernels.cpu import build
from click.testing import CliRunner

from chatserve.cli.main import cli
from chatserve.errors import ConfigError
from chatserve.model import kernels
from tests.kernels import native

COUNTER = """#!/bin/sh
echo x >> "$COUNT_FILE"
case "$1" in --version) echo fake 1.0; exit 0;; esac
while [ "$1" != -o ]; do shift; done
echo compiled > "$2"
"""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that writes one line instead of code, and counts its calls."""
    script = tmp_path / "cxx"
    script.write_text(COUNTER)
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("COUNT_FILE", str(tmp_path / "count"))
    return script


def test_a_library_is_compiled_once_for_all_processes(tmp_path: Path, compiler: Path) -> None:
    """Whoever comes second, at the same time or later, uses the first one's result and is told nothing."""
    planned = build.plan(tmp_path / "out", "portable")
    notices: list[str] = []
    threads = [threading.Thread(target=build.build, args=(planned, notices.append)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    build.build(planned, notices.append)
    assert planned.path.read_text() == "compiled\n"
    assert len(notices) == 1
    assert "portable" in notices[0]
    assert sorted(path.suffix for path in planned.path.parent.iterdir()) == [".lock", ".so"]


def test_the_name_tells_compiler_and_instruction_set(tmp_path: Path, compiler: Path) -> None:
    """Another compiler version or instruction set never meets an old library."""
    first = build.plan(tmp_path, "portable").path
    compiler.write_text(COUNTER.replace("fake 1.0", "fake 1.1"))
    second = build.plan(tmp_path, "portable").path
    assert first != second
    assert len({build.plan(tmp_path, isa).path for isa in build.supported_isas()}) == len(build.supported_isas())


def test_a_missing_or_failing_compiler_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernels then, a notice with the reason, and the caller goes on with torch; nothing half-made is left."""
    monkeypatch.setenv("CHATSERVE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "nowhere"))
    notices: list[str] = []
    assert kernels.load_kernels(1, notices.append) is None
    with pytest.raises(ConfigError, match="no C\\+\\+ compiler"):
        kernels.build_kernels(notices.append)
    failing = tmp_path / "failing"
    failing.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "common.h: error: no such thing" >&2\nexit 1\n')
    failing.chmod(0o755)
    monkeypatch.setenv("CXX", str(failing))
    assert kernels.load_kernels(1, notices.append) is None
    assert "no C++ compiler" in notices[0]
    assert "failing failed: common.h: error: no such thing" in notices[-1]
    assert all("\n" not in notice for notice in notices)
    assert [path.name for path in kernels.kernel_folder().iterdir()] == ["build.lock"]


def test_a_file_that_is_no_library_is_refused(tmp_path: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged file in the cache leads to torch and a notice that says what to delete."""
    monkeypatch.setenv("CHATSERVE_HOME", str(tmp_path))
    notices: list[str] = []
    assert kernels.load_kernels(1, notices.append) is None
    assert "cannot be loaded" in notices[-1]
    assert "delete it" in notices[-1]


def test_the_command_compiles_and_says_where(tmp_path: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``chatserve kernels build`` leaves the library that the engine will look for."""
    monkeypatch.setenv("CHATSERVE_HOME", str(tmp_path))
    result = CliRunner().invoke(cli, ["kernels", "build"])
    assert result.exit_code == 0, result.output
    path = build.plan(kernels.kernel_folder()).path
    assert path.read_text() == "compiled\n"
    assert str(path) in result.output


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="only portable code is for this processor")
@pytest.mark.parametrize("isa", [isa for isa in build.ISAS if isa not in build.supported_isas() or isa == "portable"])
def test_the_sources_are_right_for_other_cpus(isa: str) -> None:
    """What cannot run here is at least accepted by the compiler with the flags it would get there; so is plain code."""
    flags = [*build._FLAGS, *build._ISA_FLAGS[isa], "-fsyntax-only"]
    sources = sorted(build.SOURCES.glob("*.cpp"))
    assert sources
    for source in sources:
        done = subprocess.run([native.compiler(), *flags, str(source)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_instruction_sets_follow_the_cpu() -> None:
    """Best first, only what the CPU has, portable always."""
    assert build.supported_isas("flags\t: fpu sse2")[-1] == "portable"
    flags = "flags\t: avx2 fma f16c bmi2 avx512f avx512bw avx512dq avx512vl avx512_vnni"
    assert build.supported_isas(flags) in (("avx512", "avx2", "portable"), ("portable",))
    assert build.supported_isas(flags + " avx512_bf16")[0] in ("avx512bf16", "portable")
    with pytest.raises(build.BuildError, match="not available here"):
        build.plan(Path("/nonexistent"), "sve")
