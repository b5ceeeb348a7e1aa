"""Conversations on the page, in a real browser: branches, titles, search, files and formulas. The server is the front alone."""

import base64
import io
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from browser import Viewer, needs_browser, open_browser
from front_desk import Desk
from PIL import Image

from patience import PATIENCE, wait_for

pytestmark = needs_browser
MODELS = {"data": [{"id": "tiny", "max_model_len": 4096, "input_modalities": ["text"]}]}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(Desk().app, log_level="warning", lifespan="off", access_log=False))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join(PATIENCE)


@pytest.fixture
def viewer(browser: Any, address: str) -> Iterator[Viewer]:
    opened = open_viewer(browser, address)
    yield opened
    assert not opened.errors
    opened.close()


def open_viewer(browser: Any, address: str, models: Any = MODELS) -> Viewer:
    opened = Viewer(browser, address)
    opened.page.route("**/v1/models", lambda route: route.fulfill(json=models))
    opened.page.route("**/engine/events", lambda route: route.fulfill(content_type="text/event-stream", body=""))
    opened.page.reload()
    opened.wait("document.querySelector('#model').value === 'tiny'")
    opened.errors.clear()
    return opened


SEES = {"data": [{**MODELS["data"][0], "input_modalities": ["text", "image"]}]}
GIVE = """([event, name]) => {
  const canvas = document.createElement("canvas");
  Object.assign(canvas, {width: 3000, height: 600}).getContext("2d").fillRect(0, 0, 9, 9);
  return new Promise((done) => canvas.toBlob((blob) => {
    const data = new DataTransfer();
    const type = name.endsWith(".txt") ? "text/plain" : "image/png";
    data.items.add(new File([name === "broken.png" ? "broken" : blob], name, {type}));
    const options = {clipboardData: data, dataTransfer: data, bubbles: true};
    document.querySelector("#prompt").dispatchEvent(new (event === "paste" ? ClipboardEvent : DragEvent)(event, options));
    done();
  }));
}"""


def give(viewer: Viewer, event: str, name: str = "picture.png") -> None:
    """Paste or drop a file: a picture of 3,000 x 600 pixels, unless it is broken."""
    viewer.page.evaluate(GIVE, [event, name])


def test_pictures_are_pasted_dropped_and_chosen(browser: Any, address: str, tmp_path: Path) -> None:
    viewer = open_viewer(browser, address, SEES)
    page, sent = viewer.page, viewer.answer_with({"content": "A picture."})
    small = tmp_path / "small.png"
    Image.new("RGB", (20, 10), "red").save(small)
    page.set_input_files("#pictureFile", small)
    give(viewer, "paste")
    give(viewer, "drop")
    viewer.wait("document.querySelectorAll('#pictures img').length === 3")
    page.click("[title='Remove picture 2']")
    give(viewer, "paste", "notes.txt")
    viewer.say("What are these?")
    viewer.wait_answered()
    first, second, text = sent[0]["messages"][0]["content"]
    found = [Image.open(io.BytesIO(base64.b64decode(part["image_url"]["url"].partition(",")[2]))) for part in (first, second)]
    assert [(image.format, image.size) for image in found] == [("PNG", (20, 10)), ("JPEG", (1024, 205))]
    assert found[0].convert("RGB").getpixel((5, 5)) == (255, 0, 0)
    assert text == {"type": "text", "text": "What are these?"} and page.is_hidden("#pictures")
    assert page.locator("#messages .turn.user img").count() == 2

    give(viewer, "drop")
    viewer.wait("document.querySelectorAll('#pictures img').length === 1")
    page.click("#send")  # without a text
    viewer.wait_answered()
    assert [part["type"] for part in sent[1]["messages"][2]["content"]] == ["image_url"]
    assert sent[1]["messages"][0]["content"] == sent[0]["messages"][0]["content"]
    page.reload()
    viewer.wait("document.querySelectorAll('#messages .turn.user img').length === 3")

    page.click("#export")
    page.get_by_role("button", name="JSON", exact=True).click()
    (tmp_path / "chat.json").write_text(str(page.inner_text("#exportText")))
    page.keyboard.press("Escape")
    page.click("#new")
    page.set_input_files("#importFile", tmp_path / "chat.json")
    viewer.wait("document.querySelectorAll('#messages .turn.user img').length === 3")
    assert page.locator("#chatList li").count() == 2

    give(viewer, "paste", "broken.png")
    viewer.wait("document.querySelector('#toast').textContent === 'broken.png cannot be read'")
    assert page.is_hidden("#pictures")
    assert not viewer.errors
    viewer.close()


def test_a_model_of_texts_takes_no_pictures(viewer: Viewer) -> None:
    assert viewer.page.is_hidden("#picture")
    give(viewer, "paste")
    viewer.wait("document.querySelector('#toast').textContent === 'This model does not read pictures'")
    assert viewer.page.is_hidden("#pictures") and viewer.page.is_disabled("#send")


def contents(body: Any) -> list[str]:
    return [message["content"] for message in body["messages"]]


