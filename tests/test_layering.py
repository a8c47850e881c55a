"""The arrows between the packages, read from the imports; and what importing a package drags in."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
LEAVES = {"config", "errors", "scope", "sampling_params"}

ARROWS = {
    "config": set[str](),
    "errors": set[str](),
    "scope": set[str](),
    "sampling_params": {"errors"},
    "cache": LEAVES,
    "scheduler": LEAVES | {"cache"},
    "engine": LEAVES | {"scheduler", "cache"},
    "text": LEAVES,
    "sessions": LEAVES | {"text"},
    "tenancy": LEAVES,
    "server": LEAVES | {"sessions", "tenancy", "text", "engine.client", "engine.protocol", "scheduler.output"},
    "model": LEAVES,
    "worker": LEAVES | {"model", "scheduler.output", "engine.protocol"},
    "cli": LEAVES | {"cli", "server", "engine", "model", "tenancy", "text", "sessions"},
    "__main__": {"cli"},
}
"""Package or module of chatserve → what it may import from chatserve beside itself: a package or one module.

Between engine and worker stand only plain data: the plan (`scheduler.output`) and the engine's facts
(`engine.protocol`). The engine finds its executor by name at run time.
"""

HEAVY = {"torch", "transformers", "triton"}
TORCH_ROOMS = {"model", "worker"}
PURE = ("cache", "scheduler", "engine.core", "engine.protocol")
FORBIDDEN_IN_PURE = {"asyncio", "socket", "time", "random", "threading"}
LIGHT = (
    *("chatserve.cache.kv_cache_manager", "chatserve.scheduler.scheduler", "chatserve.engine.core"),
    *("chatserve.engine.process", "chatserve.engine.client", "chatserve.engine.transport"),
    *("chatserve.text.tokenizer", "chatserve.text.chat_template", "chatserve.sessions.memory_store"),
    *("chatserve.server.app", "chatserve.server.websocket", "chatserve.server.generation_service"),
    *("chatserve.cli.serve", "chatserve.cli.models", "chatserve.model.store"),
    *("chatserve.cli.tenants", "chatserve.tenancy.registry"),
)


def imports_of(path: Path) -> Iterator[str]:
    """Every module that a file imports, anywhere in it. ``from a import b`` is ``a.b`` where that is a module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if is_module(inner) else node.module


def is_module(name: str) -> bool:
    """Whether a dotted name is one of our own modules or packages."""
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def modules(folder: str) -> list[Path]:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files, f"nothing to read in {folder}"
    return files


def room_of(path: Path) -> str:
    return path.relative_to(ROOT / "chatserve").with_suffix("").parts[0]


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT / "chatserve").with_suffix("").parts)


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def test_rooms_import_only_along_the_arrows() -> None:
    """A new import against the architecture fails here, with the file that holds it."""
    wrong = []
    for path in modules("chatserve"):
        room = room_of(path)
        if room == "__init__":
            continue
        assert room in ARROWS, f"{path}: a new package needs its arrows"
        for imported in imports_of(path):
            target = imported.removeprefix("chatserve.")
            allowed = {room, *ARROWS[room]}
            if (
                within(imported, "chatserve")
                and imported != "chatserve"
                and not any(within(target, a) for a in allowed)
            ):
                wrong.append(f"{dotted(path)} imports {imported}")
    assert not wrong, "\n".join(wrong)


def test_the_reader_of_imports_sees_a_wrong_one(tmp_path: Path) -> None:
    """The tests here can fail: imports inside functions and under conditions count, and names are no modules."""
    file = tmp_path / "m.py"
    file.write_text(
        "from chatserve import __version__\ndef f():\n    from chatserve.engine import client\n"
        "if 0:\n    import torch.nn as nn\n    from chatserve.engine.client import EngineClient\n"
    )
    assert sorted(imports_of(file)) == ["chatserve", "chatserve.engine.client", "chatserve.engine.client", "torch.nn"]


def test_torch_lives_in_the_worker_and_the_model_only() -> None:
    """No other room names torch, transformers or triton."""
    wrong = [
        f"{dotted(path)} imports {imported}"
        for path in modules("chatserve")
        if room_of(path) not in TORCH_ROOMS
        for imported in imports_of(path)
        if imported.partition(".")[0] in HEAVY | {"chatserve_kernels"}
    ]
    assert not wrong, "\n".join(wrong)


def test_kernels_stand_alone() -> None:
    """The kernels know nothing of the server."""
    wrong = [
        f"{path.name} imports {imported}"
        for path in modules("kernels/chatserve_kernels")
        for imported in imports_of(path)
        if within(imported, "chatserve")
    ]
    assert not wrong, "\n".join(wrong)


def test_starlette_lives_in_the_server_only() -> None:
    """HTTP is the edge's business."""
    wrong = [
        f"{dotted(path)} imports {imported}"
        for path in modules("chatserve")
        if room_of(path) != "server"
        for imported in imports_of(path)
        if imported.partition(".")[0] in {"starlette", "uvicorn"}
    ]
    assert not wrong, "\n".join(wrong)


def test_the_core_has_no_clock_no_io_and_no_asyncio() -> None:
    """What schedules is a function of its inputs, so that failures replay."""
    wrong = [
        f"{dotted(path)} imports {imported}"
        for path in modules("chatserve")
        if any(within(dotted(path), room) for room in PURE)
        for imported in imports_of(path)
        if imported.partition(".")[0] in FORBIDDEN_IN_PURE
    ]
    assert not wrong, "\n".join(wrong)


def test_every_import_is_declared() -> None:
    """What the code imports is asked for in pyproject.toml by name, not found by luck behind somebody else's need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {re.split(r"[^a-z0-9-]", line, maxsplit=1)[0].replace("-", "_") for line in project["dependencies"]}
    known = declared | set(sys.stdlib_module_names) | {"chatserve", "chatserve_kernels"}
    wrong = [
        f"{path.relative_to(ROOT)} imports {imported}"
        for path in (*modules("chatserve"), *modules("kernels"))
        for imported in imports_of(path)
        if imported.partition(".")[0] not in known
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_unpickles() -> None:
    """Bytes from a socket or a file never become code."""
    wrong = [
        f"{path.relative_to(ROOT)} imports {imported}"
        for path in (*modules("chatserve"), *modules("kernels"))
        for imported in imports_of(path)
        if imported.partition(".")[0] in {"pickle", "cloudpickle", "dill", "shelve", "marshal", "multiprocessing"}
    ]
    assert not wrong, "\n".join(wrong)


def test_importing_does_not_drag_in_torch() -> None:
    """The API process starts fast and stays small, whatever its dependencies import: the first offender is named."""
    code = (
        "import importlib, sys\n"
        f"for name in {LIGHT!r}:\n"
        "    importlib.import_module(name)\n"
        f"    if found := sorted({HEAVY!r} & set(sys.modules)): sys.exit(f'{{name}} drags in {{found}}')\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_help_imports_no_server() -> None:
    """``chatserve --help`` answers at once."""
    code = (
        "import sys\nfrom chatserve.cli.main import cli\n"
        "try: cli(['--help'])\nexcept SystemExit: pass\n"
        "print(sorted({'asyncio', 'starlette', 'numpy', 'tokenizers'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip().endswith("[]")
