"""Structured outputs through the server: the fields, the errors, and what a hostile grammar does to others: nothing."""

import contextlib
import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from server_process import body, only_child, read_stream, serving, wait_for

from quire.config.server_args import ServerArgs
from quire.proc.spawn import is_stopped
from quire.serve import sse

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
HELLO = [{"role": "user", "content": "the quick brown fox"}]


def chat(http, **fields):
    answer = http.post("/v1/chat/completions", json={"model": "tiny", "messages": HELLO, "max_tokens": 120, **fields})
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    return choice["message"]["content"]


def complete(http, **fields):
    answer = http.post("/v1/completions", json={"model": "tiny", "prompt": "the", "max_tokens": 120, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def is_valid(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"ok", "n"} and isinstance(value["ok"], bool) and 0 <= value["n"] <= 99


def test_response_format(http):
    named = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    assert is_valid(chat(http, response_format=named))
    assert is_valid(complete(http, response_format=named))
    answer = http.post(
        "/v1/chat/completions",
        json={"model": "tiny", "messages": HELLO, "max_tokens": 60, "seed": 1, "response_format": {"type": "json_object"}},
    ).json()["choices"][0]
    assert answer["message"]["content"].startswith("{")
    tag = {"type": "structural_tag", "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
    free = {"model": "tiny", "messages": HELLO, "max_tokens": 5, "response_format": tag}
    assert http.post("/v1/chat/completions", json=free).status_code == 200


UNIQUE = {"type": "object", "properties": {"a": {"uniqueItems": True}}}
TOLD = "x-quire-schema-unenforced"


def requests_with(schema, **strict):
    """A schema in the words of the protocols: where it goes, the request, and how its errors name the field."""
    named = {"name": "n", "schema": schema, **strict}
    form = {"type": "json_schema", "json_schema": named}
    return [
        (url, {"model": "tiny", **request}, field)
        for url, request, field in (
            ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 16, "response_format": form}, "json_schema.schema"),
            ("/v1/completions", {"prompt": "a", "max_tokens": 16, "response_format": form}, "json_schema.schema"),
            (
                "/v1/responses",
                {"input": "a", "max_output_tokens": 16, "text": {"format": {**form, **named}}},
                "text.format.schema",
            ),
        )
    ]


def test_what_a_grammar_cannot_hold_to_is_told_in_a_header(http):
    for url, request, _ in [*requests_with(UNIQUE), *requests_with(UNIQUE, strict=False)]:
        answer = http.post(url, json=request)
        assert (answer.status_code, answer.headers.get(TOLD)) == (200, "uniqueItems"), (url, answer.text)
        with http.stream("POST", url, json={**request, "stream": True}) as stream:
            assert (stream.status_code, stream.headers.get(TOLD)) == (200, "uniqueItems"), url
            assert stream.read()
    for url, request, _ in requests_with({**UNIQUE, "properties": {"a": {}}}, strict=True):
        answer = http.post(url, json=request)
        assert (answer.status_code, answer.headers.get(TOLD)) == (200, None), (url, answer.text)


def test_what_a_grammar_cannot_hold_to_is_refused_by_name_when_that_is_strict(http):
    for url, request, field in requests_with(UNIQUE, strict=True):
        answer = http.post(url, json=request)
        assert answer.status_code == 400, (url, answer.text)
        error = answer.json()["error"]
        assert field in error["message"] and "$.properties.a: uniqueItems is more than" in error["message"], error
    plain = {"model": "tiny", "prompt": "a", "structured_outputs": {"json": UNIQUE, "strict": True}}
    assert "uniqueItems" in http.post("/v1/completions", json=plain).json()["error"]["message"]


def test_schemas_are_closed_unless_told_otherwise(http):
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    for seed in range(4):
        assert set(json.loads(chat(http, seed=seed, structured_outputs={"json": schema}))) == {"ok"}
    wide = {"json": schema, "disable_additional_properties": False}
    texts = [complete(http, seed=seed, max_tokens=40, structured_outputs=wide) for seed in range(8)]
    assert any(re.match(r'\s*\{\s*"ok"\s*:\s*(true|false)\s*,', text) for text in texts)
    counted = {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1}
    for options, told in ({}, None), ({"disable_additional_properties": False}, "minProperties"):
        request = {"model": "tiny", "prompt": "a", "max_tokens": 4, "structured_outputs": {"json": counted, **options}}
        assert http.post("/v1/completions", json=request).headers.get(TOLD) == told


def test_ebnf_and_many_choices(http):
    text = complete(http, structured_outputs={"grammar": 'root ::= word "x"\nword ::= [a-z]{1,9}'})
    assert re.fullmatch("[a-z]{1,9}x", text)
    words = [f"choice {i}" for i in range(10_000)]
    assert complete(http, structured_outputs={"choice": words}) in words


def test_structured_outputs(http):
    assert is_valid(chat(http, structured_outputs={"json": SCHEMA}))
    assert is_valid(chat(http, structured_outputs={"json": json.dumps(SCHEMA)}))
    assert re.fullmatch("[ab]{3,6}c", chat(http, structured_outputs={"regex": "[ab]{3,6}c"}))
    assert chat(http, structured_outputs={"choice": ["left", "right"]}) in ("left", "right")
    assert re.fullmatch("x+y", complete(http, structured_outputs={"grammar": 'root ::= "x" root | "xy"'}, temperature=0))


def test_a_stream_is_the_answer_in_pieces(http):
    fields = {"model": "tiny", "messages": HELLO, "max_tokens": 100, "seed": 5, "structured_outputs": {"json": SCHEMA}}
    whole = http.post("/v1/chat/completions", json=fields).json()["choices"][0]["message"]["content"]
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none") as client:
        pieces = client.chat.completions.create(
            model="tiny",
            messages=HELLO,
            max_tokens=100,
            seed=5,
            stream=True,
            extra_body={"structured_outputs": {"json": SCHEMA}},
        )
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole
    assert is_valid(whole)


def test_n_and_logprobs(http):
    answer = http.post(
        "/v1/chat/completions",
        json={
            "model": "tiny", "messages": HELLO, "max_tokens": 60, "n": 3, "seed": 1, "logprobs": True, "top_logprobs": 2,
            "structured_outputs": {"regex": "[a-z]{4}"},
        },
    ).json()  # fmt: skip
    for choice in answer["choices"]:
        assert re.fullmatch("[a-z]{4}", choice["message"]["content"])
        assert "".join(entry["token"] for entry in choice["logprobs"]["content"]).startswith(choice["message"]["content"])


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"json": {"type": "object", "properties": {"a": {"type": "strin"}}}}, "$.properties.a: Invalid type: strin"),
        ({"regex": "[a-"}, "unclosed"),
        ({"grammar": "start: missing"}, "missing"),
        ({"json": {"enum": ["x" * 300_000]}}, "at most"),
    ],
)
def test_a_bad_grammar_is_a_400_that_says_where(http, wrong, words):
    answer = http.post("/v1/chat/completions", json={"model": "tiny", "messages": HELLO, "n": 2, "structured_outputs": wrong})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "structured_outputs" and words in error["message"]


