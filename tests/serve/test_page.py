"""The page at `/` in a real browser: conversations, the engine at work, keys, and a server that goes and comes back."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from browser import Viewer, needs_browser, open_browser
from server_process import ServerProcess, serving

from patience import PATIENCE
from tiny_model import make_model

pytestmark = needs_browser
WAITING = 1000 * PATIENCE  # milliseconds; a page that works needs a second or two, one that looks again and again, more
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
def server(model: Path) -> Iterator[ServerProcess]:
    with serving(model) as process:
        process.url()
        yield process


@pytest.fixture(scope="module")
def keyed(model: Path, server: ServerProcess) -> Iterator[ServerProcess]:
    with serving(model, "--api-key", "key-one", "key-two") as process:
        process.url()
        yield process


@pytest.fixture
def viewer(browser: Any, server: ServerProcess) -> Iterator[Viewer]:
    """Nothing may go wrong in the page, and nothing may be asked of anybody but the server."""
    opened = Viewer(browser, server.url())
    opened.wait("document.querySelector('#model').value === 'tiny'")
    yield opened
    assert not opened.errors
    assert all(url.startswith((opened.url, "data:")) for url in opened.requested)
    opened.close()


def test_a_chat_streams_stops_and_is_made_again(viewer: Viewer, server: ServerProcess) -> None:
    page = viewer.page
    viewer.set("Other request fields", ENDLESS)
    viewer.say("the quick brown fox")
    page.wait_for_selector("#stop:not([hidden])")
    first = viewer.wait("document.querySelector('.turn > .markdown').textContent")
    viewer.wait(f"document.querySelector('.turn > .markdown').textContent.length > {len(first) + 20}")  # it goes on
    page.keyboard.press("Escape")
    viewer.wait_answered()
    assert "stopped" in page.inner_text("#messages .facts, #messages footer >> nth=-1")
    wait_idle(server)  # the server was told
    assert page.input_value("#prompt") == "" and page.is_disabled("#send")

    viewer.set("Max tokens", "12")
    page.click("[title=Regenerate]")
    viewer.wait_answered()
    assert "12 tokens" in page.inner_text(".facts") and "stopped at max tokens" in page.inner_text(".facts")
    assert "2 / 2" in page.inner_text("#messages footer >> nth=-1")
    said = page.inner_text(".turn > .markdown >> nth=-1")
    page.click("[title='Previous version']")
    assert "1 / 2" in page.inner_text("#messages footer >> nth=-1")
    assert page.inner_text(".turn > .markdown >> nth=-1").startswith(said[:5])  # greedy: the same beginning

    viewer.set("Max tokens", "")
    viewer.say("and now")
    page.wait_for_selector("#stop:not([hidden])")
    page.once("dialog", lambda dialog: dialog.accept())
    page.click("#chatList .current [title^=Delete]")  # deleted while it is being written
    viewer.wait_answered()
    wait_idle(server)
    assert page.locator("#chatList li").count() == 0 and page.is_visible("#welcome")


def test_editing_the_last_message_asks_again(viewer: Viewer) -> None:
    sent = viewer.answer_with({"content": "Good."})
    viewer.ask("first question")
    viewer.ask("second question")
    viewer.page.press("#prompt", "ArrowUp")
    viewer.page.fill(".edit textarea", "another question")
    viewer.page.press(".edit textarea", "Enter")
    viewer.wait_answered()
    assert [message["content"] for message in sent[-1]["messages"]] == ["first question", "Good.", "another question"]
    assert "second question" not in viewer.page.inner_text("#messages")


def test_conversations_are_kept_and_settings_are_sent(viewer: Viewer) -> None:
    page = viewer.page
    sent = viewer.answer_with({"content": "Yes."})
    viewer.set("System prompt", "You are a page.")
    viewer.set("Temperature", "0.25")
    viewer.set("Stop sequences", "END\nFIN")
    viewer.set("Other request fields", '{"min_tokens": 3}')
    viewer.ask("about apples")
    body = sent[0]
    assert body["messages"][0] == {"role": "system", "content": "You are a page."}
    assert (body["temperature"], body["stop"], body["min_tokens"]) == (0.25, ["END", "FIN"], 3)
    assert "top_p" not in body and "seed" not in body  # the model's own defaults
    page.keyboard.press("Alt+n")
    viewer.ask("about pears")
    page.reload()
    viewer.wait("document.querySelectorAll('#chatList li').length === 2")
    assert "about pears" in page.inner_text("#messages")
    page.click("#chatList button:has-text('about apples')")
    assert "about apples" in page.inner_text("#messages") and "Yes." in page.inner_text("#messages")
    page.once("dialog", lambda dialog: dialog.accept())
    page.click("#chatList .current [title^=Delete]")
    viewer.wait("document.querySelectorAll('#chatList li').length === 1")
    page.reload()
    viewer.wait("document.querySelectorAll('#chatList li').length === 1")


def test_markdown_code_reasoning_and_tools_are_shown(viewer: Viewer) -> None:
    page = viewer.page
    text = "# Title\n\nSome **bold**, *em*, `code`.\n\n- one\n  - two\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n\n"
    text += "```python\nx = 'y'  # why\n```\n"
    call = {"index": 0, "id": "call_1", "function": {"name": "weather", "arguments": '{"city": "Ghent"}'}}
    thought = [{"reasoning": "Let me think. "}, {"reasoning": "Done."}]
    viewer.answer_with(*thought, *({"content": piece} for piece in text), {"tool_calls": [call]}, finish="tool_calls")
    viewer.ask("go")
    shown = page.locator("#messages .turn").last
    assert not shown.locator("details").evaluate("node => node.open")
    shown.locator("summary").click()
    assert "Let me think. Done." in shown.inner_text()
    body = shown.locator(".markdown").nth(1)
    for inside in ("h3", "strong", "em", "p > code", "ul ul li", "th", "td", "pre .c-string", "pre .c-comment"):
        assert body.locator(inside).count() >= 1, inside
    assert body.locator("pre").inner_text() == "x = 'y'  # why"
    assert page.inner_text(".call header") == "weather" and '"city": "Ghent"' in page.inner_text(".call pre")

    sent = viewer.answer_with({"content": "It rains."})
    page.fill(".results textarea", "rain")
    page.click(".results button")
    viewer.wait_answered()
    assert "It rains." in page.inner_text("#messages")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click("figure:has-text('why') [title=Copy]")
    assert page.evaluate("navigator.clipboard.readText()") == "x = 'y'  # why"
    asked = sent[0]["messages"]
    assert asked[1]["tool_calls"][0]["function"]["name"] == "weather"
    assert asked[2] == {"role": "tool", "tool_call_id": "call_1", "content": "rain"}


HOSTILE = {
    "script": "<script>window.pwned = 1</script><img src=x onerror='window.pwned = 1'><svg onload='window.pwned = 1'>",
    "raw": "<iframe srcdoc='<script>parent.pwned = 1</script>'></iframe><style>body { display: none }</style>"
    "<base href=//evil.test><object data=x></object>",
    "links": "[a](javascript:window.pwned=1) [b](JaVaScRiPt:window.pwned=1) [c](data:text/html,<script>) [d](vbscript:x) "
    "[e](\x01javascript:window.pwned=1) [f]( java\nscript:window.pwned=1) <javascript:window.pwned=1> [ok](https://example.org/)",
    "images": "![x](https://evil.test/pixel.png) ![y](javascript:window.pwned=1) [![z](https://evil.test/p.png)](javascript:1)",
    "quotes": ">" * 30_000 + "\n" + "\n".join("> " * n + "x" for n in range(200)),
    "lists": "\n".join(" " * n + "- x" for n in range(2000)),
    "brackets": "[" * 60_000 + "](" * 20_000,
    "stars": "*a **b " * 15_000 + "_" * 10_000 + "`" * 10_001,
    "emphasis": "***" * 20_000 + "x",
    "table": "|a" * 900 + "\n" + "|-" * 900 + "\n" + ("|b" * 900 + "\n") * 50,
    "fences": "```\n" * 20_000,
    "rules": "- " * 900 + "x\n" + "* " * 900 + "x\n",
    "line": "x" * 1_000_000,
    "words": "lorem ipsum " * 20_000,
    "lines": "a\n" * 100_000,
    "code": "```js\n" + "/*" * 300_000,
    "strings": "```py\n" + "'\\" * 9_000 + '"""' * 500,
    "dollars": "$" * 60_000 + "$x " * 5_000,
    "formulas": "$$"
    + "\\frac{" * 500
    + "$$\n"
    + "\\[\n" * 10_000
    + "$"
    + "\\hat" * 900
    + "x$\n$"
    + "{" * 1_900
    + "}" * 1_900
    + "$",
    "matrices": "$$\\begin{matrix}" + "&" * 3_000 + "\\end{matrix}$$ $" + "x_" * 1_500 + "x$ $" + "a'" * 1_500 + "$",
    "unicode": "\u202e\u2066\ud83d\ude00\u0301" * 5_000,
}


