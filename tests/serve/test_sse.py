import json

from quire.serve.sse import encode_event


def test_an_event_is_one_line_whoever_reads_it():
    event = {"text": "a\u2028b\u2029c\u0085d\ne ☃"}
    data = encode_event(event).decode()
    assert len(data.splitlines()) == 2 and data.endswith("\n\n")
    assert json.loads(data.removeprefix("data: ")) == event
    assert "☃" in data
