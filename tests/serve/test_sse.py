"""Events on the wire, when a stream's response begins, and what becomes of failures before and after that."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from patience import PATIENCE
from quire.serve import sse
from quire.serve.sse import EventStream, encode_event
from quire.types.errors import InvalidParameter


def test_an_event_is_one_line_whoever_reads_it():
    event = {"text": "a\u2028b\u2029c\u0085d\ne ☃"}
    data = encode_event(event).decode()
    assert len(data.splitlines()) == 2 and data.endswith("\n\n")
    assert json.loads(data.removeprefix("data: ")) == event
    assert "☃" in data


def sent_by(events: AsyncGenerator[Any, None]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        messages.append(message)

    async def receive() -> Any:
        await asyncio.Event().wait()

    asyncio.run(EventStream(events)({"type": "http", "state": {}}, receive, send))
    return messages


def test_a_stream_begins_with_its_first_event_and_ends_after_the_last():
    async def events():
        yield {"a": 1}
        yield {"b": 2}

    head, *chunks = sent_by(events())
    assert (head["type"], head["status"]) == ("http.response.start", 200)
    assert dict(head["headers"])[b"content-type"] == b"text/event-stream; charset=utf-8"
    assert [(chunk["body"], chunk["more_body"]) for chunk in chunks] == [
        (b'data: {"a":1}\n\n', True), (b'data: {"b":2}\n\n', True), (b"data: [DONE]\n\n", False),
    ]  # fmt: skip


def test_a_stream_whose_first_event_takes_long_begins_without_it(monkeypatch):
    monkeypatch.setattr(sse, "HEADERS_TIMEOUT_S", 0.02)
    begun: list[int] = []
    messages: list[dict[str, Any]] = []

    async def events():
        while not messages:
            await asyncio.sleep(0.001)
        begun.append(len(messages))
        yield {"a": 1}

    async def scene():
        async def send(message: Any) -> None:
            await asyncio.sleep(0)
            messages.append(message)

        await EventStream(events())({"type": "http"}, None, send)  # type: ignore[arg-type]

    asyncio.run(asyncio.wait_for(scene(), PATIENCE))
    assert begun == [1]
    assert [message["type"] for message in messages] == ["http.response.start"] + ["http.response.body"] * 2


def test_a_failure_before_the_first_event_is_raised():
    async def events():
        raise InvalidParameter("no", "x")
        yield

    with pytest.raises(InvalidParameter):
        sent_by(events())


def test_a_failure_after_it_is_an_event():
    async def events():
        yield {"a": 1}
        raise InvalidParameter("no", "x")

    *_, failure, end = sent_by(events())
    assert json.loads(failure["body"].removeprefix(b"data: "))["error"]["message"] == "no"
    assert end["body"] == b"data: [DONE]\n\n" and not end["more_body"]


def test_whoever_leaves_a_stream_closes_its_events():
    closed: list[bool] = []

    async def events():
        try:
            yield {"a": 1}
            await asyncio.Event().wait()
        finally:
            closed.append(True)

    async def scene():
        async def send(_: Any) -> None: ...

        task = asyncio.create_task(EventStream(events())({"type": "http"}, None, send))  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(scene())
    assert closed == [True]