def impossible_requests():
    """Requests whose grammar the engine refuses, in every protocol."""
    wrong = {"type": "object", "properties": {"a": {"type": "strin"}}}
    form = {"type": "json_schema", "name": "x", "schema": wrong}
    call = {"name": "f", "input_schema": wrong}
    hello = {"messages": HELLO, "max_tokens": 8}
    no_token = {"structured_outputs": {"regex": "[ab]{4}"}, "allowed_token_ids": [0]}
    return [
        ("/v1/chat/completions", {**hello, "n": 2, "structured_outputs": {"json": wrong}}),
        ("/v1/chat/completions", {**hello, "n": 2, **no_token}),
        ("/v1/chat/completions", {**hello, "tools": [tool(wrong)], "tool_choice": "required"}),
        ("/v1/completions", {"prompt": ["a", "b", "c"], "n": 2, "structured_outputs": {"grammar": "start: missing"}}),
        ("/v1/completions", {"prompt": ["a", "b", "c"], "echo": True, **no_token}),
        ("/v1/responses", {"input": "a", "text": {"format": form}}),
        ("/v1/messages", {**hello, "tools": [call], "tool_choice": {"type": "any"}}),
    ]


def test_an_impossible_request_is_the_same_400_streamed_or_not(http, monkeypatch):
    monkeypatch.setattr(sse, "HEADERS_TIMEOUT_S", 0.0)  # the refusal is late, however fast it is
    for path, asked in impossible_requests():
        whole, streamed = (http.post(path, json={"model": "tiny", **asked, "stream": stream}) for stream in (False, True))
        assert whole.status_code == streamed.status_code == 400, (path, asked, whole.text, streamed.text)
        assert whole.json()["error"] == streamed.json()["error"]


def tool(parameters, name="f"):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


