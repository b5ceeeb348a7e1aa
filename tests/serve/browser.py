"""A real browser for the page: Debian's Chromium, driven by Playwright."""

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from patience import PATIENCE

NAMES = ("chromium", "chromium-browser", "google-chrome")
# root in a container has no sandbox, and there shared memory may be small
ARGUMENTS = ["--no-sandbox", "--disable-dev-shm-usage"]
MISSING = "NO BROWSER: the page is not tested. Install one (apt-get install chromium) and Playwright (pip install '.[test]')"


def is_there() -> bool:
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return False
    return any(map(shutil.which, NAMES))


needs_browser = pytest.mark.skipif(not is_there(), reason=MISSING)


@contextmanager
def open_browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, NAMES)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()


class Viewer:
    """One person with one browser profile. Whatever goes wrong in the page is remembered, and so is every request it makes."""

    def __init__(self, browser: Any, url: str, path: str = "/", before: str = "", **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.context.set_default_timeout(PATIENCE * 1000)
        self.url = url
        self.errors: list[str] = []
        self.requested: list[str] = []
        self.page = self.context.new_page()
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda message: message.type == "error" and self.errors.append(message.text))
        self.page.on("request", lambda request: self.requested.append(request.url))
        self.page.add_init_script(before)
        self.page.goto(url + path)

    def say(self, text: str) -> None:
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")

    def wait_answered(self) -> None:
        self.page.wait_for_selector("#send:not([hidden])")

    def ask(self, text: str) -> str:
        self.say(text)
        self.wait_answered()
        return str(self.page.locator("#messages > :last-child").inner_text())

    def wait(self, condition: str) -> Any:
        """Until a JavaScript expression holds; its value. Playwright's own way needs eval, which the page forbids."""
        deadline = time.monotonic() + PATIENCE
        while not (value := self.page.evaluate(condition)):
            assert time.monotonic() < deadline, f"it did not come: {condition}"
            self.page.wait_for_timeout(30)
        return value

    def set(self, label: str, value: str) -> None:
        if not self.page.is_visible("#settings"):
            self.page.click("#settingsToggle")
        self.page.get_by_label(label, exact=True).fill(value)

    def answer_with(self, *deltas: Any, finish: str = "stop") -> list[Any]:
        """From now on the model says this. The list takes the bodies that are sent to it."""
        choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
        choices.append({"index": 0, "delta": {}, "finish_reason": finish})
        usage = {"prompt_tokens": 5, "completion_tokens": len(deltas), "total_tokens": 5 + len(deltas)}
        chunks = [{"id": "chatcmpl-1", "choices": [choice], "usage": usage} for choice in choices]
        body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        sent: list[Any] = []

        def fulfil(route: Any) -> None:
            sent.append(route.request.post_data_json)
            route.fulfill(content_type="text/event-stream", body=body)

        self.page.unroute("**/v1/chat/completions")
        self.page.route("**/v1/chat/completions", fulfil)
        return sent

    def close(self) -> None:
        self.context.close()
