"""Drives a real, headless Chromium over the DevTools protocol; only what the page's tests need.

Knows processes, the protocol's framing and a few of its domains; knows nothing of chatserve. Every page records its
requests, its console errors and its content-security-policy violations, so that each test can demand that there are
none. Used by the end-to-end tests and by `docs/page.png`'s maker.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-port=0",
)
BETWEEN_DOCUMENTS = ("context was destroyed", "Cannot find context", "Cannot find default", "navigated or closed")
"""In what the protocol says when a page is evaluated while it loads another document."""
KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, "")}
WATCH_VIOLATIONS = """
window.__violations = [];
document.addEventListener("securitypolicyviolation", (event) => {
  window.__violations.push(event.violatedDirective + " " + event.blockedURI);
});
"""


class Browser:
    """A running Chromium and the one socket to it."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}
        self.reader = asyncio.create_task(self._read())

    async def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """One command and its result."""
        call_id = next(self._ids)
        future = self._calls[call_id] = asyncio.get_running_loop().create_future()
        message = {"id": call_id, "method": method, "params": params}
        await self._socket.send(json.dumps(message if session is None else {**message, "sessionId": session}))
        async with asyncio.timeout(100):
            return await future

    async def _read(self) -> None:
        async for frame in self._socket:
            message = json.loads(frame)
            if "id" in message:
                future = self._calls.pop(message["id"])
                if "error" in message:
                    future.set_exception(RuntimeError(message["error"]["message"]))
                else:
                    future.set_result(message["result"])
            elif (page := self._pages.get(message.get("sessionId", ""))) is not None:
                page.note(message["method"], message["params"])

    async def page(self, url: str, *, width: int = 1100, height: int = 800, dark: bool = False) -> Page:
        """Open an address in a profile of its own and wait until it has loaded."""
        context = (await self.call("Target.createBrowserContext"))["browserContextId"]
        target = await self.call("Target.createTarget", url="about:blank", browserContextId=context)
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        page = self._pages[attached["sessionId"]] = Page(self, attached["sessionId"])
        for domain in ("Page", "Runtime", "Network", "Log"):
            await page.call(f"{domain}.enable")
        await page.call("Page.addScriptToEvaluateOnNewDocument", source=WATCH_VIOLATIONS)
        await page.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await page.call("Emulation.setEmulatedMedia", features=[scheme])
        await page.call("Emulation.setFocusEmulationEnabled", enabled=True)
        await page.call("Page.navigate", url=url)
        await page.wait("location.href !== 'about:blank' && document.readyState === 'complete'")
        return page


class Page:
    """One tab.

    Attributes:
        requests: every URL it asked for, sockets included.
        errors: console errors and exceptions.
    """

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self.requests: list[str] = []
        self.errors: list[str] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        return await self._browser.call(method, self._session, **params)

    def note(self, method: str, params: dict[str, Any]) -> None:
        """Remember an event that a test may ask about."""
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Network.webSocketCreated":
            self.requests.append(params["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(params["exceptionDetails"].get("exception", {}).get("description", "exception"))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])

    async def run(self, expression: str) -> Any:
        """The value of a JavaScript expression (a promise is awaited)."""
        result = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"]["exception"]["description"])
        return result["result"].get("value")

    async def wait(self, expression: str, seconds: float = 60.0) -> Any:
        """Wait until an expression is true; its value. A document that is being replaced answers nothing yet."""
        async with asyncio.timeout(seconds):
            while True:
                try:
                    if value := await self.run(expression):
                        return value
                except RuntimeError as error:
                    if not any(words in str(error) for words in BETWEEN_DOCUMENTS):
                        raise
                await asyncio.sleep(0.02)

    async def text(self, selector: str) -> str:
        """What a reader sees of an element."""
        return str(await self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    async def click(self, selector: str) -> None:
        """A mouse click on the middle of an element."""
        box = await self.run(
            f"(() => {{ const r = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
            " return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    async def type(self, text: str) -> None:
        """Insert text where the focus is."""
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, *, shift: bool = False) -> None:
        """One key stroke."""
        code, text = KEYS[key]
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        await self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    async def resize(self, width: int, height: int, scale: float = 1) -> None:
        """The size of the viewport in CSS pixels."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 500,
        )

    async def screenshot(self) -> bytes:
        """A PNG of the viewport."""
        return base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"])

    async def violations(self) -> list[str]:
        """Content-security-policy violations so far."""
        return list(await self.run("window.__violations"))


def chromium() -> str | None:
    """The browser's path, where there is one."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@asynccontextmanager
async def browser(executable: str) -> AsyncIterator[Browser]:
    """A fresh Chromium with an empty profile, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="chatserve-chromium-", ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            executable,
            *FLAGS,
            f"--user-data-dir={profile}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            port_file = Path(profile) / "DevToolsActivePort"
            async with asyncio.timeout(100):
                while not (port_file.exists() and len(lines := port_file.read_text().splitlines()) == 2):
                    if process.returncode is not None:
                        raise RuntimeError(f"{executable} ended with status {process.returncode} before it was ready")
                    await asyncio.sleep(0.05)
            async with connect(f"ws://127.0.0.1:{lines[0]}{lines[1]}", max_size=None, ping_interval=None) as socket:
                running = Browser(socket)
                try:
                    yield running
                finally:
                    await socket.close()
                    await asyncio.gather(running.reader, return_exceptions=True)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
