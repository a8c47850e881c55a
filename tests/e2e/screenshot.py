"""Makes `docs/page.png`: a real conversation with a running server, photographed.

Not a test. ``python -m tests.e2e.screenshot URL FILE QUESTION...`` asks each question with temperature 0, waits for the
answers and writes the picture.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.e2e.cdp import browser, chromium

ANSWERED = "[...document.querySelectorAll('.truth')].filter((line) => line.textContent.includes('tok/s')).length"


async def photograph(url: str, questions: list[str], *, dark: bool = False) -> bytes:
    """The page as a PNG after every question was answered."""
    executable = chromium()
    if executable is None:
        raise SystemExit("chromium is not installed")
    async with browser(executable) as running:
        page = await running.page(url, width=1100, height=820, dark=dark)
        await page.wait("document.querySelector('#model').textContent !== ''")
        await page.run("document.querySelector('#temperature').value = '0'")
        for number, question in enumerate(questions, start=1):
            await page.run("document.querySelector('#input').focus()")
            await page.type(question)
            await page.press("Enter")
            await page.wait(f"{ANSWERED} === {number}", seconds=300)
        return await page.screenshot()


if __name__ == "__main__":
    Path(sys.argv[2]).write_bytes(asyncio.run(photograph(sys.argv[1], sys.argv[3:])))