def shown(page: Any, selector: str) -> str:
    """The text of an element. Its `innerText` lacks pieces that the browser has not drawn yet (`content-visibility`)."""
    return page.locator(selector).first.text_content() or ""


def edit(viewer: Viewer, turn: int, text: str) -> None:
    viewer.page.locator("#messages > .turn").nth(turn).locator("[title=Edit]").click()
    viewer.page.fill(".edit textarea", text)
    viewer.page.press(".edit textarea", "Enter")
    viewer.wait_answered()


def test_editing_any_message_begins_a_branch(viewer: Viewer) -> None:
    page = viewer.page
    sent = viewer.answer_with({"content": "Yes."})
    for text in ("one", "two", "three"):
        viewer.ask(text)
    edit(viewer, 0, "other one")
    assert contents(sent[-1]) == ["other one"] and page.locator("#messages > .turn").count() == 2
    assert "2 / 2" in shown(page, "#messages > .turn >> nth=0")
    page.click("[title='Previous branch']")
    assert page.locator("#messages > .turn").count() == 6 and "three" in shown(page, "#messages")
    edit(viewer, 2, "other two")  # a branch within a branch
    assert contents(sent[-1]) == ["one", "Yes.", "other two"]
    page.reload()
    viewer.wait("document.querySelectorAll('#messages > .turn').length === 4")
    viewer.ask("four")
    assert contents(sent[-1]) == ["one", "Yes.", "other two", "Yes.", "four"]
    page.locator("#messages > .turn").nth(0).locator("[title='Next branch']").click()
    assert "other one" in shown(page, "#messages") and page.locator("#messages > .turn").count() == 2
    page.click("[title='Next branch']")
    page.locator("#messages > .turn").nth(2).locator("[title='Next branch']").click()
    assert "three" in shown(page, "#messages") and "other two" not in shown(page, "#messages")


def test_an_edited_answer_is_a_version_that_the_next_request_carries(viewer: Viewer) -> None:
    sent = viewer.answer_with({"content": "Yes."})
    viewer.ask("one")
    viewer.ask("two")
    viewer.page.locator("#messages > .turn").nth(1).locator("[title=Edit]").click()
    viewer.page.fill(".edit textarea", "No.")
    viewer.page.click(".edit button:has-text('Save')")
    assert len(sent) == 2 and "2 / 2" in shown(viewer.page, "#messages > .turn >> nth=1")
    assert "edited" in shown(viewer.page, "#messages > .turn >> nth=1")
    viewer.ask("three")
    assert contents(sent[-1]) == ["one", "No.", "two", "Yes.", "three"]


def test_a_tools_result_is_edited_too(viewer: Viewer) -> None:
    calls = [
        {"index": i, "id": f"call_{i}", "function": {"name": name, "arguments": "{}"}} for i, name in enumerate(("a", "b"))
    ]
    viewer.answer_with({"tool_calls": calls}, finish="tool_calls")
    viewer.ask("go")
    sent = viewer.answer_with({"content": "Done."})
    for field, text in zip(viewer.page.locator(".results textarea").all(), ("rain", "sun"), strict=True):
        field.fill(text)
    viewer.page.click(".results button")
    viewer.wait_answered()
    edit(viewer, 2, "snow")
    assert contents(sent[-1])[2:] == ["snow", "sun"] and viewer.page.locator("#messages > .turn").count() == 5


def test_conversations_are_renamed_and_found(viewer: Viewer) -> None:
    page = viewer.page
    viewer.answer_with({"content": "Bananas are berries."})
    viewer.ask("about apples")
    edit(viewer, 0, "about pears")  # the first question is in a branch that is not shown
    page.keyboard.press("Alt+n")
    viewer.answer_with({"content": "No."})
    viewer.ask("about tea")
    page.click("#chatList li >> nth=0 >> [title^=Rename]")
    page.fill("#chatList input", "A title")
    page.press("#chatList input", "Enter")
    assert page.inner_text("#chatList .current") == "A title" and page.title() == "A title · Quire"
    page.reload()
    viewer.wait("document.title === 'A title · Quire'")
    page.click("#chatList .current [title^=Rename]")
    page.fill("#chatList input", "never")
    page.press("#chatList input", "Escape")
    assert page.inner_text("#chatList .current") == "A title"
    page.click("#chatList .current [title^=Rename]")
    page.fill("#chatList input", "")
    page.press("#chatList input", "Enter")
    assert page.inner_text("#chatList .current") == "about tea"
    for wanted, found in (("APPLES", 1), ("berries", 1), ("about", 2), ("coffee", 0), ("", 2)):
        page.fill("#search", wanted)
        assert page.locator("#chatList li").count() == found, wanted
        assert page.is_visible("#noneFound") == (found == 0)