BAD = {"type": "object", "properties": {"a": {"type": "strin"}}}
GOOD = {"type": "object", "properties": {"a": {"type": "string"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": BAD}}
NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.fixture
def parsing(server):
    """A parser that was asked for adds nothing to the prompt, of which the tiny model takes 256 tokens."""
    with server.serve(ServerArgs(enable_auto_tool_choice=True, tool_call_parser="hermes")) as client:
        yield client


@pytest.mark.parametrize(
    "fields, param, begins",
    [
        ({"response_format": FORMAT}, "response_format", "response_format.json_schema.schema: $.properties.a: "),
        (
            {"tools": [tool(BAD)], "tool_choice": "required"},
            "tools[0].function.parameters",
            "tools[0].function.parameters: $.properties.a: ",
        ),
        (
            {"tools": [tool(GOOD, "g"), tool(BAD)], "tool_choice": "required"},
            "tools[1].function.parameters",
            "tools[1].function.parameters: $.properties.a: ",
        ),
        (
            {"tools": [tool(GOOD, "g"), tool(BAD)], "tool_choice": NAMED},
            "tools[1].function.parameters",
            "tools[1].function.parameters: $.properties.a: ",
        ),
        ({"structured_outputs": {"json": BAD}}, "structured_outputs", "structured_outputs: $.properties.a: "),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["x" * 300_000]}}}},
            "response_format",
            "response_format.json_schema.schema",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_names_the_field_that_was_sent(parsing, fields, param, begins, stream):
    answer = parsing.post("/v1/chat/completions", json={"model": "tiny", "messages": HELLO, "stream": stream, **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param) and error["message"].startswith(begins), error


def test_an_error_names_the_field_as_its_protocol_has_it(parsing):
    def refused(path, **fields):
        answer = parsing.post(path, json={"model": "tiny", **fields})
        assert answer.status_code == 400, answer.text
        return answer.json()["error"]

    error = refused("/v1/completions", prompt=["a", "b"], response_format=FORMAT)
    assert error["param"] == "response_format" and error["message"].startswith("response_format.json_schema.schema: $.prop")
    form = {"format": {"type": "json_schema", "name": "x", "schema": BAD}}
    error = refused("/v1/responses", input="a", text=form)
    assert error["param"] == "text.format.schema" and error["message"].startswith("text.format.schema: $.properties.a")
    flat = {"type": "function", "name": "f", "parameters": BAD}
    error = refused("/v1/responses", input="a", tools=[flat], tool_choice={"type": "function", "name": "f"})
    assert error["param"] == "tools[0].parameters" and error["message"].startswith("tools[0].parameters: $.properties.a")
    ask = {"messages": HELLO, "max_tokens": 9}
    error = refused("/v1/messages", **ask, output_config={"format": {"type": "json_schema", "schema": BAD}})
    assert error["message"].startswith("output_config.format.schema: $.properties.a")
    error = refused("/v1/messages", **ask, tools=[{"name": "f", "input_schema": BAD}], tool_choice={"type": "any"})
    assert error["message"].startswith("tools[0].input_schema: $.properties.a")
    error = refused("/v1/messages", **ask, tools=[{"name": "f", "input_schema": {"type": "array"}}])
    assert error["message"].startswith("tools[0].input_schema must")


def rules(count: int) -> str:
    return "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(count)), f'r{count}: "a"'])


ADVERSARIES = {
    "a megabyte": {"json": {"enum": [f"value {i} {'x' * 20}" for i in range(30_000)]}},
    "an endless product": {"json": {"type": "integer", "multipleOf": 99_999_989}},
    "a long chain of rules": {"grammar": rules(12_000)},
    "a million repetitions": {"regex": "a{1000000}"},
    "nested counts": {"regex": "((a{1,99}){1,99}){1,99}"},
    "a hundred thousand parentheses": {"regex": "(" * 100_000 + ")" * 100_000},
    "intersections": {"grammar": "start: A\nA: /(.*a.{15})/ & /(.*b.{16})/ & /(.*c.{17})/ & ~/(.*d.{9})/"},
    "very many properties": {
        "json": {"type": "object", "properties": {f"p{i}": {"pattern": f"a{{{i}}}"} for i in range(6000)}}
    },
}


HARMLESS = {"what makes others backtrack": {"regex": "(a+)+b"}}


def worked(pid: int) -> float:
    """Seconds of processor time, of a process and of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


class Neighbour(threading.Thread):
    """Asks for tokens until it has enough: how many came, and how long the processes that make them worked for one at most."""

    def __init__(self, client: httpx.Client, makers: list[int], **fields: object) -> None:
        super().__init__()
        self.tokens, self.dearest, self.enough = 0, 0.0, False
        self._client, self._makers, self._fields = client, makers, fields

    def run(self) -> None:
        while not self.enough:
            last = None
            with self._client.stream("POST", "/v1/completions", json=body(240, True) | self._fields) as response:
                for line in response.iter_lines():
                    if self.enough or not response.is_success:
                        return
                    if line.startswith("data: {"):
                        now = sum(worked(pid) for pid in self._makers)
                        self.dearest = max(self.dearest, now - (now if last is None else last))
                        last = now
                        self.tokens += 1


@contextlib.contextmanager
def listening(*neighbours: Neighbour) -> Iterator[None]:
    for neighbour in neighbours:
        neighbour.start()
    try:
        wait_for(lambda: all(neighbour.tokens > 3 for neighbour in neighbours))
        yield
        assert all(neighbour.is_alive() for neighbour in neighbours)
    finally:
        for neighbour in neighbours:
            neighbour.enough = True
        for neighbour in neighbours:
            neighbour.join()


def test_an_answer_goes_on_within_its_grammar_after_a_process_was_killed(serve_model):
    request = body(90, True) | {"structured_outputs": {"regex": "([a-z]+ )*"}, "temperature": 1.0, "seed": 3}
    with serving(serve_model, latency=0.02) as server, server.client() as client:

        def text(begun=lambda: None) -> str:
            events = read_stream(client, request, begun)
            assert events[-1] == "[DONE]"
            return "".join(choice["text"] for event in events[:-1] for choice in event["choices"])

        undisturbed = text()
        assert text(lambda: os.kill(server.grammar_pid(), signal.SIGKILL)) == undisturbed
        assert text(lambda: os.kill(server.engine_pid(), signal.SIGKILL)) == undisturbed
        assert re.fullmatch("[a-z ]+", undisturbed)


GROWING = 'start: s\ns: s s s | s s | LETTER | ""\nLETTER: /[a-z]/\n'  # every mask takes longer than the one before


# How long something takes depends on what else this machine does; how much work it is, and what others get meanwhile, does not.


def test_neither_masks_that_grow_nor_a_stopped_process_pause_others(serve_model):
    with serving(serve_model, latency=0.01) as server, server.client() as client:
        assert client.post("/v1/completions", json=body(3, False) | {"structured_outputs": {"regex": "a{3}"}}).is_success
        stopped = server.grammar_pid()
        hostile = Neighbour(client, [], structured_outputs={"grammar": GROWING}, temperature=1.0, seed=1)
        other = Neighbour(client, [])
        with listening(hostile, other):
            wait_for(lambda: other.tokens > 160)  # by then a process of its own follows the hostile one
            behind, begun = hostile.tokens, other.tokens
            wait_for(lambda: hostile.tokens > behind + 10)
            ahead = other.tokens - begun
        bound, other = Neighbour(client, [], structured_outputs={"regex": "[a-z]*"}), Neighbour(client, [])
        with listening(bound, other):
            os.kill(stopped, signal.SIGSTOP)
            try:
                wait_for(lambda: is_stopped(stopped))
                behind, begun = bound.tokens, other.tokens
                wait_for(lambda: other.tokens > begun + 100 or not is_stopped(stopped))  # it is given up after some seconds
                paused = other.tokens - begun
                waited = bound.tokens - behind
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(stopped, signal.SIGCONT)
    assert ahead > 25  # nobody waited for the masks that grow,
    assert paused > 20 > waited  # nor for those that do not come


def test_hostile_grammars_are_little_work_and_disturb_nobody(serve_model):
    with serving(serve_model, latency=0.02) as server, server.client() as client:
        warm = client.post("/v1/completions", json=body(3, False) | {"structured_outputs": {"regex": "a{3}"}})
        assert warm.status_code == 200, warm.text
        engine, grammars = makers = [server.engine_pid(), server.grammar_pid()]
        vetting = only_child(grammars, "quire.features.structured.grammar.worker")
        neighbours = [Neighbour(client, makers), Neighbour(client, makers, structured_outputs={"regex": "[a-z]*"})]
        work, tokens = {}, {}
        with listening(*neighbours):
            for name, grammar in (ADVERSARIES | HARMLESS).items():
                before, had = worked(grammars) + worked(vetting), [neighbour.tokens for neighbour in neighbours]
                answer = client.post("/v1/completions", json=body(3, False) | {"structured_outputs": grammar})
                tokens[name] = min(neighbour.tokens - begun for neighbour, begun in zip(neighbours, had, strict=True))
                work[name] = worked(grammars) + worked(vetting) - before
                assert answer.status_code == (200 if name in HARMLESS else 400), (name, answer.text)
        after = read_stream(client, body(4, True) | {"structured_outputs": {"choice": ["fine"]}})
        assert (server.engine_pid(), server.grammar_pid()) == (engine, grammars)
    shown = {name: f"{seconds:.2f} s, {tokens[name]} tokens" for name, seconds in work.items()}
    print(f"{shown}; at most {[neighbour.dearest for neighbour in neighbours]} s of work for a token")
    assert max(work.values()) < 2.0, shown
    # forty come in a second if nobody waits, and those who follow grammars, the engine first of all, do not compile them
    assert all(tokens[name] >= 10 * (seconds - 0.3) for name, seconds in work.items()), shown
    assert tokens["an endless product"] >= 10 and max(neighbour.dearest for neighbour in neighbours) < 0.3, shown
    assert after[-1] == "[DONE]"
