"""The chat page in a real browser, against a real server over a scripted engine.

Every test ends with the same demands: no request to another origin, no violation of the content security policy, no
error on the console that the test did not expect.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from chatserve.config import ServerConfig
from tests.e2e.cdp import Browser, Page, browser, chromium
from tests.fakes import MODEL, FakeEngineClient, Script, say, write_tokenizer_folder
from tests.needs import missing
from tests.server.live import LiveServer, live_server
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

READY = f"document.querySelector('#model')?.textContent === '{MODEL}'"
DONE = "[...document.querySelectorAll('.assistant article')].at(-1)?.getAttribute('aria-busy') === 'false'"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chrome() -> AsyncIterator[Browser]:
    """One browser for all tests; each page has a profile of its own."""
    executable = chromium()
    if executable is None:
        missing("chromium is not installed: the page cannot be tested")
    async with browser(executable) as running:
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without a model."""
    return write_tokenizer_folder(tmp_path_factory.mktemp("tiny"))


@asynccontextmanager
async def open_page(chrome: Browser, live: LiveServer, *, errors: str = "", **options: Any) -> AsyncIterator[Page]:
    """The page, ready to type into; ``errors`` is a part of every console error that is expected."""
    page = await chrome.page(live.url, **options)
    yield page
    assert await page.violations() == []
    own = (live.url, live.url.replace("http", "ws"), "data:")
    assert [url for url in page.requests if not url.startswith(own)] == []
    assert [text for text in page.errors if not errors or errors not in text] == []


