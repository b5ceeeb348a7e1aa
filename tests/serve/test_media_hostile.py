"""Hostile pictures in requests: each is refused with an error that names its part, and other requests go on."""

import base64
import json
import re
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from patience import wait_for
from serving import error_of, events_of

sys.path.append(str(Path(__file__).parents[1] / "features" / "media"))

from media_files import FORMATS, encoded, hostile, many_scans, picture, truncated, unusual

READER = Path(__file__).parents[1] / "fixtures" / "reader-llava"
EXPECTED = json.loads((READER / "expected_png.json").read_text())
CHAT = "/v1/chat/completions"
TEXT = {"type": "text", "text": "?"}
SECRETS = re.compile(r"/etc|/tmp|/dev|/proc|127\.0|169\.254|localhost|root:|secret")


@pytest.fixture
def server(reader_server):
    yield reader_server
    reader_server.wait_idle()


def data(file):
    return "data:image/png;base64," + base64.b64encode(file).decode()


def body(*urls, **fields):
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    messages = [{"role": "user", "content": [*parts, TEXT]}]
    return {"messages": messages, "max_tokens": 4, "temperature": 0, "add_special_tokens": True, **fields}


def ask(server, *urls, **fields):
    return server.http.post(CHAT, json=body(*urls, **fields))


def read(server, file):
    """Return what the model reads in a picture."""
    answer = ask(server, data(file))
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def refused(answer, status=400, place="messages[0].content[0]"):
    """Return the error's message. It names the part, and no address or path."""
    assert answer.status_code == status, answer.text
    message = error_of(answer)["message"]
    assert message.startswith(f"{place}: ") and not SECRETS.search(message), message
    return message


# ---- files


@pytest.mark.parametrize("name", [*hostile(), "many scans"])
def test_a_hostile_picture_is_refused(server, name):
    message = refused(ask(server, data({**hostile(), "many scans": many_scans()}[name])))
    assert ("SVG" in message) == ("svg" in name)


def test_the_part_that_is_hostile_is_named(server):
    good = (READER / "pictures" / "00.png").read_bytes()
    refused(ask(server, data(good), data(hostile()["a bomb"]), data(good)), place="messages[0].content[1]")


@pytest.mark.parametrize("form", FORMATS)
def test_truncated_files_are_refused_or_whole(server, form):
    whole = read(server, encoded(picture(), form))
    answers = [ask(server, data(part)) for part in truncated(form)]
    assert sum(answer.status_code == 400 for answer in answers) >= 9
    for answer in answers:
        if answer.status_code == 400:
            refused(answer)
        else:  # what is missing stands after the pixels
            assert answer.json()["choices"][0]["message"]["content"] == whole


@pytest.mark.parametrize("name", unusual())
def test_an_unusual_picture_is_read(server, name):
    read(server, unusual()[name])


def digits(number):
    return Image.open(READER / "pictures" / f"{number:02d}.png").convert("L")


def in_16_bits(image):
    return encoded(Image.fromarray(np.asarray(image).astype(np.uint16) * 257))


def turned(image):
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    return encoded(image.transpose(Image.Transpose.ROTATE_90), exif=exif)


def animated(image):
    others = [ImageOps.invert(image), image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)]
    return encoded(image, "GIF", save_all=True, append_images=others)


def inverse_cmyk(image):
    return encoded(image.convert("RGB").convert("CMYK"), "TIFF")


@pytest.mark.parametrize("change", [in_16_bits, turned, animated, inverse_cmyk])
def test_an_unusual_file_shows_what_it_shows(server, change):
    """The model reads the same digits in it as in the plain picture."""
    for number in (0, 5, 9, 14):
        assert read(server, change(digits(number))) == EXPECTED[number]["text"]


# ---- addresses


@pytest.mark.parametrize(
    ("path", "status", "reason"),
    [
        ("0.png", 200, ""),
        ("to//none", 422, "answered 404"),
        ("loop", 422, "redirected more than"),
        ("trickle", 422, "too slow"),
        ("endless", 400, "more than 67108864 bytes"),
        ("short", 422, "ended too early"),
        ("gzip", 422, "compressed"),
        ("none", 422, "answered 404"),
        ("picture", 400, "of no known format"),
        ("to/http://127.0.0.1:1/x", 422, "redirects to a URL"),
        ("to/http://169.254.169.254/latest/meta-data", 422, "redirects to a URL"),
        ("to/https://localhost:1/", 422, "the connection failed"),
        ("to/file:///etc/passwd", 422, "redirects to a URL"),
    ],
)
def test_addresses_of_an_allowed_host(server, pictures_port, path, status, reason):
    answer = ask(server, f"http://127.0.0.1:{pictures_port}/{path}")
    if status == 200:
        assert answer.json()["choices"][0]["message"]["content"] == EXPECTED[0]["text"]
    else:
        assert reason in refused(answer, status)


