import json
import time
from collections.abc import Mapping
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.bench.client import BadResponse, EventReader, Origin, ResponseParser
from quire.bench.metrics import Record
from quire.bench.openai import StreamReceiver, error_text
from quire.types.errors import ConfigError


class Heard:
    def __init__(self) -> None:
        self.status, self.headers, self.content, self.stamps = 0, {}, b"", []

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        self.status, self.headers = status, dict(headers)

    def body(self, data: bytes, now: float) -> None:
        self.content += data
        self.stamps.append(now)


CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-A: b\r\n\r\n"
    b"5\r\nhello\r\nB;note=1\r\n, wide worl\r\n1\r\nd\r\n0\r\nTrailer: x\r\n\r\n"
)
SIZED = (
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 404 Not Found\r\nContent-Length: 17\r\nConnection: close\r\n\r\nhello, wide world"
)


@pytest.mark.parametrize(("raw", "status", "keep"), [(CHUNKED, 200, True), (SIZED, 404, False)])
@given(cuts=st.lists(st.integers(0, 200), max_size=8))
def test_a_response_is_the_same_however_it_is_cut(raw: bytes, status: int, keep: bool, cuts: list[int]) -> None:
    heard = Heard()
    parser = ResponseParser(heard)
    edges = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
    ended = [parser.feed(raw[start:end], 1.0) for start, end in pairwise(edges)]
    assert ended[-1]
    assert parser.complete
    assert not any(done for done, end in zip(ended, edges[1:], strict=True) if end < len(raw))
    assert (heard.status, heard.content, parser.keep_alive) == (status, b"hello, wide world", keep)


def test_a_body_without_length_ends_with_the_connection() -> None:
    heard = Heard()
    parser = ResponseParser(heard)
    assert not parser.feed(b"HTTP/1.1 200 OK\r\n\r\nhal", 1.0)
    assert not parser.feed(b"lo", 2.0)
    parser.close()
    assert (parser.complete, parser.keep_alive, heard.content, heard.stamps) == (True, False, b"hallo", [1.0, 2.0])


def test_a_response_without_body_is_complete_at_once() -> None:
    for raw in (b"HTTP/1.1 204 No Content\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"):
        assert ResponseParser(Heard()).feed(raw, 0.0)


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 okay\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20000,
    ],
)
def test_what_is_not_http_is_refused(raw: bytes) -> None:
    with pytest.raises(BadResponse):
        ResponseParser(Heard()).feed(raw, 0.0)


@pytest.mark.parametrize("cut", [0, 10, 60, 70, len(CHUNKED) - 1])
def test_a_cut_response_is_not_a_whole_one(cut: int) -> None:
    parser = ResponseParser(Heard())
    parser.feed(CHUNKED[:cut], 0.0)
    with pytest.raises(BadResponse):
        parser.close()


@given(cuts=st.lists(st.integers(0, 80), max_size=8))
def test_events_are_the_same_however_they_are_cut(cuts: list[int]) -> None:
    raw = b": hi\n\ndata: one\n\nevent: x\r\ndata:two\r\n\r\ndata: a\ndata: b\n\ndata: [DONE]\n\ndata: half"
    edges = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
    reader = EventReader()
    events = [event for start, end in pairwise(edges) for event in reader.feed(raw[start:end])]
    assert events == [b"one", b"two", b"a\nb", b"[DONE]"]


def test_where_a_server_is() -> None:
    assert Origin.parse("127.0.0.1:8000") == Origin(False, "127.0.0.1", 8000)
    assert Origin.parse("https://a.example/x/") == Origin(True, "a.example", 443, "/x")
    plain, openai_style = Origin.parse("http://h"), Origin.parse("http://h/api/v1")
    assert plain.path("/v1/completions") == "/v1/completions"
    assert openai_style.path("/v1/completions") == "/api/v1/completions"
    assert openai_style.path("/chat/completions") == "/api/v1/chat/completions"
    assert openai_style.root("/tokenize") == "/api/tokenize"
    for bad in ("ftp://x", "http://", "http://h:port", "http://name:secret@h"):
        with pytest.raises(ConfigError, match="base-url"):
            Origin.parse(bad)


def stream(*events: object, content_type: str = "text/event-stream", status: int = 200, keep_text: bool = False) -> Record:
    """A record of a stream whose n-th event comes at second n."""
    record = Record(sent=0.0)
    receiver = StreamReceiver(record, keep_text)
    receiver.head(status, {"content-type": content_type})
    for second, event in enumerate(events, 1):
        data = event if isinstance(event, str) else json.dumps(event)
        receiver.body(f"data: {data}\n\n".encode(), float(second))
    receiver.finish(99.0)
    return record


