"""The page at `/` in a real browser: the engine at work, keys, and a server that goes and comes back."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from browser import Viewer, needs_browser, open_browser
from server_process import ServerProcess, serving

from tiny_model import make_model

pytestmark = needs_browser
ENDLESS = '{"ignore_eos": true, "temperature": 0}'
LIVE = "feed.state === 'live'"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("page"), max_position_embeddings=4096)


@pytest.fixture(scope="module")
def keyed(model: Path) -> Iterator[ServerProcess]:
    with serving(model, "--api-key", "key-one", "key-two") as process:
        process.url()
        yield process


def give_key(viewer: Viewer, key: str) -> None:
    viewer.page.wait_for_selector("#keyDialog[open]")
    viewer.page.fill("#key", key)
    viewer.page.press("#key", "Enter")


def test_keys_and_what_each_sees(browser: Any, keyed: ServerProcess) -> None:
    one, two = Viewer(browser, keyed.url()), Viewer(browser, keyed.url(), "/#engine")
    assert "tiny" not in one.page.inner_text("body")  # open to all, and empty
    give_key(one, "wrong")
    one.wait("document.querySelector('#keyNote').textContent.includes('does not know')")
    give_key(one, "key-one")
    give_key(two, "key-two")
    one.wait(LIVE)
    two.wait(LIVE)
    one.set("Anything else", ENDLESS)
    one.say("secret words")
    one.wait("feed.queue.running === 1 && [...feed.requests.values()].some((r) => r.state === 'decode')")
    two.wait("feed.queue.running === 1")  # how many is told, which is not
    two.wait("feed.map.includes('x')")
    assert two.page.evaluate("feed.requests.size") == 0 and not two.page.evaluate("feed.map.some((c) => c === 'o')")
    assert "secret" not in two.page.content() and "chatcmpl" not in two.page.content()
    one.page.keyboard.press("Escape")
    one.wait_answered()
    two.wait("feed.queue.running === 0")
    assert "key-one" not in one.page.evaluate("JSON.stringify(localStorage)")  # the key is the tab's
    one.page.click("#export")
    assert "$QUIRE_API_KEY" in one.page.inner_text("#exportText") and "key-one" not in one.page.inner_text("#exportText")
    one.close()
    two.close()


def test_the_engine_at_work(browser: Any, model: Path) -> None:
    with serving(model) as server:
        viewer = Viewer(browser, server.url())
        page = viewer.page
        viewer.wait(LIVE)
        viewer.set("Anything else", ENDLESS)
        viewer.say("the quick brown fox jumps over the lazy dog " * 20)
        page.click("#views a:has-text('Engine')")
        page.wait_for_selector("#requests button")
        viewer.wait("view.tiles.running.textContent.startsWith('1 /')")
        viewer.wait("document.querySelector('#requests .state').textContent === 'decode'")
        viewer.wait("feed.map.filter((c) => c === 'o').length > 3")
        viewer.wait("feed.steps.length > 10 && feed.steps.some((step) => step.prompt > 100)")
        page.click("#requests button")
        viewer.wait("document.querySelector('#requestParts').textContent.includes('under way')")
        page.keyboard.press("Escape")
        engine = server.engine_pid()
        os.kill(engine, signal.SIGKILL)  # the answer goes on with the next one
        viewer.wait("feed.engine.restarts === 1 && feed.engine.state === 'ready'")
        viewer.wait(f"feed.engine.pid !== {engine}")
        assert "restart" in page.inner_text("#log")
        drawn = page.evaluate("[...feed.requests.values()][0].drawn")
        viewer.wait(f"[...feed.requests.values()][0].drawn > {drawn}")
        page.click("#views a:has-text('Chat')")
        page.keyboard.press("Escape")
        viewer.wait_answered()

        viewer.set("Most tokens", "7")
        viewer.ask("again")
        page.click(".facts >> nth=-1")  # how was it made?
        page.wait_for_selector("#requestDialog[open]")
        viewer.wait("document.querySelector('#requestFacts').textContent.includes('finished: length')")
        told = page.evaluate("feed.requests.get(view.chosen)")
        assert told["drawn"] == 7 and abs(sum(told["parts"].values()) - told["wall"]) < 1e-3
        rows = page.locator("#requestParts tr").all_inner_texts()
        shares = [float(found[1]) for row in rows if (found := re.search(r"([\d.]+) %", row))]
        assert rows[-1].startswith("wall") and shares[-1] == 100 and abs(sum(shares[:-1]) - 100) < 0.05 * len(rows)
        page.keyboard.press("Escape")
        agrees_with_metrics(viewer, server)
        assert not viewer.errors
        viewer.close()


def agrees_with_metrics(viewer: Viewer, server: ServerProcess) -> None:
    viewer.wait("feed.queue.running === 0")
    viewer.page.wait_for_timeout(1200)  # the last `stats` is out
    metrics = httpx.get(f"{server.url()}/metrics").text

    def metric(name: str) -> float:
        return sum(float(line.rsplit(" ", 1)[1]) for line in metrics.splitlines() if re.match(rf"quire:{name}\{{", line))

    stats = viewer.page.evaluate("feed.stats")
    assert stats["generated_tokens"] == metric("generation_tokens_total") > 7
    assert stats["prompt_tokens"] == metric("prompt_tokens_total") > 0
    assert sum(stats["ttft"]) == metric("time_to_first_token_seconds_count")
    assert sum(stats["finished"].values()) == metric("request_success_total")
    assert stats["used_pages"] == 0 == viewer.page.evaluate("feed.pool.used")
    shown = viewer.page.inner_text("#activity")
    assert f"tokens generated\n{stats['generated_tokens']}" in shown and "1 restarts" in shown


def test_a_server_that_comes_back_is_connected_to_again(browser: Any, model: Path, keyed: ServerProcess) -> None:
    viewer = Viewer(browser, keyed.url())
    give_key(viewer, "key-two")
    viewer.wait(LIVE)
    port = keyed.url().rsplit(":", 1)[1]
    keyed.process.kill()
    keyed.wait()
    viewer.wait("feed.state === 'lost' && document.querySelector('#pulseText').textContent === 'no connection'")
    assert "connection was lost" in viewer.ask("anybody?")
    with serving(model, "--api-key", "key-two", "--port", port) as back:
        back.url()
        viewer.wait(LIVE)
        viewer.set("Most tokens", "3")
        viewer.page.click("[title=Regenerate]")
        viewer.wait_answered()
        assert "3 tokens" in viewer.page.inner_text(".facts")
    viewer.close()