@pytest.mark.parametrize(
    ("url", "status", "reason"),
    [
        ("https://localhost:{port}/0.png", 422, "the connection failed"),  # it is allowed, and its address is private
        ("http://localhost:{port}/0.png", 400, "must begin with https"),
        ("http://127.0.0.2:{port}/0.png", 400, "host is not allowed"),
        ("http://[::1]:{port}/0.png", 400, "host is not allowed"),
        ("http://2130706433:{port}/0.png", 400, "host is not allowed"),
        ("http://127.0.0.1:{port}@169.254.169.254/", 400, "host is not allowed"),
        ("http://169.254.169.254/latest", 400, "host is not allowed"),
        ("https://example.com/a.png", 400, "host is not allowed"),
        ("", 400, "must begin with"),
        (" ", 400, "must begin with"),
        ("data:", 400, "a data: URL must be"),
        ("data:image/png;base64,", 400, "of no known format"),
        ("data:image/png;base64,?", 400, "base64"),
        ("data:text/html;base64,AAAA", 400, "of type image/"),
        ("javascript:alert(1)", 400, "must begin with"),
        ("ftp://127.0.0.1/x.png", 400, "must begin with"),
        ("file:///etc/passwd", 400, "not below"),
        ("file://{root}/../../etc/passwd", 400, "not below"),
        ("file://{root}/%2e%2e/x", 400, "not below"),
        ("file://{root}/secret.png", 400, "not below"),  # a link
        ("file://{root}/none.png", 422, "the file cannot be read"),
        ("file://{root}", 400, "not below"),
        ("file://elsewhere{root}/0.png", 400, "must not name a host"),
        ("file://{root}/0.png\0", 422, "the file cannot be read"),
        ("http://127.0.0.1:99999/", 400, "URL is not valid"),
    ],
)
def test_other_addresses(server, pictures_port, url, status, reason):
    url = url.replace("{port}", str(pictures_port)).replace("{root}", str(server.root))
    assert reason in refused(ask(server, url), status)


def test_a_data_url_of_a_gigabyte_is_refused(server):
    def endless():
        yield b'{"messages":[{"role":"user","content":[{"type":"image_url","image_url":"data:image/png;base64,'
        for _ in range(1 << 11):  # twice what a body may have
            yield b"A" * (1 << 16)

    answer = server.http.post(CHAT, content=endless(), headers={"content-type": "application/json"})
    assert answer.status_code == 413
    with socket.create_connection((server.http.base_url.host, server.http.base_url.port)) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {1 << 30}\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


# ---- fields

WRONG = (None, True, 5, 1.5, "", "x", "\x00", [], ["a"], {}, {"url": 5}, {"a": {"b": []}}, [[]], "a" * 100_000)
GOOD_URL = data((READER / "pictures" / "00.png").read_bytes())
GOOD_DATA = GOOD_URL.partition(",")[2]
SOURCE = {"type": "base64", "media_type": "image/png", "data": GOOD_DATA}
# path, body, and where in it wrong values are put
FIELDS = {
    "part": (CHAT, body(GOOD_URL), ("messages", 0, "content", 0)),
    "type": (CHAT, body(GOOD_URL), ("messages", 0, "content", 0, "type")),
    "image_url": (CHAT, body(GOOD_URL), ("messages", 0, "content", 0, "image_url")),
    "url": (CHAT, body(GOOD_URL), ("messages", 0, "content", 0, "image_url", "url")),
    "detail": (CHAT, body(GOOD_URL), ("messages", 0, "content", 0, "image_url", "detail")),
    "detail of responses": (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": GOOD_URL}]}], "max_output_tokens": 16},
        ("input", 0, "content", 0, "detail"),
    ),
    "uuid": (CHAT, body(GOOD_URL), ("messages", 0, "content", 0, "uuid")),
    "mm_processor_kwargs": (CHAT, body(GOOD_URL), ("mm_processor_kwargs",)),
    "an option of the processor": (CHAT, body(GOOD_URL, mm_processor_kwargs={}), ("mm_processor_kwargs", "size")),
    "media_io_kwargs": (CHAT, body(GOOD_URL), ("media_io_kwargs",)),
    "options of images": (CHAT, body(GOOD_URL, media_io_kwargs={}), ("media_io_kwargs", "image")),
    "responses": (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": GOOD_URL}]}], "max_output_tokens": 16},
        ("input", 0, "content", 0, "image_url"),
    ),
    "anthropic": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": [{"type": "image", "source": SOURCE}]}], "max_tokens": 2},
        ("messages", 0, "content", 0, "source"),
    ),
    "anthropic's data": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": [{"type": "image", "source": SOURCE}]}], "max_tokens": 2},
        ("messages", 0, "content", 0, "source", "data"),
    ),
    "anthropic's type": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": [{"type": "image", "source": SOURCE}]}], "max_tokens": 2},
        ("messages", 0, "content", 0, "source", "media_type"),
    ),
    "ollama": (
        "/api/chat",
        {"messages": [{"role": "user", "content": "?", "images": [GOOD_DATA]}], "stream": False, "options": {"num_predict": 2}},
        ("messages", 0, "images"),
    ),
    "ollama's image": (
        "/api/chat",
        {"messages": [{"role": "user", "content": "?", "images": [GOOD_DATA]}], "stream": False, "options": {"num_predict": 2}},
        ("messages", 0, "images", 0),
    ),
    "ollama's prompt": (
        "/api/generate",
        {"prompt": "?", "images": [GOOD_DATA], "stream": False, "options": {"num_predict": 2}},
        ("images", 0),
    ),
}
# what may be left out, or changes nothing
ALLOWED = {
    "part": ("", "x", "\x00"),  # texts; a long one exceeds the context
    "detail": (None,),
    "detail of responses": (None,),
    "uuid": (None, "x", "\x00"),
    "mm_processor_kwargs": (None, {}),
    "media_io_kwargs": (None, {}),
    "options of images": ({},),
    "ollama": (None, []),
    "anthropic's type": ("",),
}


