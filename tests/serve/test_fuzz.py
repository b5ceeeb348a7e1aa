"""Bodies of valid, nearly valid and absurd values: no answer is a 500, all are well formed, and the server goes on.

QUIRE_FUZZ=5000 sends that many bodies instead of a few.
"""

import asyncio
import json
import os
from typing import Any

import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from patience import PATIENCE
from serving import NAME, error_of, events_of

AT_ONCE = 8
BODIES = int(os.environ.get("QUIRE_FUZZ", "200"))

EDGES = [0, 1, -1, 20, 21, 256, 257, 319, 320, 2**31 - 1, 2**31, -(2**31), 2**63 - 1, 2**63, -(2**63), 2**64, 10**30]
INTEGERS = st.one_of(st.integers(-2, 8), st.sampled_from(EDGES))
REALS = st.one_of(
    st.floats(0, 2),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([0, 1, -1, 0.0, 5e-324, 1e-46, 1e-40, 1e-6, 0.005, 1e39, 1e308, -0.0, 2, 2.5]),
)
TEXTS = st.one_of(
    st.sampled_from(
        ["", "a", "the quick brown", "héllo ☃ 漢字", "\x00", "</s>", "<s>", " ", "{{ 7 * 7 }}", "🙂" * 50, "x" * 3000]
    ),
    st.text(max_size=20),
)
IDS = st.one_of(st.integers(0, 319), INTEGERS)
JUNK = st.recursive(
    st.one_of(st.none(), st.booleans(), INTEGERS, REALS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)),
    max_leaves=8,
)


def mostly(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.integers(0, 29).flatmap(lambda dice: JUNK if dice == 23 else values)  # 0 would come far too often


FLAGS = st.booleans()
COMMON = {
    "model": st.sampled_from([NAME, "also-tiny", None, "", "gpt-9"]),
    "frequency_penalty": REALS,
    "presence_penalty": REALS,
    "repetition_penalty": REALS,
    "temperature": st.one_of(REALS, st.just(0)),
    "top_p": REALS,
    "top_k": INTEGERS,
    "min_p": REALS,
    "logit_bias": st.dictionaries(st.one_of(st.integers(0, 330).map(str), TEXTS), REALS, max_size=4),
    "n": st.one_of(st.integers(1, 3), INTEGERS),
    "seed": INTEGERS,
    "stop": st.one_of(TEXTS, st.lists(TEXTS, max_size=5)),
    "stop_token_ids": st.lists(IDS, max_size=4),
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": FLAGS, "continuous_usage_stats": FLAGS}),
    "use_beam_search": st.sampled_from([False, False, True]),
    "length_penalty": REALS,
    "include_stop_str_in_output": FLAGS,
    "ignore_eos": FLAGS,
    "min_tokens": INTEGERS,
    "skip_special_tokens": FLAGS,
    "spaces_between_special_tokens": FLAGS,
    "truncate_prompt_tokens": INTEGERS,
    "truncation_side": st.sampled_from(["left", "right", "up"]),
    "prompt_logprobs": INTEGERS,
    "logprob_token_ids": st.lists(IDS, max_size=4),
    "allowed_token_ids": st.lists(IDS, max_size=4),
    "bad_words": st.lists(TEXTS, max_size=4),
    "repetition_detection": st.fixed_dictionaries(
        {}, optional={"max_pattern_size": INTEGERS, "min_pattern_size": INTEGERS, "min_count": INTEGERS}
    ),
    "priority": INTEGERS,
    "request_id": TEXTS,
    "session_id": TEXTS,
    "cache_salt": TEXTS,
    "user": TEXTS,
    "return_tokens_as_token_ids": FLAGS,
    "return_token_ids": FLAGS,
    "stream_interval": INTEGERS,
    "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}, {}]),
    "echo": FLAGS,
    "add_special_tokens": FLAGS,
    "vllm_xargs": st.just({}),
    "nobody_knows_this": JUNK,
}
PROMPTS = st.one_of(
    st.sampled_from(["a", "the quick", "héllo ☃", ["a", "漢字"], [5, 6, 7], [[5], [6, 7]]]),
    TEXTS,
    st.lists(IDS, max_size=12),
    st.lists(st.integers(0, 319), min_size=1, max_size=300),
    st.lists(TEXTS, max_size=3),
    st.lists(st.lists(IDS, max_size=5), max_size=3),
)
PARTS = st.fixed_dictionaries({"type": st.sampled_from(["text", "text", "refusal", "image_url"])}, optional={"text": TEXTS})
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": mostly(st.sampled_from(["user", "assistant", "system", "tool"]))},
        optional={"content": mostly(st.one_of(TEXTS, st.lists(PARTS))), "name": JUNK, "tool_calls": JUNK},
    ),
    min_size=1,
    max_size=4,
)
TEMPLATES = {
    "add_generation_prompt": FLAGS,
    "continue_final_message": FLAGS,
    "chat_template": st.sampled_from([None, "{{ messages }}"]),
    "chat_template_kwargs": st.dictionaries(TEXTS, JUNK, max_size=3),
    "tools": st.one_of(st.just([]), st.lists(st.just({"type": "function", "function": {"name": "f"}}), max_size=1)),
    "tool_choice": st.sampled_from(["none", "auto", "required", {"type": "function"}]),
    "documents": st.lists(st.dictionaries(TEXTS, JUNK, max_size=2), max_size=2),
}
LENGTHS = st.integers(0, 9).flatmap(lambda dice: INTEGERS if dice == 7 else st.integers(1, 6))


