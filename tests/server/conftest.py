"""Fixtures shared by the server's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import structlog

from chatserve.tenancy.declared import Declared
from chatserve.tenancy.registry import TenantRegistry
from chatserve.tenancy.store import TenantStore
from chatserve.tenancy.tenant import Tenant
from tests.fakes import FakeEngineClient, write_tokenizer_folder
from tests.server.house import ADMIN, House
from tests.server.live import LiveServer, live_server


@pytest.fixture(scope="session", autouse=True)
def _plain_log() -> None:
    """Log events as plain lines: structlog's own default prints every local variable of a traceback."""
    structlog.configure(
        processors=[structlog.processors.format_exc_info, structlog.processors.KeyValueRenderer()],
        cache_logger_on_first_use=False,
    )


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared model folder with a byte-level tokenizer and no weights."""
    return write_tokenizer_folder(tmp_path_factory.mktemp("tiny"))


@pytest_asyncio.fixture
async def live(tiny_folder: Path) -> AsyncIterator[LiveServer]:
    """A server without keys over a fake engine that says "Hello!"."""
    async with live_server(tiny_folder, FakeEngineClient()) as server:
        yield server


@pytest_asyncio.fixture
async def house(tiny_folder: Path) -> AsyncIterator[House]:
    """Two tenants, everything in memory; no limit drains, however long a test takes."""
    registry = TenantRegistry(TenantStore(None), pepper=bytes(32), declared=Declared(), monotonic=lambda: 1000.0)
    keys = {}
    for name in ("acme", "beta"):
        await registry.create_tenant(Tenant(name=name))
        keys[name] = (await registry.new_key(name)).text
    async with live_server(tiny_folder, FakeEngineClient(), tenants=registry, admin_key=ADMIN) as live:
        yield House(live, registry, keys)