class PacedEngine(FakeEngineClient):
    """Says no more tokens than ``allowed``; ``None`` is all."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.allowed: int | None = 0

    async def before_step(self, position: int) -> None:
        await eventually(lambda: self.allowed is None or position < self.allowed, 3600)


async def ask(page: Page, text: str) -> None:
    """Type a message and send it with Enter."""
    await page.wait(READY)
    await page.run("document.querySelector('#input').focus()")
    await page.type(text)
    await page.press("Enter")


async def answer(page: Page) -> str:
    """The last answer's text, once what was just done has been drawn and the answer has ended."""
    await page.run("new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
    await page.wait(DONE)
    return str(await page.run("[...document.querySelectorAll('.assistant .body')].at(-1).innerText"))


async def test_a_conversation(chrome: Browser, folder: Path) -> None:
    """An answer appears piece by piece and ends with its cost; the next turn carries on; focus never moves."""
    engine = PacedEngine(say("One two three four five six.", cached_tokens=9))
    async with live_server(folder, engine) as live, open_page(chrome, live) as page:
        await ask(page, "hello 😀")
        for text in ("One", "One two", "One two three", "One two three four"):
            engine.allowed = len(text)
            await page.wait(f"document.querySelector('.assistant .body')?.innerText === '{text}'")
            assert await page.run("document.activeElement.id") == "input"
            assert not await page.run(DONE)
        engine.allowed = None
        assert await answer(page) == "One two three four five six."
        assert await page.text(".user .body") == "hello 😀"
        truth = await page.text(".truth")
        assert "(9 from cache)" in truth
        assert "tok/s" in truth
        assert await page.run("document.querySelector('#input').value") == ""
        assert "Answer: One two" in await page.run("document.querySelector('#status').textContent")
        await ask(page, "more")
        await page.wait("document.querySelectorAll('.message').length === 4")
        await answer(page)
    assert "One two three four five six.<258>" in engine.submissions[1].text


@pytest.mark.parametrize("how", ["Escape", "button"])
async def test_stop_keeps_the_partial_answer(chrome: Browser, folder: Path, how: str) -> None:
    """Esc or the button ends the answer in the engine; its text stays and is what the next turn builds on."""
    engine = FakeEngineClient(say("word " * 20, delay=0.01, hang=True))
    async with live_server(folder, engine) as live, open_page(chrome, live) as page:
        await ask(page, "go")
        await page.wait("document.querySelector('.assistant .body')?.innerText.length > 10")
        await (page.press("Escape") if how == "Escape" else page.click("#stop"))
        text = await answer(page)
        assert 10 < len(text) <= 100
        assert "stopped" in await page.text(".truth")
        await eventually(lambda: engine.submissions[0].aborted)
        engine.script = say("fine")
        await ask(page, "again")
        await page.wait("document.querySelectorAll('.message').length === 4")
        assert await answer(page) == "fine"
    assert text.strip() in engine.submissions[1].text


async def test_new_chat_and_settings(chrome: Browser, folder: Path) -> None:
    """A new chat forgets the old one; a system prompt is part of the chat it begins; the temperature is sent."""
    async with live_server(folder, FakeEngineClient()) as live, open_page(chrome, live) as page:
        await ask(page, "first")
        await answer(page)
        await page.click("#new-chat")
        await page.wait("document.querySelectorAll('.message').length === 0")
        assert await page.text("#empty-title") != ""
        await page.click("#settings-toggle")
        await page.type("Speak softly.")
        await page.run("document.querySelector('#temperature').focus()")
        await page.type("0.3")
        await ask(page, "second")
        await answer(page)
        assert await page.run("document.querySelector('#system').disabled")
    texts = [submission.text for submission in live.engine.submissions]
    assert "first" not in texts[1]
    assert texts[1].startswith("<257>system\nSpeak softly.<258>")
    assert [submission.sampling.temperature for submission in live.engine.submissions] == [1.0, 0.3]


async def test_leaving_a_chat_stops_its_answer(chrome: Browser, folder: Path) -> None:
    """What still runs for a chat that was left is cancelled and never appears in the new one."""
    engine = FakeEngineClient(say("old " * 20, delay=0.01, hang=True))
    async with live_server(folder, engine) as live, open_page(chrome, live) as page:
        await ask(page, "go")
        await page.wait("document.querySelector('.assistant .body')?.innerText.length > 3")
        await page.click("#new-chat")
        await eventually(lambda: engine.submissions[0].aborted)
        engine.script = say("new")
        await ask(page, "fresh")
        assert await answer(page) == "new"
        assert "old" not in await page.text("#messages")


async def test_errors_are_shown_and_can_be_retried(chrome: Browser, folder: Path) -> None:
    """A refusal and a failure in the middle both say why, keep what came, and can be tried again."""
    engine = FakeEngineClient()
    async with live_server(folder, engine) as live, open_page(chrome, live) as page:
        await page.wait(READY)
        engine.set_ready(False)
        await ask(page, "hello")
        await page.wait("document.querySelector('.failure:not([hidden])') !== null")
        assert "loading" in await page.text(".failure")
        engine.set_ready(True)
        engine.script = say("half of it", hang=True)
        await page.click(".failure button")
        await page.wait("document.querySelector('.assistant .body')?.innerText === 'half of it'")
        engine.die(ready_again=True)
        await page.wait("document.querySelector('.failure:not([hidden])') !== null")
        assert await page.text(".assistant .body") == "half of it"
        engine.script = say("all of it")
        await page.click(".failure button")
        assert await answer(page) == "all of it"
        assert await page.run("document.querySelectorAll('.message').length") == 2
    assert "half" not in engine.submissions[1].text
    assert engine.submissions[1].text.count("hello") == 1


async def test_a_message_that_is_too_long(chrome: Browser, folder: Path) -> None:
    """What the server would close the connection for is not sent: the reader is told, and keeps text and connection."""
    engine = FakeEngineClient(say("fine"))
    async with live_server(folder, engine) as live, open_page(chrome, live) as page:
        await page.wait(READY)
        await page.run("{ const i = document.querySelector('#input'); i.value = 'ä'.repeat(140_000); i.focus(); }")
        await page.press("Enter")
        await page.wait("document.querySelector('#notice:not([hidden])')?.innerText.includes('too long')")
        assert await page.run("document.querySelector('#input').value.length") == 140_000
        await page.run("{ document.querySelector('#input').value = ''; }")
        await ask(page, "short")
        assert await answer(page) == "fine"
    assert len(engine.submissions) == 1


async def test_connection_lost_and_found(chrome: Browser, folder: Path) -> None:
    """A dead server is noticed and said; when one is back the page reconnects by itself and says what was forgotten."""
    engine = FakeEngineClient(say("par", hang=True))
    async with live_server(folder, engine) as live:
        page = await chrome.page(live.url)
        await ask(page, "hello")
        await page.wait("document.querySelector('.assistant .body')?.innerText === 'par'")
    await page.wait("document.querySelector('#notice').innerText.includes('Reconnecting')")
    assert await page.text(".assistant .body") == "par"
    assert await page.run("document.querySelector('#send').disabled")
    server = ServerConfig(port=live.port, drain_timeout=2.0)
    async with live_server(folder, FakeEngineClient(say("again")), server=server) as live:
        await page.wait("document.querySelector('#notice').innerText.includes('forgotten')")
        await ask(page, "new")
        await page.wait("document.querySelectorAll('.message').length === 4")
        assert await answer(page) == "again"
        rows = "[...document.querySelectorAll('#messages > li')].map((row) => row.classList[0])"
        assert await page.run(rows) == ["message", "message", "divider", "message", "message"]
    assert await page.violations() == []


async def test_a_reload_keeps_the_chat(chrome: Browser, folder: Path) -> None:
    """The text is there again, and the next message carries on the same conversation."""
    engine = FakeEngineClient(say("first"))
    async with live_server(folder, engine) as live, open_page(chrome, live) as page:
        await ask(page, "one")
        assert await answer(page) == "first"
        await page.run("window.before = true")
        await page.run("void setTimeout(() => location.reload())")
        await page.wait("window.before === undefined && document.querySelectorAll('.message').length === 2")
        assert await page.text(".assistant .body") == "first"
        engine.script = say("second")
        await ask(page, "two")
        await page.wait("document.querySelectorAll('.message').length === 4")
        assert await answer(page) == "second"
        await page.click("#new-chat")
        await page.run("window.before = true")
        await page.run("void setTimeout(() => location.reload())")
        await page.wait("window.before === undefined")
        await page.wait(READY)
        assert await page.run("document.querySelectorAll('.message').length") == 0
    assert "one" in engine.submissions[1].text
    assert "first" in engine.submissions[1].text


async def test_a_dropped_connection_in_the_middle_of_an_answer(chrome: Browser, folder: Path) -> None:
    """The answer visibly ends, the page reconnects without being asked, and the conversation goes on where it was."""
    engine = FakeEngineClient(say("first"))
    async with live_server(folder, engine) as live, open_page(chrome, live) as page:
        await ask(page, "one")
        await answer(page)
        engine.script = say("par", hang=True)
        await ask(page, "two")
        await page.wait("[...document.querySelectorAll('.assistant .body')].at(-1).innerText === 'par'")
        for connection in list(live.server.server_state.connections):
            connection.transport.abort()
        await page.wait("document.querySelector('.failure:not([hidden])')?.innerText.includes('connection was lost')")
        await eventually(lambda: engine.submissions[1].aborted)
        await page.wait("document.querySelector('#notice').hidden")
        engine.script = say("second")
        await page.click(".message:last-child .failure button")
        assert await answer(page) == "second"
        assert await page.run("document.querySelectorAll('.message').length") == 4
    assert engine.submissions[2].text == engine.submissions[1].text


async def test_login(chrome: Browser, folder: Path) -> None:
    """With keys the page asks once; the key ends up in no place that a script can read."""
    server = ServerConfig(port=0, drain_timeout=2.0, api_keys=("sk-right",))
    async with (
        live_server(folder, FakeEngineClient(), server=server) as live,
        open_page(chrome, live, errors="401") as page,
    ):
        await page.wait("document.querySelector('#login').open")
        await page.type("sk-wrong")
        await page.press("Enter")
        await page.wait("document.querySelector('#login-error').textContent !== ''")
        await page.run("document.querySelector('#key').select()")
        await page.type("sk-right")
        await page.press("Enter")
        await page.wait("!document.querySelector('#login').open")
        await ask(page, "hi")
        assert await answer(page) == "Hello!"
        secrets = "document.cookie + JSON.stringify(localStorage) + JSON.stringify(sessionStorage) + location.href"
        assert "sk-" not in await page.run(secrets)
        assert await page.run("document.cookie") == ""


HOSTILE = """\
<script>window.pwned = 1</script>
<img src=x onerror="window.pwned=2"><svg/onload=window.pwned=3>
<iframe srcdoc="<script>parent.pwned=4</script>"></iframe><math><mi xlink:href="javascript:window.pwned=5">x</mi></math>
[click](javascript:window.pwned=6) [data](data:text/html,<script>window.pwned=7</script>) [vb](vbscript:x)
![beacon](http://evil.example/steal.png?q=1) ![x](javascript:window.pwned=8)
<a href="javascript:window.pwned=9">a</a> <form action="http://evil.example"><button>b</button></form>
[a"onmouseover="window.pwned=10](https://ok.example/"onmouseover="window.pwned=11)
<style>@import url(http://evil.example/x.css);</style><link rel=stylesheet href=http://evil.example/y.css>
```html "onload="window.pwned=12
</code></pre><script>window.pwned=13</script>
```
<noscript><p title="</noscript><img src=x onerror=window.pwned=14>">{{constructor.constructor('window.pwned=15')()}}
https://ok.example/<script>window.pwned=16</script>"""


SHOWN_TAGS = {
    *("li", "article", "div", "p", "i", "a", "br", "code", "pre", "span", "button"),
    *("em", "strong", "blockquote", "ul", "ol", "hr"),
}


async def test_hostile_text_is_text(chrome: Browser, folder: Path) -> None:
    """Markup in answers and questions runs nothing, loads nothing, and is shown as it was written."""
    async with (
        live_server(folder, FakeEngineClient(say(HOSTILE))) as live,
        open_page(chrome, live, width=900) as page,
    ):
        await page.wait(READY)
        await page.type(HOSTILE)
        await page.press("Enter")
        await answer(page)
        assert await page.run("window.pwned") is None
        tags = await page.run("[...document.querySelectorAll('#messages *')].map((e) => e.localName)")
        assert set(tags) <= SHOWN_TAGS
        links = await page.run("[...document.querySelectorAll('#messages a')].map((a) => [a.href, a.rel, a.target])")
        assert links
        for href, rel, target in links:
            assert href.startswith(("https://ok.example/", "http://evil.example/")), href
            assert (rel, target) == ("noopener noreferrer", "_blank")
        assert "<script>window.pwned = 1</script>" in await page.text(".assistant .body")
        handlers = "[...document.querySelectorAll('#messages *')].flatMap((e) => [...e.attributes]).map((a) => a.name)"
        assert not [name for name in await page.run(handlers) if name.startswith("on") or name == "style"]


async def test_the_policy_is_enforced(chrome: Browser, folder: Path) -> None:
    """The browser itself refuses HTML strings and inline scripts on this page, should a later change try."""
    async with live_server(folder, FakeEngineClient()) as live:
        page = await chrome.page(live.url)
        await page.wait(READY)
        with pytest.raises(RuntimeError, match="TrustedHTML"):
            await page.run("document.querySelector('#empty').innerHTML = '<b>x</b>'")
        await page.run("document.querySelector('#empty').setAttribute('style', 'color: red')")
        assert any("style-src" in violation for violation in await page.violations())


async def test_narrow_screen(chrome: Browser, folder: Path) -> None:
    """At 360 px nothing is wider than the screen, whatever the answer holds, and targets are big enough for a thumb."""
    wide = "x" * 300 + "\n\n```\n" + "y" * 300 + "\n```\n\n- " + "z" * 200 + "\n\nhttps://example.org/" + "w" * 200
    async with (
        live_server(folder, FakeEngineClient(say(wide))) as live,
        open_page(chrome, live, width=360, height=640) as page,
    ):
        await ask(page, "m" * 200)
        await answer(page)
        assert await page.run("document.documentElement.scrollWidth") <= 360
        assert await page.run(
            "document.querySelector('#scroll').scrollWidth <= document.querySelector('#scroll').clientWidth"
        )
        sizes = (
            "['#send', '#new-chat', '#settings-toggle'].map((s) => document.querySelector(s).getBoundingClientRect())"
        )
        assert min(await page.run(f"{sizes}.map((r) => Math.min(r.height, r.width))")) >= 40


AT_BOTTOM = """
((s) => s.scrollHeight - s.scrollTop - s.clientHeight < 50)(document.querySelector("#scroll"))
"""


async def test_scrolling_follows_only_at_the_bottom(chrome: Browser, folder: Path) -> None:
    """A reader who scrolled up is left alone while text arrives, and one press brings the end back."""
    engine = PacedEngine(say("".join(f"line {n}\n\n" for n in range(160))))
    async with live_server(folder, engine) as live, open_page(chrome, live, height=500) as page:
        engine.allowed = 700
        await ask(page, "go")
        await page.wait("document.querySelector('#scroll').scrollHeight > 1200")
        assert await page.wait(AT_BOTTOM)
        await page.run("document.querySelector('#scroll').scrollTop = 100")
        await page.wait("!document.querySelector('#latest').hidden")
        height = await page.run("document.querySelector('#scroll').scrollHeight")
        engine.allowed = 1000
        await page.wait(f"document.querySelector('#scroll').scrollHeight > {height}")
        assert await page.run("document.querySelector('#scroll').scrollTop") == 100
        await page.click("#latest")
        await page.wait(f"{AT_BOTTOM.strip()} && document.querySelector('#latest').hidden")
        engine.allowed = None
        await answer(page)
        assert await page.run(AT_BOTTOM)


async def test_everything_has_a_name(chrome: Browser, folder: Path) -> None:
    """Assistive technology finds a name on every control, a status region, and the answer outside any live region."""
    async with (
        live_server(folder, FakeEngineClient(say("```py\nx\n```\n[l](https://example.org)"))) as live,
        open_page(chrome, live) as page,
    ):
        await ask(page, "hi")
        await answer(page)
        await page.click("#settings-toggle")
        nodes = (await page.call("Accessibility.getFullAXTree"))["nodes"]
        shown = [node for node in nodes if not node.get("ignored")]
        roles = {node["role"]["value"] for node in shown}
        assert {"main", "heading", "textbox", "button", "article", "status", "list"} <= roles
        unnamed = [
            node["role"]["value"]
            for node in shown
            if node["role"]["value"] in ("button", "textbox", "spinbutton", "link", "article")
            and not node.get("name", {}).get("value")
        ]
        assert unnamed == []
        assert (
            await page.run("document.querySelector('#messages').closest('[aria-live], [role=log], [role=status]')")
            is None
        )


async def test_keyboard_alone(chrome: Browser, folder: Path) -> None:
    """Shift+Enter makes a new line, Enter sends, and Tab reaches every control with a visible focus."""
    async with live_server(folder, FakeEngineClient()) as live, open_page(chrome, live) as page:
        await page.wait(READY)
        await page.type("one")
        await page.press("Enter", shift=True)
        await page.type("two")
        assert json.loads(await page.run("JSON.stringify(document.querySelector('#input').value)")) == "one\ntwo"
        await page.press("Enter")
        assert await answer(page) == "Hello!"
        assert await page.text(".user .body") == "one\ntwo"
        reached = set()
        for _ in range(12):
            await page.press("Tab")
            reached.add(await page.run("document.activeElement.id"))
        assert {"settings-toggle", "new-chat", "input"} <= reached
