"""Tenants on the model we ship, through the front door: a server process, its HTTP, its WebSocket, its commands.

In samples; the oracle's tests cover everything in full.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from chatserve.cli.admin_client import AdminClient
from chatserve.cli.doctor_probes import PROBES
from chatserve.errors import ChatserveError

SAMPLES = 100
ADMIN = "the-admin-key-of-this-test"
KEYS = {name: f"the-key-of-{name}-in-this-test" for name in ("acme", "beta", "gamma")}
NUM_BLOCKS = 96
"""Less than twenty conversations need: the older ones are on the host when they are looked for."""

SYSTEM = (
    "You are the guide of a harbour museum. You answer in one sentence, you never speak of the closed west wing, and "
    "you always end with the opening hours: ten to six, except on Mondays. "
)
TENANTS_FILE = "\n".join(
    f'[[tenants]]\nname = "{name}"\ngroups = {["museum"] if name in ("acme", "beta") else []}\n'
    f'[[tenants.keys]]\nkey = "{key}"\n'
    for name, key in KEYS.items()
)
TEMPLATE_TOKENS = 40
"""What every chat of this model begins with, at most: each tenant's own cache has it after its first chat."""


class House:
    """A running server."""

    def __init__(self, url: str) -> None:
        self.server = AdminClient(url, None)
        self.admin = self.server.with_key(ADMIN)
        self.tenants = {name: self.server.with_key(key) for name, key in KEYS.items()}

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """Exit status, output and errors of a command against the server."""
        command = [sys.executable, "-m", "chatserve", *arguments, "--url", self.server.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        return done.returncode, done.stdout, done.stderr

    def chat(self, tenant: str, question: str, system: str = SYSTEM) -> int:
        """Cached tokens of one turn."""
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        body = {"messages": messages, "max_tokens": 1}
        usage = self.tenants[tenant].call("POST", "/v1/chat/completions", body)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    def metric(self, name: str) -> float:
        text = self.admin._send("GET", "/metrics", None).decode()
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name + "{"))


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    tenants = tmp_path_factory.mktemp("house") / "tenants.toml"
    tenants.write_text(TENANTS_FILE)
    command = [
        *(sys.executable, "-m", "chatserve", "serve", "smollm2-135m", "--port", "0", "--no-ui"),
        *("--tenants-file", str(tenants), "--num-gpu-blocks-override", str(NUM_BLOCKS), "--swap-space", "1"),
    ]
    environment = {**os.environ, "CHATSERVE_ADMIN_API_KEY": ADMIN}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    lines: list[str] = []
    assert process.stderr is not None
    reader = threading.Thread(target=lambda: lines.extend(process.stderr or ()), daemon=True)
    reader.start()
    try:
        deadline = time.monotonic() + 300
        while not (match := re.search(r"Listening on (\S+)", "".join(lines))):
            assert process.poll() is None, "".join(lines)
            assert time.monotonic() < deadline
            time.sleep(0.05)
        house = House(match[1])
        while not _is_ready(house):
            assert process.poll() is None, "".join(lines)
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield house
    finally:
        process.terminate()
        process.wait(60)
        reader.join(5)
        process.stderr.close()


def _is_ready(house: House) -> bool:
    try:
        return bool(house.server.call("GET", "/readyz")["status"] == "ok")
    except ChatserveError:
        return False


def test_pairs_over_every_entry_point_and_both_tiers(house: House) -> None:
    """A hundred prompts: each is found again whole by its tenant, on the device or on the host, and not by another."""
    kinds = list(PROBES.items())

    def prompt(number: int) -> str:
        rng = random.Random(number)
        return " ".join(str(rng.randrange(10**6)) for _ in range(6))

    def put(number: int) -> None:
        owner = ("acme", "beta", "gamma")[number % 3]
        PROBES[kinds[number % len(kinds)][0]](house.tenants[owner], prompt(number), "nobody")

    def look(number: int) -> tuple[str, int, int, int]:
        owner, other = ("acme", "beta", "gamma")[number % 3], ("beta", "gamma", "acme")[number % 3]
        kind, probe = kinds[number % len(kinds)]
        _, foreign = probe(house.tenants[other], prompt(number), owner)
        total, own = probe(house.tenants[owner], prompt(number), other)
        return kind, total, own, foreign

    promotions = house.metric("chatserve:promotions_total")
    found = []
    with ThreadPoolExecutor(4) as pool:
        for start in range(0, SAMPLES, 20):
            numbers = range(start, start + 20)
            list(pool.map(put, numbers))
            found += pool.map(look, numbers)
    assert len(found) == SAMPLES
    for kind, total, own, foreign in found:
        assert own == total - 1, (kind, total, own)
        assert foreign <= (0 if kind.startswith("completion") else TEMPLATE_TOKENS) + 4, (kind, foreign)
    assert house.metric("chatserve:promotions_total") > promotions, "nothing was found on the host"
    print(f"{SAMPLES} pairs: own hits {SAMPLES}, cross-tenant hits 0")


def test_publications_by_command(house: House, tmp_path: Path) -> None:
    """`prefixes publish FILE`: computed once, found by every tenant's first request; a group's by its members alone;
    withdrawn, it ends; beyond the budget it is refused with the numbers.
    """
    admin = ["--admin-api-key", ADMIN]
    for group, members in (("", ("acme", "beta", "gamma")), ("museum", ("acme", "beta"))):
        system = f"Number {len(members)} is today's motto. {SYSTEM}"
        file = tmp_path / f"system-{group}.txt"
        file.write_text(system)
        status, told, errors = house.run(
            "prefixes", "publish", str(file), *(["--group", group] if group else []), *admin
        )
        assert status == 0, errors
        match = re.match(r"(\S+)  (\d+) tokens in (\d+) blocks", told)
        assert match, told
        prefix_id, tokens = match[1], int(match[2])
        assert int(match[3]) == -(-tokens // 16)
        for number, tenant in enumerate(("acme", "beta", "gamma")):
            cached = house.chat(tenant, f"{number} is my number", system)
            if tenant in members:
                assert tokens <= cached <= tokens + 2, tenant
            else:
                assert cached < tokens // 2, tenant
        assert (prefix_id in house.run("prefixes", "list", *admin)[1]) is True
        status, _, errors = house.run("prefixes", "withdraw", prefix_id, *admin)
        assert status == 0, errors
        assert prefix_id not in house.run("prefixes", "list", *admin)[1]
    file.write_text(SYSTEM * 30)
    status, told, errors = house.run("prefixes", "publish", str(file), *admin)
    assert (status, told) == (1, "")
    assert re.search(r"needs \d+ blocks; 24 of the 24 that may be pinned are left", errors)
    status, _, errors = house.run("prefixes", "publish", str(file), "--admin-api-key", KEYS["acme"])
    assert status == 1
    assert "admin key" in errors


def test_the_doctor(house: House) -> None:
    """With two tenants' keys, against the real thing."""
    keys = ["--api-key", KEYS["acme"], "--api-key", KEYS["gamma"]]
    status, told, errors = house.run("doctor", "isolation", "--trials", "2", *keys)
    assert status == 0, (told, errors)
    assert "16 pairs: own hits 16 of 16, cross-tenant hits 0 of 16" in told
