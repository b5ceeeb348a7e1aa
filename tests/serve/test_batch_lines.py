"""Lines of batches: what is refused, what is written, and what of a file is done."""

import asyncio
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.serve.batches.lines import (
    MAX_CUSTOM_ID_CHARS,
    PATHS,
    Done,
    IdSet,
    LineError,
    answer_line,
    count_lines,
    error_line,
    read_line,
    read_lines,
)
from quire.serve.batches.run import Appender
from quire.serve.batches.throttle import TRICKLE_S, YieldingPermits, busy_lines
from quire.types.errors import ConfigError

CHAT = "/v1/chat/completions"


def line(**changes: Any) -> bytes:
    fields = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"messages": []}} | changes
    return json.dumps({name: value for name, value in fields.items() if value is not ...}).encode()


@pytest.mark.parametrize("path", PATHS)
def test_a_line_keeps_its_body_to_the_byte(path: str) -> None:
    raw = b'{"url": "%s", "body": {"seed": 1e400, "a":  [1, 2], "a": 3}, "custom_id": "\\u00e9"}' % path.encode()
    read = read_line(raw)
    assert (read.custom_id, read.url, read.body) == ("é", path, b'{"seed": 1e400, "a":  [1, 2], "a": 3}')


@pytest.mark.parametrize(
    ("raw", "code", "custom_id"),
    [
        (None, "line_too_long", None),
        (b"not json", "invalid_json", None),
        (b"[]", "invalid_json", None),
        (b"\xff\xfe{", "invalid_json", None),
        (b'{"custom_id": "\\ud800"}', "invalid_json", None),
        (b'{"custom_id": ' + b"[" * 100_000, "invalid_json", None),
        (line(custom_id=...), "missing_custom_id", None),
        (line(custom_id=""), "missing_custom_id", None),
        (line(custom_id=7), "missing_custom_id", None),
        (line(custom_id="a" * (MAX_CUSTOM_ID_CHARS + 1)), "invalid_custom_id", None),
        (line(method="GET"), "invalid_method", "a"),
        (line(url=...), "invalid_url", "a"),
        (line(url="/v1/models"), "invalid_url", "a"),
        (line(url=["x"]), "invalid_url", "a"),
        (line(url="/v1/completions"), "mismatched_url", "a"),
        (line(body=...), "invalid_body", "a"),
        (line(body=[1]), "invalid_body", "a"),
        (line(body={"stream": True}), "unsupported_value", "a"),
        (line(body={"background": True}), "unsupported_value", "a"),
    ],
)
def test_what_is_refused(raw: bytes | None, code: str, custom_id: str | None) -> None:
    with pytest.raises(LineError) as caught:
        read_line(raw, CHAT)
    assert (caught.value.code, caught.value.custom_id) == (code, custom_id)
    assert len(caught.value.message) < 500
    written = json.loads(error_line(7, caught.value))
    assert written["custom_id"] == custom_id and written["response"] is None
    assert written["error"] == {"code": code, "message": caught.value.message, "line": 7}


@pytest.mark.parametrize(("own", "expected"), [(-5, 1000), (0, 1000), (7, 1007), (10**9, 2000), ("x", "x")])
def test_a_line_cannot_precede_other_requests(own: Any, expected: Any) -> None:
    assert json.loads(read_line(line(body={"priority": own}), CHAT, 1000).body)["priority"] == expected
    assert read_line(line(body={"a": 1}), CHAT, 1000).body == b'{"a": 1}'


@given(st.text())
def test_every_answer_is_one_line(text: str) -> None:
    body = json.dumps({"content": text + "\u2028\u0085", "pretty": [1]}, ensure_ascii=False, indent=1).encode(
        errors="surrogatepass"
    )
    try:
        body.decode()
    except UnicodeDecodeError:
        return
    written = answer_line("id", text, 200, "r", body)
    assert len(written.decode().splitlines()) == 1
    read = json.loads(written)
    assert read["custom_id"] == text and read["response"]["body"]["content"] == text + "\u2028\u0085"
    assert (read["response"]["status_code"], read["response"]["request_id"], read["error"]) == (200, "r", None)


def numbered(content: bytes, most: int = 10) -> list[tuple[int, bytes | None]]:
    async def collect() -> list[tuple[int, bytes | None]]:
        return [one async for one in read_lines(io.BytesIO(content), most)]

    return asyncio.run(collect())


def test_lines_are_read_within_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.serve.batches.lines.READ_BYTES", 4)
    assert numbered(b"\xef\xbb\xbfab\r\n\n  \ncd") == [(1, b"ab"), (4, b"cd")]
    assert numbered(b"a" * 11 + b"\nb\n" + b"c" * 50) == [(1, None), (2, b"b"), (3, None)]
    assert numbered(b"a" * 10 + b"\n") == [(1, b"a" * 10)]
    assert numbered(b"") == numbered(b"\n \n") == []


