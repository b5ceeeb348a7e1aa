"""Values that are deep, huge or odd in places where they are read: the client's mistake on every protocol, never a 500."""

import json
from typing import Any

import pytest

JSON = {"content-type": "application/json"}
USER = {"role": "user", "content": "a"}
DEEP = "[" * 5000 + "]" * 5000
ROUTES = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [USER], "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/v1/messages": {"messages": [USER], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
}
ODD = {
    "deep": DEEP,
    "deep_object": '{"a":' * 5000 + "1" + "}" * 5000,
    "just_too_deep": "[" * 65 + "]" * 65,
    "nan": "NaN",
    "infinity": "-Infinity",
    "out_of_range": "1e400",
    "lone_surrogate": '"\\ud800"',
    "many_digits": "1" * 5000,
    "large_integer": str(10**30),
    "raw_bytes": '"\udcff"',
    "number_as_name": "{1: 2}",
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("path", ROUTES)
def test_odd_values_beside_a_good_request(http, path, odd):
    good = json.dumps(ROUTES[path])
    body = f'{good[:-1]}, "metadata": {ODD[odd]}, "extra": {ODD[odd]}}}'.encode("utf-8", "surrogateescape")
    response = http.post(path, content=body, headers=JSON)
    assert response.status_code == (400 if odd != "large_integer" else response.status_code), response.text
    assert response.status_code in (200, 400), response.text


def calls(arguments: Any) -> list[Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "c", "content": "1"}
    return [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, result]


ARGUMENTS = {
    "deep": DEEP,
    "deep_object": ODD["deep_object"],
    "many_digits": '{"a": ' + "1" * 5000 + "}",
    "not_json": '{"a": ',
    "surrogate": '{"a": "\\ud800"}',
    "nan": '{"a": NaN}',
    "large": json.dumps({"a": ["x"] * 50000}),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_of_earlier_calls(http, name):
    """The tiny model's template does not show calls, so what can be read is no mistake."""
    bodies = {
        "/v1/chat/completions": {"messages": calls(ARGUMENTS[name]), "max_tokens": 1},
        "/tokenize": {"messages": calls(ARGUMENTS[name])},
        "/v1/responses": {
            "input": [
                {"role": "user", "content": "a"},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": ARGUMENTS[name]},
                {"type": "function_call_output", "call_id": "c", "output": "1"},
            ],
            "max_output_tokens": 1,
        },
    }
    for path, body in bodies.items():
        response = http.post(path, json=body)
        wanted = (200, 400) if name in ("surrogate", "nan", "large") else (400,)
        assert response.status_code in wanted, (path, response.text)


@pytest.mark.parametrize("path", [path for path in ROUTES if path != "/detokenize"])
def test_nulls_and_wrong_types_everywhere(http, path):
    fields = [*ROUTES[path], "tools", "tool_choice", "metadata", "chat_template_kwargs", "stop", "model", "stream", "documents"]
    for name in fields:
        for value in (None, [], {}, [None], [[None]], {"a": None}, 0, -1, 1.5, True, "", [[]] * 50, "\x00"):
            response = http.post(path, json={**ROUTES[path], "max_tokens": 1, name: value})
            assert response.status_code in (200, 400, 404), (name, value, response.text)