@pytest.mark.parametrize("name", FIELDS)
def test_values_of_other_types_are_refused(server, name):
    path, whole, places = FIELDS[name]
    for wrong in WRONG:
        changed = json.loads(json.dumps(whole))
        inner = changed
        for place in places[:-1]:
            inner = inner[place]
        inner[places[-1]] = wrong
        answer = server.http.post(path, json=changed)
        allowed = any(wrong == each and type(wrong) is type(each) for each in ALLOWED.get(name, ()))
        assert answer.status_code == (200 if allowed else 400), (wrong, answer.text[:300])
        if not allowed:
            error = answer.json()["error"]
            message = error if isinstance(error, str) else error["message"]
            assert len(message) < 600 and not SECRETS.search(message), message


def test_a_prompt_full_of_pictures_is_refused_before_all_are_processed(server, monkeypatch):
    monkeypatch.setitem(server.llm.media._limits, "image", 999)
    processed = []
    monkeypatch.setattr(server.llm.media, "on_processed", processed.append)
    files = [encoded(picture(32, 32, seed=seed)) for seed in range(1000, 1200)]
    answer = ask(server, *map(data, files))
    message = error_of(answer)["message"]
    assert answer.status_code == 400 and "maximum context length is 512 tokens" in message
    assert re.match(r"messages\[0\]\.content\[\d+\]: ", message) and len(processed) < 100


# ---- the others


def test_streams_of_others_go_on(server, caplog):
    """Text is generated beside hostile pictures as without them, and no process is lost."""
    path = "/v1/completions"
    text = {"prompt": "1", "max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}

    def stream():
        events = events_of(server.http.post(path, json=text).text)[:-1]
        return [token for event in events for token in event["choices"][0]["token_ids"]]

    alone, files = stream(), [*hostile().values(), *unusual().values(), many_scans()]
    found, done = [], threading.Event()

    def others():
        while not done.is_set():
            found.append(stream())

    neighbour = threading.Thread(target=others)
    neighbour.start()
    with ThreadPoolExecutor(4) as clients:
        answers = list(clients.map(lambda file: ask(server, data(file)).status_code, files * 2))
    done.set()
    neighbour.join()
    assert set(answers) == {200, 400} and found
    assert all(one == alone for one in found)
    assert "lost" not in caplog.text


def test_memory_is_returned(server):
    """A large picture takes a hundred megabytes for a moment; the process does not keep them."""
    large = encoded(Image.new("RGB", (6000, 6000)))
    good = (READER / "pictures" / "00.png").read_bytes()
    read(server, good)
    [*pids] = server.llm.media.pids
    before = {pid: held(pid) for pid in pids}
    read(server, large)
    server.call(server.llm.reset_mm_cache())
    for pid in pids:
        assert held(pid) < before[pid] + (64 << 20)
    files = server.llm.media._files.directory
    wait_for(lambda: {path.name for path in files.iterdir()} == {"owner", "source"})


def held(pid):
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) << 10


def test_a_lost_client_leaves_nothing(server):
    """Clients that go away while their pictures are processed leave no files and no requests."""
    import httpx

    large = data(encoded(picture(1500, 1500, seed=77)))
    for _ in range(3):
        with pytest.raises(httpx.TimeoutException):
            server.http.post(CHAT, json=body(large), timeout=httpx.Timeout(30, read=0.01))
    wait_for(lambda: not server.llm.media._running)
    server.call(server.llm.reset_mm_cache())
    wait_for(lambda: {path.name for path in server.llm.media._files.directory.iterdir()} == {"owner", "source"})
