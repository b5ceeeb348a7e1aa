"""The pictures of docs/page.md: the page of a running server, at two sizes, light and dark.

    quire serve smollm2 &
    python scripts/screenshots.py http://127.0.0.1:8000 docs/images

Needs Chromium and Playwright (the extra `test`). Requests run while pictures of the engine are taken:
otherwise there is nothing to see.
"""

import json
import shutil
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

SIZES = {"desktop": (1280, 860), "phone": (390, 844)}
QUESTIONS = ["Write a Python function that merges two sorted lists.", "What is a quire of paper?", "List five rivers."]
ASKED = QUESTIONS[0]
ENGINE_SECONDS = 20  # of work before a picture of the engine


def ask(url: str, question: str, tokens: int) -> None:
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": tokens, "ignore_eos": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    urllib.request.urlopen(request).read()


def keep_busy(url: str, over: threading.Event) -> None:
    def work(number: int) -> None:
        turn = number
        while not over.wait(0.2 * number):
            question = f"{QUESTIONS[turn % len(QUESTIONS)]} Be detailed. " * (1 + turn % 5 * 4)
            ask(url, question, 40 + 50 * (turn % 4))
            turn += 3

    for number in range(6):
        threading.Thread(target=work, args=(number,), daemon=True).start()


def open_page(browser: Any, url: str, size: str, scheme: str) -> Any:
    width, height = SIZES[size]
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, has_touch=size == "phone")
    context.set_default_timeout(300_000)
    page = context.new_page()
    page.goto(url)
    return page


def take_chat(page: Any, path: Path) -> None:
    page.click("#settingsToggle")
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Max tokens").fill("220")
    page.click("#settingsClose")
    page.fill("#prompt", ASKED)
    page.press("#prompt", "Enter")
    page.wait_for_selector(".facts")
    page.screenshot(path=path)


def take_engine(page: Any, path: Path, request: Path | None) -> None:
    page.click("#views a >> nth=1")
    time.sleep(ENGINE_SECONDS)
    page.screenshot(path=path)
    if request is not None:
        page.click("#tabFinished")
        page.click("#requests button >> nth=1")
        page.locator("#requestDialog").screenshot(path=request)


def main() -> None:
    url, where = sys.argv[1].rstrip("/"), Path(sys.argv[2])
    where.mkdir(parents=True, exist_ok=True)
    kinds = [(size, scheme) for size in SIZES for scheme in ("light", "dark")]
    over = threading.Event()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for size, scheme in kinds:  # alone: answers are as fast as they are for one person
            page = open_page(browser, url, size, scheme)
            take_chat(page, where / f"chat-{size}-{scheme}.png")
            page.context.close()
        keep_busy(url, over)
        for size, scheme in kinds:
            page = open_page(browser, url, size, scheme)
            first = (size, scheme) == kinds[0]
            take_engine(page, where / f"engine-{size}-{scheme}.png", where / "request.png" if first else None)
            page.context.close()
        browser.close()
    over.set()


if __name__ == "__main__":
    main()
