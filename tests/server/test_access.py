"""Who gets in: keys, cookies, Host, Origin, CORS; everything not on the short list needs a key."""

from __future__ import annotations

import gc
import itertools
import zlib
from pathlib import Path
from types import FrameType, FunctionType, ModuleType

import pytest

from chatserve.config import ServerConfig
from chatserve.errors import AuthenticationError, ConfigError
from chatserve.server.app import create_app
from chatserve.server.auth import Authenticator
from chatserve.server.middleware import OPEN_PATHS
from chatserve.server.origin import check_bind
from chatserve.tenancy.registry import open_registry
from chatserve.tenancy.tenant import Tenant
from tests.fakes import FakeEngineClient
from tests.line_trace import lines_run
from tests.server.live import HI, LiveServer, Reply, live_server

KEY = "cs_test_0123456789abcdef"
KEYS = ServerConfig(port=0, api_keys=("another", KEY), allowed_origins=("https://app.example",))


@pytest.mark.asyncio
async def test_every_route_but_the_open_ones_needs_a_key(tiny_folder: Path) -> None:
    """Walk the application's own table, and spell its paths in every odd way: 401 without a key, or nothing there."""
    async with live_server(tiny_folder, FakeEngineClient(), server=KEYS) as live:
        app = create_app(live.context)
        files = {route.path for route in app.routes if getattr(route, "name", "") == "file"}
        open_to_all = set()
        for route in app.routes:
            methods = sorted(getattr(route, "methods", None) or {"GET"})
            for method in methods:
                reply = await live.request(method, route.path)  # type: ignore[attr-defined]
                if reply.status != 401:
                    open_to_all.add(route.path)  # type: ignore[attr-defined]
        assert open_to_all == OPEN_PATHS | files
        for path in ("//v1/models", "/V1/models", "/v1%2fmodels", "/v1/models/", "/v1/../v1/models", "/./v1/models",
                     "/v1/models%00", "/nope", "/livez/../v1/models", "/livez/", "/%6cive", "*"):  # fmt: skip
            for method in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE"):
                assert (await live.request(method, path)).status in (400, 401, 404), (method, path)
        assert (await live.get("http://evil.example/v1/models")).status == 401
        for host in ("localhost/livez?", "x/health?", "localhost#", "a@localhost", "localhost:80:80", "localhost:", ""):
            assert (await live.get("/v1/models", Host=host)).status in (400, 403), host


@pytest.mark.asyncio
async def test_bearer_keys(tiny_folder: Path) -> None:
    """Any configured key works; anything else is 401 with OpenAI's code and a WWW-Authenticate header."""
    async with live_server(tiny_folder, FakeEngineClient(), server=KEYS) as live:
        for good in (KEY, "another"):
            assert (await live.get("/v1/models", Authorization=f"Bearer {good}")).status == 200
            assert (await live.get("/v1/models", Authorization=f"bearer  {good} ")).status == 200
        for bad in (
            "",
            "Bearer",
            "Bearer ",
            f"Bearer {KEY}x",
            f"Bearer {KEY[:-1]}",
            f"Basic {KEY}",
            KEY,
            "Bearer \xff",
        ):
            reply = await live.get("/v1/models", Authorization=bad)
            assert (reply.status, reply.error["code"]) == (401, "invalid_api_key"), bad
            assert reply.headers["www-authenticate"] == "Bearer"
            assert KEY not in reply.body.decode()