def test_hostile_answers_run_nothing_and_do_not_freeze_the_page(viewer: Viewer) -> None:
    page = viewer.page
    page.evaluate("setInterval(() => { window.beats = (window.beats || 0) + 1; }, 20)")
    for name, text in HOSTILE.items():
        pieces = [text[at : at + 1 + len(text) // 40] for at in range(0, len(text), 1 + len(text) // 40)]
        viewer.answer_with(*({"content": piece, "reasoning": piece[:100]} for piece in pieces))
        viewer.say(f"{name}: {text[:2000]}")
        page.wait_for_selector("#send:not([hidden])", timeout=WAITING)
        beats = page.evaluate("window.beats")
        viewer.wait(f"window.beats > {beats}")
        assert page.evaluate("window.pwned") is None, name
        assert page.locator("#messages :is(script, img, iframe, style, base, object, embed, link)").count() == 0, name
        shown = "[...document.querySelectorAll('.turn > .markdown')].at(-1).textContent.length"
        assert page.evaluate(shown) >= min(len(text) // 40, 100), name
        page.keyboard.press("Alt+n")
    page.click("#chatList button:has-text('links:')")
    links = page.locator(".turn > .markdown a").evaluate_all("all => all.map((a) => [a.protocol, a.rel])")
    assert links and all(protocol == "https:" and "noopener" in rel for protocol, rel in links)
    page.reload()  # what was kept is shown again
    viewer.wait("document.querySelectorAll('#messages .turn').length === 2")
    assert page.evaluate("window.pwned") is None


def test_a_browser_that_keeps_nothing(browser: Any, server: ServerProcess) -> None:
    refused = "get() { throw new DOMException('no', 'SecurityError'); }"
    names = "localStorage", "sessionStorage"
    viewer = Viewer(
        browser, server.url(), before=";".join(f"Object.defineProperty(window, '{name}', {{ {refused} }})" for name in names)
    )
    viewer.wait("document.querySelector('#model').value === 'tiny'")
    viewer.answer_with({"content": "as long as it is open"})
    assert "as long as it is open" in viewer.ask("do you keep this?")
    assert viewer.page.locator("#chatList > *").count() == 1
    assert not viewer.errors
    viewer.close()


def test_html_cannot_be_made_in_the_page_at_all(viewer: Viewer) -> None:
    page = viewer.page
    assert page.evaluate("() => { try { document.body.innerHTML = '<b>x</b>'; } catch (e) { return e.name; } }") == "TypeError"
    script = "const s = document.createElement('script'); s.append('window.pwned = 1'); document.body.append(s);"
    page.evaluate(f"() => {{ {script} }}")
    assert page.evaluate("window.pwned") is None
    assert page.evaluate("fetch('https://evil.test/').catch((e) => e.name)") == "TypeError"
    assert len(viewer.errors) >= 3, viewer.errors  # the policy said so
    viewer.errors.clear()


def test_exports_do_what_the_page_did(viewer: Viewer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = viewer.page
    viewer.answer_with({"content": "Fine."})
    viewer.set("System prompt", 'It\'s a "page"\\ of\n\ttext: $HOME `x` 漢字 😀')
    viewer.set("Temperature", "0")
    viewer.set("Max tokens", "4")
    viewer.set("Min p", "0.1")
    viewer.set("Other request fields", '{"ignore_eos": true, "logprobs": false}')
    viewer.ask("what's up?")
    page.click("#export")
    stand_in = tmp_path / "curl"
    stand_in.write_text('#!/bin/sh\nfor a in "$@"; do printf "%s\\0" "$a"; done\n')
    stand_in.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    out = subprocess.run(["sh", "-c", page.inner_text("#exportText")], env=environment, capture_output=True, check=True).stdout
    address, *options = out.decode().rstrip("\0").split("\0")
    body = json.loads(options[options.index("-d") + 1])
    assert body["messages"] == [
        {"role": "system", "content": 'It\'s a "page"\\ of\n\ttext: $HOME `x` 漢字 😀'},
        {"role": "user", "content": "what's up?"},
    ]
    answer = httpx.post(address, json=body, timeout=PATIENCE).json()
    assert answer["usage"]["completion_tokens"] == 4
    page.click("#exportKinds button:has-text('Python')")
    made: dict[str, Any] = {}
    completions = SimpleNamespace(create=lambda **given: made.update(given) or openai_answer)
    openai_answer = SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content="Fine."))])
    openai = SimpleNamespace(
        OpenAI=lambda **given: made.update(given) or SimpleNamespace(chat=SimpleNamespace(completions=completions))
    )
    monkeypatch.setitem(sys.modules, "openai", openai)  # the client itself is tested elsewhere
    exec(page.inner_text("#exportText"), {})
    assert made.pop("base_url") == f"{viewer.url}/v1" and made.pop("api_key") == "none"
    assert made.pop("extra_body") | made == body


