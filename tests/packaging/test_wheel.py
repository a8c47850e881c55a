"""What is built is what is served: the wheel, and the question before a large download."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import chatserve

ROOT = Path(__file__).parent.parent.parent
COST = ROOT / "scripts" / "_download_cost.py"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=60,
    )
    (built,) = folder.glob("*.whl")
    return built


def files_under(folder: str) -> set[str]:
    return {
        str(path.relative_to(ROOT / folder))
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.name != ".gitkeep"
    }


def test_the_wheel_holds_code_page_presets_and_licence(wheel: Path) -> None:
    """A server installed without the repository has every module, every file of the page and every preset."""
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"chatserve/{name}" for name in files_under("chatserve")} <= names
    assert {f"chatserve_kernels/{name}" for name in files_under("kernels/chatserve_kernels")} <= names
    assert {f"chatserve/_web/{name}" for name in files_under("web")} <= names
    assert {f"chatserve/_configs/{name}" for name in files_under("configs")} <= names
    assert any(name.endswith("/LICENSE") for name in names)
    assert not any(name.startswith(("tests/", "benchmarks/", "scripts/")) for name in names)


def test_presets_are_found_without_the_repository(wheel: Path, tmp_path: Path) -> None:
    """The installed package reads its own presets and knows its version."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import chatserve, chatserve.cli.settings as s\n"
        "assert chatserve.__file__.startswith(__import__('os').getcwd()), chatserve.__file__\n"
        "print(chatserve.__version__, s.load({}, {}, 'demo').model)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.split() == [chatserve.__version__, "smollm2-135m"]


def report(tmp_path: Path, *packages: tuple[str, str, int]) -> Path:
    """A pip report whose wheels are sparse local files of the given sizes."""
    install = []
    for name, version, size in packages:
        file = tmp_path / f"{name}-{version}.whl"
        with file.open("wb") as stream:
            stream.truncate(size)
        install.append({"metadata": {"name": name, "version": version}, "download_info": {"url": file.as_uri()}})
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"install": install}))
    return path


def ask(path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(COST), str(path)],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


MB = 10**6
CPU = (("torch", "2.13.0", 200 * MB), ("triton", "3.9.0", 200 * MB), ("numpy", "2.4", 20 * MB))
CUDA = (
    (("torch", "2.13.0", 200 * MB), ("nvidia-cublas", "13.1", 600 * MB)),
    (("torch", "2.13.0+cu130", 200 * MB),),
    (("torch", "2.13.0", 900 * MB),),
)


def test_a_cpu_build_is_installed_without_a_question(tmp_path: Path) -> None:
    """triton on its own is an ordinary dependency."""
    result = ask(report(tmp_path, *CPU), CI="true")
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("packages", CUDA)
def test_a_cuda_build_is_refused_with_its_cost(tmp_path: Path, packages: tuple[tuple[str, str, int], ...]) -> None:
    """Told by companions, by the version or by the size; CI fails, and so does a script nobody answers."""
    path = report(tmp_path, *packages)
    for environment in ({"CI": "true"}, {}):
        result = ask(path, **environment)
        assert result.returncode == 1
        assert f"{sum(size for _, _, size in packages) // MB:,} MB" in result.stderr
        assert "CPU build" in result.stderr
    assert ask(path, CHATSERVE_ACCEPT_CUDA="1").returncode == 0


def test_nothing_is_asked_when_torch_is_there_already(tmp_path: Path) -> None:
    """An upgrade of something else resolves without torch."""
    assert ask(report(tmp_path, ("numpy", "2.4", 20 * MB))).returncode == 0


def test_scripts_are_executable_bash() -> None:
    """What README tells people to run can be run."""
    for script in ("scripts/serve", "scripts/test", "scripts/check", "scripts/bench", ".ci/run"):
        path = ROOT / script
        assert path.stat().st_mode & 0o111, script
        subprocess.run(["bash", "-n", str(path)], check=True)