def text(value: str, finish: str | None = None, **more: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "text": value, "finish_reason": finish, **more}]}


def delta(finish: str | None = None, **fields: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def usage(tokens: int, prompt: int = 7, cached: int = 0) -> dict[str, object]:
    counts = {"completion_tokens": tokens, "prompt_tokens": prompt, "prompt_tokens_details": {"cached_tokens": cached}}
    return {"choices": [], "usage": counts}


def test_a_completion_stream() -> None:
    record = stream(text("a"), text(""), text("b", "stop"), usage(3, 7, 4), "[DONE]", keep_text=True)
    assert (record.error, record.arrivals, record.end) == (None, [1.0, 2.0, 3.0], 5.0)
    assert (record.output_tokens, record.prompt_tokens, record.cached_tokens, record.text) == (3, 7, 4, "ab")


def test_a_chat_stream_opens_without_a_token() -> None:
    opening = delta(role="assistant", content="")
    record = stream(opening, delta(content="a"), delta(reasoning="hm"), delta("stop"), usage(2), "[DONE]")
    assert (record.error, record.arrivals, record.output_tokens) == (None, [2.0, 3.0], 2)
    assert stream(delta(role="assistant", content="a"), delta("stop"), usage(1), "[DONE]").arrivals == [1.0]


def test_an_empty_last_chunk_is_a_token_only_if_one_is_missing() -> None:
    assert stream(text("a"), text("", "stop"), usage(2), "[DONE]").arrivals == [1.0, 2.0]
    assert stream(text("a"), text("", "stop"), usage(1), "[DONE]").arrivals == [1.0]


def test_without_usage_chunks_are_tokens() -> None:
    record = stream(text("a"), text("b"), text("c", "length"), "[DONE]")
    assert (record.output_tokens, record.counted, record.error) == (3, False, None)


def test_no_done_but_a_finish_reason_is_an_end() -> None:
    record = stream(text("a"), text("b", "length"), usage(2))
    assert (record.error, record.end) == (None, 99.0)


@pytest.mark.parametrize(
    ("events", "error"),
    [
        ((text("a"),), "the stream was cut after 1 tokens"),
        ((), "the stream was cut after 0 tokens"),
        ((usage(0), "[DONE]"), "the stream held no token"),
        ((text("a"), {"error": {"message": "out of pages", "code": 500}}, "[DONE]"), "error in the stream: out of pages"),
        ((text("a", "abort"), "[DONE]"), "the server aborted the request"),
        ((text("a", "error"), "[DONE]"), "the server ended the answer with an error"),
        (("nonsense", "[DONE]"), "the stream holds something that is no chunk: nonsense"),
        (("[1]", "[DONE]"), "the stream holds something that is no chunk: [1]"),
        ((text("ab", "length", token_ids=[1, 2]), usage(3), "[DONE]"), "the stream had 2 token ids, but usage reports 3"),
    ],
)
def test_streams_that_fail(events: tuple[object, ...], error: str) -> None:
    assert stream(*events).error == error


def test_streams_that_carry_all_token_ids() -> None:
    assert stream(text("ab", token_ids=[1, 2]), text("c", "length", token_ids=[3]), usage(3), "[DONE]").error is None


def test_an_answer_that_is_no_stream() -> None:
    assert stream("x", content_type="application/json").error is not None


@pytest.mark.parametrize(
    ("said", "raw", "shown"),
    [
        ({"error": {"message": "no  such\nmodel"}}, b"", "HTTP 404: no such model"),
        ({"error": "Unauthorized"}, b"", "HTTP 404: Unauthorized"),
        ({"detail": "Not Found"}, b"", "HTTP 404: Not Found"),
        (None, b"<html>", "HTTP 404: <html>"),
        (None, b"", "HTTP 404"),
    ],
)
def test_error_texts(said: object, raw: bytes, shown: str) -> None:
    assert error_text(said, "HTTP 404", raw) == shown


def test_a_large_packet_of_small_chunks_is_parsed_in_one_pass() -> None:
    event = b"data: " + json.dumps(text("a")).encode() + b"\n\n"
    raw = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + (b"%x\r\n%s\r\n" % (len(event), event)) * 20000
    record = Record()
    receiver = StreamReceiver(record)
    parser = ResponseParser(receiver)
    start = time.thread_time()
    parser.feed(raw.replace(b"OK\r\n", b"OK\r\nContent-Type: text/event-stream\r\n", 1), 1.0)
    assert time.thread_time() - start < 30.0  # copying the rest for every chunk would take minutes
    assert len(record.arrivals) == 20000
