"""Runs the page's own unit tests (`node --test`, no packages), so that one command tests everything.

Skipped with a reason where node is absent; in CI its absence is a failure.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from tests.needs import missing

WEB = Path(__file__).resolve().parents[2] / "web"


def test_modules_of_the_page() -> None:
    """Protocol reducer, delta application, Markdown reader and number formats do what their tests say."""
    node = shutil.which("node")
    if node is None:
        missing("node is not installed: the page's unit tests cannot run")
    files = sorted(str(path) for path in (WEB / "tests").glob("*.test.js"))
    assert files, "no unit tests of the page were found"
    done = subprocess.run([node, "--test", *files], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_page_needs_nobody_else() -> None:
    """No file of the page names another origin to load from, and index.html has no inline script or style."""
    for path in [WEB / "index.html", *WEB.glob("app/*.js"), *WEB.glob("css/*.css")]:
        text = path.read_text()
        for loader in (
            'src="http',
            'href="http',
            "url(",
            "@import",
            'from "http',
            'import("http',
            "innerHTML",
            " eval(",
        ):
            assert loader not in text, f"{path.name} contains {loader}"
    page = (WEB / "index.html").read_text()
    assert "<style" not in page
    assert " style=" not in page
    assert page.count("<script") == page.count('<script type="module" src="./app/')
    assert re.search(r"\son[a-z]+=", page) is None, "an inline event handler"