def test_errors_are_told_and_the_conversation_goes_on(viewer: Viewer) -> None:
    page = viewer.page
    viewer.set("Top p", "7")
    assert page.get_by_label("Top p").get_attribute("aria-invalid") == "true"
    assert "top_p" in viewer.ask("hello")
    assert page.is_visible("#messages .error")
    viewer.errors.clear()  # the browser's line about 400
    viewer.set("Top p", "")
    viewer.answer_with({"content": "Now it works."})
    page.click("[title=Regenerate]")
    viewer.wait_answered()
    assert "Now it works." in page.inner_text("#messages") and not page.is_visible("#messages .error")
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body="data: {}\n"))
    assert "connection was lost" in viewer.ask("again")


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
def test_axe_finds_no_serious_fault(browser: Any, server: ServerProcess, width: int, scheme: str) -> None:
    viewer = Viewer(browser, server.url(), viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = viewer.page
    text = "# Title\n\n> quote\n\n- [x] done\n\n[link](https://example.org) `code`\n\n|a|\n|-|\n|1|\n\n"
    text += "```python\nif 1: 'a' # b\n```"
    call = {"index": 0, "id": "call_1", "function": {"name": "weather", "arguments": '{"city": "Ghent"}'}}
    viewer.answer_with({"reasoning": "Hm."}, {"content": text}, {"tool_calls": [call]})
    _check(page, "welcome")
    viewer.ask("go")
    page.click("#messages summary")
    _check(page, "chat")
    page.click("#settingsToggle")
    _check(page, "settings")
    page.keyboard.press("Escape")
    page.click("#export")
    _check(page, "export")
    page.keyboard.press("Escape")
    page.click("#views a:has-text('Engine')")
    page.wait_for_selector("#tiles")
    _check(page, "engine")
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(overflow) <= 0
    viewer.close()


def _check(page: Any, where: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    serious = [(fault["id"], fault["nodes"][0]["html"]) for fault in found if fault["impact"] in ("serious", "critical")]
    assert not serious, f"{where}: {serious}"


def test_the_api_reference_needs_nothing_from_elsewhere(browser: Any, keyed: ServerProcess) -> None:
    viewer = Viewer(browser, keyed.url(), "/docs#post--v1-chat-completions", color_scheme="dark")
    page = viewer.page
    give_key(viewer, "key-one")
    viewer.wait("document.querySelectorAll('.operation').length > 10")
    assert all(url.startswith((viewer.url, "data:")) for url in viewer.requested)
    chat = page.locator("#post--v1-chat-completions")
    assert chat.evaluate("node => node.open")
    fields = chat.locator("> div > table >> nth=0").inner_text()
    assert "messages" in fields and "required" in fields and "top_p" in fields and "number" in fields
    _check(page, "docs")
    body = {"messages": [{"role": "user", "content": "fox"}], "max_tokens": 3}
    chat.locator("[aria-label='Request body']").fill(json.dumps(body))
    chat.locator("button:has-text('Send')").click()
    viewer.wait("document.querySelector('#post--v1-chat-completions .try pre').textContent.includes('completion_tokens')")
    assert chat.locator(".try pre").inner_text().startswith("200 OK")
    page.fill("#filter", "detokenize")
    assert page.locator(".operation:visible").count() == 1 and page.is_visible("text=/detokenize")
    assert not viewer.errors[1:], viewer.errors  # the first: the description was refused without a key
    viewer.close()


def test_the_keyboard_is_enough(viewer: Viewer) -> None:
    page = viewer.page
    page.keyboard.press("Alt+e")
    page.wait_for_selector("#engineView:not([hidden])")
    page.keyboard.press("Alt+e")
    page.wait_for_selector("#chatView:not([hidden])")
    page.keyboard.press("Alt+s")
    assert page.evaluate("document.activeElement.closest('#settings') !== null")
    page.keyboard.press("Escape")
    assert not page.is_visible("#settings")
    page.keyboard.press("Alt+x")
    assert page.is_visible("#exportDialog")
    page.keyboard.press("Escape")
    page.keyboard.press("Alt+k")
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    assert page.input_value("#prompt") == "one\ntwo"
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("?")
    assert page.is_visible("#helpDialog")


def wait_idle(server: ServerProcess) -> None:
    with server.client() as client:
        while "quire:num_requests_running{" in (told := client.get("/metrics").text):
            line = next(line for line in told.splitlines() if line.startswith("quire:num_requests_running{"))
            if float(line.rsplit(" ", 1)[1]) == 0:
                return


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
    one.set("Other request fields", ENDLESS)
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


# a slow browser may look for the prompt's step when newer ones have taken its place
NOTE_PROMPTS = """() => {
  const take = TAKE.step;
  TAKE.step = (event) => {
    take(event);
    window.longest = Math.max(window.longest || 0, ...feed.steps.map((step) => step.prompt));
  };
}"""


def test_the_engine_at_work(viewer: Viewer, server: ServerProcess) -> None:
    page = viewer.page
    viewer.wait(LIVE)
    page.evaluate(NOTE_PROMPTS)
    viewer.set("Other request fields", ENDLESS)
    viewer.say("the quick brown fox jumps over the lazy dog " * 20)
    page.click("#views a:has-text('Engine')")
    page.wait_for_selector("#requests button")
    viewer.wait("view.tiles.running.textContent.startsWith('1 /')")
    assert not page.is_visible("#engineIdle")
    viewer.wait("document.querySelector('#requests .state').textContent === 'decode'")
    viewer.wait("feed.map.filter((c) => c === 'o').length > 3")
    viewer.wait("feed.steps.length > 10 && window.longest > 100")
    page.click("#requests button")
    viewer.wait("document.querySelector('#requestParts').textContent.includes('under way')")
    page.keyboard.press("Escape")
    engine = server.engine_pid()
    os.kill(engine, signal.SIGKILL)  # the answer goes on with the next one
    viewer.wait("feed.engine.restarts === 1 && feed.engine.state === 'ready'")
    viewer.wait(f"feed.engine.pid !== {engine}")
    assert "restart" in page.inner_text("#log")
    running = "[...feed.requests.values()].find(({ state }) => state !== 'finished').drawn"  # earlier ones are still told of
    drawn = page.evaluate(running)
    viewer.wait(f"{running} > {drawn}")
    page.click("#views a:has-text('Chat')")
    page.keyboard.press("Escape")
    viewer.wait_answered()

    viewer.set("Max tokens", "7")
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
    viewer.wait("!document.querySelector('#engineIdle').hidden")
    assert "idle" in page.inner_text("#engineIdle")
    agrees_with_metrics(viewer, server)


def agrees_with_metrics(viewer: Viewer, server: ServerProcess) -> None:
    viewer.wait("feed.queue.running === 0")
    viewer.page.wait_for_timeout(1200)  # the last `stats` is out
    metrics = httpx.get(f"{server.url()}/metrics", timeout=PATIENCE).text

    def metric(name: str) -> float:
        return sum(float(line.rsplit(" ", 1)[1]) for line in metrics.splitlines() if re.match(rf"quire:{name}\{{", line))

    stats = viewer.page.evaluate("feed.stats")
    assert stats["generated_tokens"] == metric("generation_tokens_total") > 7
    assert stats["prompt_tokens"] == metric("prompt_tokens_total") > 0
    assert sum(stats["ttft"]) == metric("time_to_first_token_seconds_count")
    assert sum(stats["finished"].values()) == metric("request_success_total")
    assert stats["used_pages"] == 0 == viewer.page.evaluate("feed.pool.used")
    shown = viewer.page.inner_text("#activity")
    said = viewer.page.evaluate("count(feed.stats.generated_tokens)")
    assert f"tokens generated\n{said}" in shown and "1 restarts" in shown and "adapters\nnone" in shown
    viewer.page.evaluate("[...feed.requests.values()][0].adapter = 'fox', drawActivity()")
    assert "adapters\nfox 1" in viewer.page.inner_text("#activity")


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
        viewer.set("Max tokens", "3")
        viewer.page.click("[title=Regenerate]")
        viewer.wait_answered()
        assert "3 tokens" in viewer.page.inner_text(".facts")
    viewer.close()
