"""Who gets in: keys, cookies, Host, Origin, CORS; everything not on the short list needs a key."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from pathlib import Path

import pytest

from chatserve.config import ServerConfig
from chatserve.errors import AuthenticationError, ConfigError
from chatserve.server.app import create_app
from chatserve.server.auth import Authenticator
from chatserve.server.middleware import OPEN_PATHS
from chatserve.server.origin import check_bind
from chatserve.tenancy.registry import open_registry
from tests.fakes import FakeEngineClient
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


def test_key_check_takes_the_same_time_for_near_and_far_keys() -> None:
    """Keys are found by digest: sharing a prefix with a real one tells nothing (median of Welch's t)."""
    auth = Authenticator(open_registry(api_keys=KEYS.api_keys))

    addresses = itertools.count(1)

    def authenticate(key: str) -> None:
        header = (b"authorization", b"Bearer " + key.encode())
        client = (f"client-{next(addresses)}", 1)  # each its own: none is over the limit
        auth.authenticate({"type": "http", "method": "GET", "headers": [header], "client": client})

    # Both look like keys: that a text has another form than ours may show, it tells nothing of any key.
    near, far = KEY[:-1] + "x", "cs_test_" + "f" * 16

    def difference(seed: int) -> float:
        times: dict[str, list[float]] = {near: [], far: []}
        order = [near, far] * 4000
        random.Random(seed).shuffle(order)
        for key in order:
            started = time.perf_counter_ns()
            with pytest.raises(AuthenticationError):
                authenticate(key)
            times[key].append(time.perf_counter_ns() - started)
        (a, b) = (sorted(values)[: len(values) * 9 // 10] for values in times.values())
        spread = (statistics.variance(a) / len(a) + statistics.variance(b) / len(b)) ** 0.5
        return (statistics.mean(a) - statistics.mean(b)) / spread

    # What the machine does meanwhile comes in stretches, and one round alone was seen at 7.0; a
    # difference between the keys is there in every round, and has one sign.
    assert abs(statistics.median(difference(seed) for seed in range(5))) < 4.5


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
