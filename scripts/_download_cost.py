"""Before a machine without an NVIDIA GPU downloads a CUDA build of torch: say what it costs, and ask.

Reads the report of ``pip install --dry-run --report FILE``. Exit status 0: go on. Anything else: do not install.
Knows nothing of chatserve; called by ``scripts/_env.sh`` with the venv's interpreter, standard library only.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.parse
import urllib.request
from typing import Any

HUGE_BYTES = 500 * 10**6
"""A CPU build of torch is about 200 MB; builds with CUDA code are several times that."""

ADVICE = """\
This machine has no NVIDIA GPU, but pip would install a build of torch for CUDA:

{packages}
  about {total} to download, of which a CPU uses the smallest part.

A CPU build is better here. https://pytorch.org/get-started/locally (choose CPU) names its package index; then:
  PIP_EXTRA_INDEX_URL=<that index> {command}
To install the CUDA build all the same:
  CHATSERVE_ACCEPT_CUDA=1 {command}
"""


def main(report_file: str) -> int:
    with open(report_file, encoding="utf-8") as file:
        items: list[dict[str, Any]] = json.load(file)["install"]
    suspects = {item["metadata"]["name"].lower(): item for item in items if _is_suspect(item)}
    sizes = {name: _size(item["download_info"]["url"]) for name, item in suspects.items()}
    if not _is_cuda(suspects, sizes):
        return 0
    lines = [
        f"  {name} {suspects[name]['metadata']['version']}: {_megabytes(size)}" for name, size in sorted(sizes.items())
    ]
    total = _megabytes(sum(size or 0 for size in sizes.values()) or None)
    command = os.environ.get("CHATSERVE_SCRIPT", "scripts/serve")
    print(ADVICE.format(packages="\n".join(lines), total=total, command=command), file=sys.stderr)
    if os.environ.get("CHATSERVE_ACCEPT_CUDA") == "1":
        return 0
    if os.environ.get("CI") or not sys.stdin.isatty():
        print("Nothing was installed.", file=sys.stderr)
        return 1
    return 0 if input("Download it? [y/N] ").strip().lower() in ("y", "yes") else 1


def _is_suspect(item: dict[str, Any]) -> bool:
    name = item["metadata"]["name"].lower()
    return name in ("torch", "triton") or name.startswith(("nvidia-", "cuda-"))


def _is_cuda(suspects: dict[str, dict[str, Any]], sizes: dict[str, int | None]) -> bool:
    if "torch" not in suspects:
        return False  # it is there already
    local_version = suspects["torch"]["metadata"]["version"].partition("+")[2]
    companions = any(name not in ("torch", "triton") for name in suspects)
    return companions or local_version.startswith("cu") or (sizes["torch"] or 0) > HUGE_BYTES


def _size(url: str) -> int | None:
    """Bytes behind a wheel's address, or ``None`` where nobody says."""
    parsed = urllib.parse.urlsplit(url)
    try:
        if parsed.scheme == "file":
            return os.stat(urllib.request.url2pathname(parsed.path)).st_size
        request = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(request, timeout=10) as response:
            return int(response.headers["Content-Length"])
    except (OSError, ValueError, TypeError):
        return None


def _megabytes(size: int | None) -> str:
    return "size unknown" if size is None else f"{size / 1e6:,.0f} MB"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