@pytest.mark.asyncio
async def test_a_wrong_key_costs_the_same_however_much_of_it_is_right(tmp_path: Path) -> None:
    """Near and far guesses run the same lines, and no key is there in plain to compare them with (cases I1).

    What the clock says about it, `scripts/bench tenants` measures.
    """
    registry = open_registry(database=tmp_path / "tenants.db", api_keys=KEYS.api_keys)
    await registry.create_tenant(Tenant(name="acme"))
    stored = (await registry.new_key("acme")).text
    auth = Authenticator(registry)
    addresses = itertools.count(1)

    def guess(key: str) -> list[tuple[str, int]]:
        client = (f"client-{next(addresses)}", 1)  # each its own: none is over the limit
        header = (b"authorization", b"Bearer " + key.encode())

        def attempt() -> None:
            with pytest.raises(AuthenticationError):
                auth.authenticate({"type": "http", "method": "GET", "headers": [header], "client": client})

        return lines_run(attempt)

    def beginning_of_stored(right: int) -> str:
        body = stored[: 16 + right] + ("A" if stored[16 + right] != "A" else "B") * (43 - right)
        return f"{body}_{zlib.crc32(body.encode()):08x}"

    guess(beginning_of_stored(0))  # whatever is done only once is done
    for guesses in (
        [KEY[:right] + "z" * (len(KEY) - right) for right in (3, 8, 9, 16, len(KEY) - 1)],
        [beginning_of_stored(right) for right in (0, 1, 20, 42)],
    ):
        traces = [guess(key) for key in guesses]
        assert len(traces[0]) > 20
        assert all(trace == traces[0] for trace in traces)
    kept = reachable(auth)
    assert stored[3:15] in kept, "the walk found nothing"
    secrets = {KEY, "another", stored}
    assert not secrets & kept
    assert not {secret.encode() for secret in secrets} & kept
    await registry.close()


def reachable(root: object) -> set[object]:
    """Strings and bytes that an object holds, directly or through others; code and modules apart."""
    seen, found, waiting = {id(root)}, set(), [root]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str | bytes):
            found.add(each)
        for child in gc.get_referents(each):
            if id(child) not in seen and not isinstance(child, type | ModuleType | FunctionType | FrameType):
                seen.add(id(child))
                waiting.append(child)
    return found


def cookie_of(reply: Reply) -> str:
    """The session cookie as a browser would send it back, after checking how it was set."""
    value, *attributes = reply.headers["set-cookie"].split("; ")
    assert {"HttpOnly", "Path=/", "SameSite=strict"} <= set(attributes)
    return value


@pytest.mark.asyncio
async def test_page_login(tiny_folder: Path) -> None:
    """The key is exchanged once for an opaque cookie, which works from the page's own origin only and ends at
    logout.
    """
    async with live_server(tiny_folder, FakeEngineClient(), server=KEYS) as live:
        assert (await live.post("/ui/login", {"key": "wrong"})).status == 401
        assert (await live.post("/ui/login", {})).status == 400
        reply = await live.post("/ui/login", {"key": KEY})
        assert reply.status == 204
        cookie = cookie_of(reply)
        assert KEY not in cookie
        own = f"http://127.0.0.1:{live.port}"
        assert (await live.get("/v1/models", Cookie=cookie)).status == 200
        chat = {"messages": HI}
        assert (await live.post("/v1/chat/completions", chat, Cookie=cookie, Origin=own)).status == 200
        assert (await live.post("/v1/chat/completions", chat, Cookie=cookie)).status == 403
        assert (await live.post("/v1/chat/completions", chat, Cookie=cookie, Origin="http://evil")).status == 403
        assert (await live.post("/v1/chat/completions", chat, Cookie=cookie, Origin="null")).status == 403
        assert (await live.get("/v1/models", Cookie="chatserve_session=guess")).status == 401
        assert (await live.get("/v1/models", Cookie="=;; [bad")).status == 401
        assert (await live.post("/ui/logout", b"", Cookie=cookie, Origin=own)).status == 204
        assert (await live.get("/v1/models", Cookie=cookie)).status == 401