def body_of(required: dict[str, Any], optional: dict[str, Any], most: int = 4) -> st.SearchStrategy[dict[str, Any]]:
    """The required fields, and some of the others: all at once would always be refused for one of them."""
    names = st.lists(st.sampled_from(sorted(optional)), max_size=most, unique=True)
    return names.flatmap(
        lambda chosen: st.fixed_dictionaries(
            {name: mostly(values) for name, values in {**required, **{name: optional[name] for name in chosen}}.items()}
        )
    )


COMPLETIONS = body_of(
    {"prompt": PROMPTS, "max_tokens": LENGTHS, "stream": FLAGS}, {**COMMON, "logprobs": INTEGERS, "suffix": TEXTS}
)
CHATS = body_of(
    {"messages": MESSAGES, "max_tokens": LENGTHS, "stream": FLAGS},
    {**COMMON, **TEMPLATES, "logprobs": FLAGS, "top_logprobs": INTEGERS, "max_completion_tokens": LENGTHS},
)
TOKENIZES = st.one_of(
    body_of({"prompt": TEXTS}, {"model": COMMON["model"], "add_special_tokens": FLAGS, "return_token_strs": FLAGS}),
    body_of({"messages": MESSAGES}, {**TEMPLATES, "return_token_strs": FLAGS}),
)
REQUESTS = st.one_of(
    st.tuples(st.just("/v1/completions"), COMPLETIONS),
    st.tuples(st.just("/v1/chat/completions"), CHATS),
    st.tuples(st.just("/v1/completions"), COMPLETIONS),
    st.tuples(st.just("/v1/chat/completions"), CHATS),
    st.tuples(st.just("/tokenize"), TOKENIZES),
    st.tuples(st.just("/detokenize"), body_of({"tokens": st.lists(IDS, max_size=9)}, {"model": COMMON["model"]})),
    st.tuples(st.sampled_from(["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]), JUNK),
)


def check(response: httpx.Response) -> None:
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        error = error_of(response)
        assert error["message"] and "Traceback" not in error["message"] and "File " not in error["message"]
    elif response.headers["content-type"].startswith("text/event-stream"):
        events = events_of(response.text)
        assert events[-1] == "[DONE]" and all("error" not in event for event in events), events[-2:]
    else:
        assert isinstance(json.loads(response.text), dict)


async def send(url: httpx.URL, requests: list[tuple[str, Any]]) -> list[httpx.Response]:
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
        return await asyncio.gather(*[client.post(path, json=body) for path, body in requests])


def test_no_body_is_the_servers_fault(shared_server):
    seen: dict[int, int] = {}

    @settings(
        max_examples=-(-BODIES // AT_ONCE), deadline=None, database=None, derandomize="QUIRE_FUZZ" not in os.environ,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.lists(REQUESTS, min_size=AT_ONCE, max_size=AT_ONCE))
    def fuzz(requests: list[tuple[str, Any]]) -> None:
        for response in asyncio.run(send(shared_server.http.base_url, requests)):
            seen[response.status_code] = seen.get(response.status_code, 0) + 1
            check(response)

    fuzz()
    print(f"answers by status: {seen}")
    assert seen[200] > seen[400] / 20, f"hardly anything was generated: {seen}"
    shared_server.wait_idle()
    assert shared_server.llm.restarts == 0 and shared_server.llm.state == "ready"
    answer = shared_server.http.post("/v1/completions", json={"prompt": "the quick", "max_tokens": 4, "temperature": 0})
    assert answer.json()["usage"]["completion_tokens"] == 4