def test_conversations_are_exported_and_imported(viewer: Viewer, browser: Any, address: str, tmp_path: Path) -> None:
    viewer.answer_with({"content": "Yes."})
    viewer.set("System prompt", "Be brief.")
    viewer.ask("one")
    edit(viewer, 0, "other one")
    with viewer.page.expect_download() as download:
        viewer.page.click("#exportChats")
    path = tmp_path / "all.json"
    download.value.save_as(path)
    assert download.value.suggested_filename == "quire-conversations.json"

    other = open_viewer(browser, address)  # another browser profile
    other.page.set_input_files("#importFile", path)
    other.wait("document.querySelectorAll('#messages > .turn').length === 2")
    assert "other one" in shown(other.page, "#messages")
    other.page.click("[title='Previous branch']")
    assert "one" in shown(other.page, ".said") and "other" not in shown(other.page, ".said")
    sent = other.answer_with({"content": "No."})
    other.ask("two")
    assert contents(sent[-1]) == ["Be brief.", "one", "Yes.", "two"]

    other.page.click("#export")
    other.page.click("#exportKinds button:has-text('JSON')")
    path.write_text(other.page.inner_text("#exportText"))  # the form that `quire chat` saves and loads
    other.page.keyboard.press("Escape")
    other.page.set_input_files("#importFile", path)
    other.wait("document.querySelectorAll('#chatList li').length === 2")
    other.ask("three")
    assert contents(sent[-1]) == ["Be brief.", "one", "Yes.", "two", "No.", "three"]
    assert not other.errors
    other.close()


BROKEN: dict[str, Any] = {
    "no JSON": "{",
    "another thing": '{"conversations": 5}',
    "no turns": {"conversations": [{"turns": 7}, None, {"turns": [{"role": "cook"}]}]},
    "wrong types": {
        "conversations": [
            {
                "title": {"a": 1},
                "settings": {"system": ["x"], "__proto__": {"y": 1}},
                "turns": [
                    {"role": "user", "text": "kept", "fork": {"at": 9, "tails": "many"}},
                    {"role": "assistant", "versions": [{"text": 5, "calls": "x", "usage": 3}], "at": -1},
                    {"role": "assistant", "versions": []},
                ],
            }
        ]
    },
}


def test_a_broken_file_breaks_nothing(viewer: Viewer, tmp_path: Path) -> None:
    viewer.answer_with({"content": "Yes."})
    viewer.ask("mine")
    for name, content in BROKEN.items():
        path = tmp_path / "broken.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        viewer.page.evaluate("document.querySelector('#toast').textContent = ''")
        viewer.page.set_input_files("#importFile", path)
        told = viewer.wait("document.querySelector('#toast').textContent")
        expected = "Imported 1 conversation" if name == "wrong types" else "The file holds no conversations"
        assert told.startswith(expected), name
    assert "kept" in shown(viewer.page, "#messages")
    viewer.page.reload()
    viewer.wait("document.querySelectorAll('#chatList li').length === 2")
    assert "Yes." in viewer.ask("and now?")


FORMULAS = r"""Inline $E = mc^2$ and \(a_i^2\), but $5 and $6, US$7-$8 and \$9 are prices.

$$\sum_{i=1}^n i = \frac{n(n+1)}{2}$$

\[
f(x) = \begin{cases} \sqrt{x} & \text{if } x > 0 \\ 0 & \text{otherwise} \end{cases}

\mathbf{A} \in \mathbb{R}^{2 \times 2}
\]

Unreadable: $\frac{1$ and `$code$`."""


def test_formulas_are_drawn(viewer: Viewer) -> None:
    page = viewer.page
    viewer.answer_with(*({"content": piece} for piece in FORMULAS))
    viewer.ask("go")
    body = page.locator("#messages .markdown").last
    assert body.locator("math").count() == 4 and body.locator("math[display=block]").count() == 2
    for inside in ("msup", "msubsup", "munderover", "mfrac", "msqrt", "mtable mtr", "mtext"):
        assert body.locator(f"math {inside}").count() >= 1, inside
    assert body.locator("math").nth(0).get_attribute("alttext") == "E = mc^2"
    assert "𝐀∈ℝ" in body.locator("math").nth(3).text_content()
    text = body.inner_text()
    assert "but $5 and $6, US$7-$8 and $9 are prices." in text
    assert body.locator("code").all_inner_texts() == ["\\frac{1", "$code$"]
    assert page.evaluate("document.querySelector('math').getBoundingClientRect().width") > 20


def test_words_are_plain(viewer: Viewer) -> None:
    page = viewer.page
    page.click("#settingsToggle")
    settings = page.inner_text("#settings")
    assert "Max tokens" in settings and "System prompt" in settings and "Stop sequences" in settings
    hints = page.locator("#settings [placeholder]").evaluate_all("all => all.map((one) => one.placeholder)")
    assert "model default" in hints
    everything = page.content().split("<script>")[0] + settings + " ".join(hints) + page.evaluate("JSON.stringify(LEGENDS)")
    for word in ("Most tokens", "Who the model", '"drawn":"drawn"', "blank"):
        assert word not in everything, word
    assert "generated" in page.text_content("#requestsLegend") and "free" in page.text_content("#poolLegend")