@pytest.mark.asyncio
async def test_host_and_origin_on_loopback(live: LiveServer) -> None:
    """Without keys too: a page the user happens to visit can neither rebind a name to us nor send requests."""
    port = live.port
    for host in ("localhost", f"localhost:{port}", "127.0.0.1", f"127.0.0.1:{port}", f"[::1]:{port}", "LOCALHOST"):
        assert (await live.get("/v1/models", Host=host)).status == 200, host
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "10.0.0.1",
    ):
        reply = await live.get("/v1/models", Host=host)
        assert (reply.status, reply.error["code"]) == (403, "host_not_allowed"), host
    for origin in (
        "http://evil.example",
        "null",
        f"https://127.0.0.1:{port}",
        "http://localhost",
        f"http://localhost:{port}",
    ):
        reply = await live.chat_from(origin)
        assert (reply.status, reply.error["code"]) == (403, "origin_not_allowed"), origin
    assert (await live.chat_from(f"http://127.0.0.1:{port}")).status == 200
    assert len(live.engine.submissions) == 1


@pytest.mark.asyncio
async def test_cors_matrix(tiny_folder: Path) -> None:
    """Only configured origins are answered, by name, without credentials; a preflight of others is refused."""
    async with live_server(tiny_folder, FakeEngineClient(), server=KEYS) as live:
        for origin, allowed in (("https://app.example", True), ("https://evil.example", False), ("null", False)):
            preflight = await live.request(
                "OPTIONS",
                "/v1/chat/completions",
                headers={"Origin": origin, "Access-Control-Request-Method": "POST"},
            )
            reply = await live.get("/v1/models", Origin=origin, Authorization=f"Bearer {KEY}")
            for answer in (preflight, reply):
                assert answer.headers.get("access-control-allow-origin") == (origin if allowed else None)
                assert "access-control-allow-credentials" not in answer.headers
            assert (preflight.status, reply.status) == ((204, 200) if allowed else (403, 403))
        same = await live.get("/v1/models", Authorization=f"Bearer {KEY}")
        assert not any(name.startswith("access-control") for name in same.headers)


@pytest.mark.asyncio
async def test_request_ids(live: LiveServer) -> None:
    """A short harmless id is echoed, anything else replaced by our own; engine ids never come from clients."""
    assert (await live.get("/livez", X_Request_Id="my-id.1:x")).headers["x-request-id"] == "my-id.1:x"
    seen = set()
    for odd in ("", "x" * 129, "a b", "a\x7fb", "../x", "é"):
        seen.add((await live.get("/livez", X_Request_Id=odd)).headers["x-request-id"])
    assert len(seen) == 6
    assert all(len(own) == 32 for own in seen)
    one = await live.post("/v1/chat/completions", {"messages": HI}, X_Request_Id="same")
    two = await live.post("/v1/chat/completions", {"messages": HI}, X_Request_Id="same")
    assert one.json["id"] != two.json["id"]
    assert int(one.headers["openai-processing-ms"]) >= 0


def test_only_loopback_without_keys() -> None:
    """Anything but loopback is refused at the start when there are no keys, and the message says what to do."""
    for host in ("127.0.0.1", "localhost", "::1", "127.8.8.8"):
        check_bind(ServerConfig(host=host))
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.com", ""):
        with pytest.raises(ConfigError, match="--api-key"):
            check_bind(ServerConfig(host=host))
        check_bind(ServerConfig(host=host, api_keys=("k",)))


@pytest.mark.asyncio
async def test_wildcard_bind_answers_to_addresses_but_not_to_foreign_names(tiny_folder: Path) -> None:
    """Bound to every address, any address is ours (none can be rebound); names must be allowed."""
    config = ServerConfig(host="0.0.0.0", port=0, api_keys=(KEY,), allowed_hosts=("chat.example", "port.example:8443"))
    async with live_server(tiny_folder, FakeEngineClient(), server=config) as live:
        for host, status in (
            ("10.1.2.3:9", 401), ("[fe80::1]", 401), ("chat.example:80", 401), ("port.example:8443", 401),
            ("port.example:1", 403), ("evil.example", 403),
        ):  # fmt: skip
            assert (await live.get("/v1/models", Host=host)).status == status, host