@given(st.binary(max_size=60).map(lambda raw: raw.replace(b"\xef", b"x")), st.integers(1, 8))
def test_lines_are_counted_as_they_are_read(content: bytes, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quire.serve.batches.lines.READ_BYTES", size)
        assert count_lines(io.BytesIO(content), 1000) == len(numbered(content, 1000))


@given(st.lists(st.text(max_size=3)))
def test_id_set(members: list[str]) -> None:
    found, expected = IdSet(), set[str]()
    for member in members:
        assert found.add(member) == (member not in expected)
        expected.add(member)
    assert len(found) == len(expected) and all(member in found for member in expected) and "absent" not in found


def test_id_set_of_many() -> None:
    found = IdSet()
    assert all(found.add(str(i)) for i in range(20_000)) and not any(found.add(str(i)) for i in range(20_000))


def test_an_output_says_what_is_done_and_loses_its_half_line() -> None:
    whole = answer_line("x", "a", 200, "r", b"{}") + answer_line("x", "b", 400, "r", b"{}")
    whole += error_line(3, LineError("c", "m", "dup")) + error_line(9, LineError("c", "m"))
    file, done = io.BytesIO(whole + b'{"id":"batch_'), Done()
    done.read(file, "out")
    assert file.getvalue() == whole
    assert (done.completed, done.failed) == (1, 3)
    assert done.covers(1, "a") and done.covers(2, "b") and done.covers(3, None) and done.covers(9, None)
    assert not done.covers(4, "dup")  # its error is of line 3; another line has that id
    with pytest.raises(ConfigError, match="out line 1 is not the output of a batch"):
        Done().read(io.BytesIO(b"hello\n"), "out")


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out"
    write, left = os.write, 25

    def full_write(descriptor: int, data: Any) -> int:
        nonlocal left
        if not left:
            raise OSError(28, "No space left on device")
        count = write(descriptor, bytes(data)[:left])
        left -= count
        return count

    async def run() -> list[BaseException | None]:
        appender = Appender(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND))
        monkeypatch.setattr("quire.serve.batches.run.os.write", full_write)
        failures = await asyncio.gather(*(appender.write(b"%09d\n" % i) for i in range(3)), return_exceptions=True)
        await appender.close(sync=True)
        return failures

    failures = asyncio.run(run())
    assert any(isinstance(failure, OSError) for failure in failures)
    written = [b"%09d\n" % i for i, failure in enumerate(failures) if failure is None]
    assert path.read_bytes() == b"".join(written) and len(written) in (1, 2)


def test_permits_yield_to_other_requests() -> None:
    async def run() -> None:
        busy = False
        permits = YieldingPermits(32, 2, lambda: 0.0 if busy else 100.0)
        for _ in range(32):
            await permits.acquire()
        waiting = [asyncio.create_task(permits.acquire()) for _ in range(3)]
        await asyncio.sleep(0)
        busy = True
        for _ in range(30):
            permits.release()
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)  # two are in flight, as many as while others wait
        permits.release()
        waiting[1].cancel()
        await asyncio.wait(waiting[:2])
        assert waiting[0].done() and not waiting[0].cancelled()
        busy = False
        await waiting[2]

    asyncio.run(run())


async def granted(permits: YieldingPermits) -> int:
    """Return how many permits are given at once."""
    count = 0
    while True:
        try:
            async with asyncio.timeout(0):
                await permits.acquire()
        except TimeoutError:
            return count
        count += 1


@pytest.mark.parametrize(
    ("least", "quiet_s", "lines"),
    [(2, 0.0, 2), (2, 0.9, 2), (2, 1.0, 4), (2, 3.5, 16), (2, 5.0, 32), (2, 1e9, 32), (0, 0.0, 0), (0, 1.0, 2), (0, 1e9, 32)],
)
def test_lines_double_with_every_second_without_other_requests(least: int, quiet_s: float, lines: int) -> None:
    async def run() -> int:
        return await granted(YieldingPermits(32, least, lambda: quiet_s))

    assert asyncio.run(run()) == lines


def test_one_line_a_minute_begins_beside_other_requests_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("quire.serve.batches.throttle.time.monotonic", lambda: now)

    async def run() -> None:
        nonlocal now
        permits = YieldingPermits(32, busy_lines(32, "cpu"), lambda: 0.0)
        assert await granted(permits) == 0
        for _ in range(3):
            now += TRICKLE_S
            assert await granted(permits) == 1
            permits.release()
            assert await granted(permits) == 0

    asyncio.run(run())
    assert busy_lines(32, "cuda") == 2 and busy_lines(1, "cuda") == 1
