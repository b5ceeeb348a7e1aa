"""/v1/completions on the wire."""

import pytest

from quire.config.server_args import ServerArgs
from serving import NAME, error_of, events_of


def complete(http, **body):
    response = http.post("/v1/completions", json={"prompt": "the quick", "max_tokens": 6, "temperature": 0, **body})
    assert response.status_code == 200, response.text
    return response.json()


def stream(http, path="/v1/completions", **body):
    response = http.post(path, json={"max_tokens": 6, "temperature": 0, "stream": True, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response.text)
    assert events[-1] == "[DONE]" and events.count("[DONE]") == 1
    return events[:-1]


def test_the_whole_answer(http):
    answer = complete(http)
    choice = answer["choices"][0]
    assert answer["id"].startswith("cmpl-") and answer["object"] == "text_completion" and answer["model"] == NAME
    assert isinstance(answer["created"], int) and answer["system_fingerprint"].startswith("quire-")
    assert set(choice) == {
        "index", "text", "logprobs", "finish_reason", "stop_reason", "token_ids", "prompt_token_ids", "prompt_logprobs",
    }  # fmt: skip
    assert (choice["index"], choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == (0, "length", None, None)
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (2, 6, 8)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}  # two tokens fill no page


def test_max_tokens_is_16_by_default_and_the_rest_of_the_context_when_null(http):
    assert complete(http, max_tokens=16)["usage"]["completion_tokens"] == 16
    body = {"prompt": "the quick", "temperature": 0, "ignore_eos": True}
    assert http.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 16
    assert http.post("/v1/completions", json={**body, "max_tokens": None}).json()["usage"]["total_tokens"] == 256


def test_default_length_shrinks_where_there_is_less_room(http):
    answer = http.post("/v1/completions", json={"prompt": [5] * 250, "temperature": 0, "ignore_eos": True}).json()
    assert answer["usage"]["completion_tokens"] == 6


def test_cached_tokens_are_told(http):
    prompt = [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17]
    complete(http, prompt=prompt)
    assert complete(http, prompt=prompt)["usage"]["prompt_tokens_details"]["cached_tokens"] == 8
    assert complete(http, prompt=prompt, cache_salt="mine")["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_batches_keep_their_order(http):
    prompts = ["the quick", "a page", "héllo"]
    single = [complete(http, prompt=prompt)["choices"][0]["text"] for prompt in prompts]
    batch = complete(http, prompt=prompts)
    assert [(c["index"], c["text"]) for c in batch["choices"]] == list(enumerate(single))
    assert batch["usage"]["completion_tokens"] == 18
    ids = [http.post("/tokenize", json={"prompt": prompt}).json()["tokens"] for prompt in prompts]
    assert [c["text"] for c in complete(http, prompt=ids)["choices"]] == single
    assert complete(http, prompt=ids[0])["choices"][0]["text"] == single[0]


def test_n_choices_of_several_prompts(http):
    body = {"prompt": ["the quick", "a page"], "n": 3, "temperature": 1, "seed": 5}
    choices = complete(http, **body)["choices"]
    assert [c["index"] for c in choices] == list(range(6))
    assert len({c["text"] for c in choices}) > 3
    streamed = [""] * 6
    for chunk in stream(http, **body):
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert streamed == [c["text"] for c in choices]


def test_stream_order_and_usage(http):
    events = stream(http, prompt="the quick", stream_options={"include_usage": True, "continuous_usage_stats": True})
    *chunks, last = events
    assert len({chunk["id"] for chunk in events}) == 1
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == list(range(1, 7))
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 6
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == complete(http)["choices"][0]["text"]


def test_empty_stream_options_ask_for_no_usage(http):
    assert all(chunk.get("usage") is None for chunk in stream(http, prompt="the quick", stream_options={}))
    assert stream(http, prompt="the quick", stream_options={"include_usage": True})[-1]["usage"]["completion_tokens"] > 0


def test_a_server_may_tell_usage_unasked(server):
    with server.serve(ServerArgs(enable_force_include_usage=True)) as http:
        for options in (None, {}, {"include_usage": False}):
            chunks = stream(http, prompt="the quick", stream_options=options)
            counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
            assert counts[0] > 0 and counts == sorted(counts) and chunks[-1]["choices"] == []
        body = {"messages": [{"role": "user", "content": "fox"}], "max_tokens": 5, "stream": True}
        chunks = events_of(http.post("/v1/chat/completions", json=body).text)[:-1]
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks][-1] == 5
        assert all(chunk["usage"]["prompt_tokens"] > 0 for chunk in chunks)


def test_without_stream_options_there_is_no_usage(http):
    events = stream(http, prompt="the quick")
    assert all("usage" not in chunk and len(chunk["choices"]) == 1 for chunk in events)
    assert "system_fingerprint" in events[-1]


@pytest.mark.parametrize("body", [{}, {"temperature": 1.0, "seed": 11}, {"skip_special_tokens": False, "ignore_eos": True}])
@pytest.mark.parametrize("prompt", ["the quick brown", "héllo wörld ☃", "漢字", [0, 5, 226, 153]])
def test_streamed_text_is_the_text(http, prompt, body):
    body = {"prompt": prompt, "max_tokens": 60, "logprobs": 1, **body}
    whole = complete(http, **body)["choices"][0]
    chunks = [chunk["choices"][0] for chunk in stream(http, **body)]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    told = {name: [value for chunk in chunks for value in chunk["logprobs"][name]] for name in whole["logprobs"]}
    assert told["tokens"] == whole["logprobs"]["tokens"] and told["text_offset"] == whole["logprobs"]["text_offset"]
    assert told["token_logprobs"] == pytest.approx(whole["logprobs"]["token_logprobs"], abs=1e-3)  # cached or not
    assert [list(top) for top in told["top_logprobs"]] == [list(top) for top in whole["logprobs"]["top_logprobs"]]
    assert (chunks[-1]["finish_reason"], chunks[-1]["stop_reason"]) == (whole["finish_reason"], whole["stop_reason"])


def test_stream_interval(http):
    chunks = stream(http, prompt="the quick", max_tokens=9, stream_interval=4, return_token_ids=True)
    sizes = [len(chunk["choices"][0]["token_ids"]) for chunk in chunks]
    assert sum(sizes) == 9 and sizes[0] == 1 and sizes[1] == 4


def test_logprobs(http):
    choice = complete(http, logprobs=3, max_tokens=4)["choices"][0]
    logprobs = choice["logprobs"]
    assert {len(logprobs[name]) for name in ("text_offset", "token_logprobs", "tokens", "top_logprobs")} == {4}
    assert logprobs["text_offset"][0] == 0 and logprobs["text_offset"] == sorted(logprobs["text_offset"])
    for token, value, top in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert top[token] == value and value < 0 and len(top) <= 4
    assert complete(http, logprobs=0)["choices"][0]["logprobs"]["top_logprobs"][0].keys() == {
        complete(http, logprobs=0)["choices"][0]["logprobs"]["tokens"][0]
    }


def test_text_offsets_point_into_the_text(http):
    """Tokens that together make one character share its place."""
    text, ids = "a ☃ page 漢字", http.post("/tokenize", json={"prompt": "a ☃ page 漢字"}).json()["tokens"]
    choice = complete(http, prompt=ids, echo=True, max_tokens=0, logprobs=0)["choices"][0]
    offsets = choice["logprobs"]["text_offset"]
    assert choice["text"] == text and offsets[0] == 0 and max(offsets) <= len(text)
    assert [text[i] for i, token in zip(offsets, choice["logprobs"]["tokens"], strict=True) if token == " page"] == [" "]


def test_tokens_as_ids(http):
    choice = complete(http, logprobs=1, return_tokens_as_token_ids=True, return_token_ids=True)["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
    assert choice["prompt_token_ids"] == http.post("/tokenize", json={"prompt": "the quick"}).json()["tokens"]


def test_token_ids_in_a_stream(http):
    whole = complete(http, return_token_ids=True)["choices"][0]
    chunks = [chunk["choices"][0] for chunk in stream(http, prompt="the quick", return_token_ids=True)]
    assert [i for chunk in chunks for i in chunk["token_ids"]] == whole["token_ids"]
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [whole["prompt_token_ids"]] + [None] * (len(chunks) - 1)


def test_echo(http):
    plain = complete(http, logprobs=1)["choices"][0]
    echoed = complete(http, logprobs=1, echo=True)["choices"][0]
    assert echoed["text"] == "the quick" + plain["text"]
    assert echoed["logprobs"]["tokens"] == ["the", " quick", *plain["logprobs"]["tokens"]]
    assert echoed["logprobs"]["token_logprobs"][0] is None and echoed["logprobs"]["top_logprobs"][0] is None
    assert echoed["logprobs"]["token_logprobs"][1] < 0
    assert echoed["logprobs"]["text_offset"] == [0, 3, *(9 + offset for offset in plain["logprobs"]["text_offset"])]
    parts = [chunk["choices"][0] for chunk in stream(http, prompt="the quick", echo=True, logprobs=1)]
    assert "".join(part["text"] for part in parts) == echoed["text"]
    assert [t for part in parts for t in part["logprobs"]["tokens"]] == echoed["logprobs"]["tokens"]


def test_echo_of_token_ids(http):
    ids = http.post("/tokenize", json={"prompt": "a page"}).json()["tokens"]
    assert complete(http, prompt=ids, echo=True, max_tokens=1)["choices"][0]["text"].startswith("a page")


def test_echo_of_token_ids_keeps_special_tokens(http):
    ids = [0, *http.post("/tokenize", json={"prompt": "a page"}).json()["tokens"], 1]
    choice = complete(http, prompt=ids, echo=True, logprobs=0, max_tokens=2)["choices"][0]
    assert choice["text"].startswith("<s>a page</s>")
    offsets = dict(zip(choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"], strict=True))
    assert choice["logprobs"]["tokens"][0] == "<s>"
    assert all(choice["text"][offset:].startswith(token) for offset, token in offsets.items())


def test_characters_in_pieces_have_their_text_where_they_end(http):
    euro = http.post("/tokenize", json={"prompt": "\u20ac"}).json()["tokens"]
    assert len(euro) == 3
    told = complete(http, prompt=[*euro, euro[0]], echo=True, logprobs=1, max_tokens=1)["choices"][0]
    assert told["logprobs"]["tokens"][:4] == ["", "", "\u20ac", ""]
    scored = complete(http, prompt=euro, prompt_logprobs=0, max_tokens=1)["choices"][0]["prompt_logprobs"]
    assert [scored[i][str(euro[i])]["decoded_token"] for i in (1, 2)] == ["", "\u20ac"]
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "temperature": 0, "logprobs": True}
    forced = {token: http.post("/v1/chat/completions", json={**chat, "allowed_token_ids": [token]}).json() for token in euro}
    lead = forced[euro[0]]["choices"][0]["logprobs"]["content"]
    assert [(entry["token"], entry["bytes"]) for entry in lead] == [("", [0xE2])] * 3
    named = http.post(
        "/v1/chat/completions", json={**chat, "allowed_token_ids": euro[:1], "return_tokens_as_token_ids": True}
    ).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in named] == [f"token_id:{euro[0]}"] * 3


def test_echo_without_generation_scores_the_prompt(http):
    answer = complete(http, echo=True, max_tokens=0, logprobs=1)
    choice = answer["choices"][0]
    assert choice["text"] == "the quick" and choice["logprobs"]["tokens"] == ["the", " quick"]
    assert answer["usage"]["completion_tokens"] == 0 and choice["finish_reason"] == "length"
    parts = stream(http, prompt="the quick", echo=True, max_tokens=0, logprobs=1)
    assert [part["choices"][0]["text"] for part in parts] == ["the quick"]


def test_prompt_logprobs(http):
    choice = complete(http, prompt_logprobs=2)["choices"][0]
    first, second = choice["prompt_logprobs"]
    assert first is None and len(second) in (2, 3)
    assert set(next(iter(second.values()))) == {"logprob", "rank", "decoded_token"}


def test_stop_strings_and_their_reason(http):
    text = complete(http, max_tokens=12)["choices"][0]["text"]
    stop = text[4:6]
    cut = complete(http, max_tokens=12, stop=stop)["choices"][0]
    assert cut["text"] == text[: text.index(stop)] and (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
    kept = complete(http, max_tokens=12, stop=[stop], include_stop_str_in_output=True)["choices"][0]
    assert kept["text"] == text[: text.index(stop) + len(stop)]
    chunks = [chunk["choices"][0] for chunk in stream(http, prompt="the quick", max_tokens=12, stop=stop)]
    assert "".join(chunk["text"] for chunk in chunks) == cut["text"] and chunks[-1]["stop_reason"] == stop


def test_stop_token_ids_and_their_reason(http):
    ids = complete(http, return_token_ids=True)["choices"][0]["token_ids"]
    choice = complete(http, stop_token_ids=[ids[2]], return_token_ids=True)["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"], choice["token_ids"]) == ("stop", ids[2], ids[:3])


def test_sampling_fields_reach_the_engine(http):
    ids = complete(http, return_token_ids=True)["choices"][0]["token_ids"]
    assert complete(http, allowed_token_ids=[40], return_token_ids=True)["choices"][0]["token_ids"] == [40] * 6
    biased = complete(http, logit_bias={"41": 100}, return_token_ids=True)["choices"][0]["token_ids"]
    assert biased == [41] * 6
    assert complete(http, logit_bias={str(ids[0]): -100}, return_token_ids=True)["choices"][0]["token_ids"][0] != ids[0]
    ended = complete(http, logit_bias={"1": 100}, return_token_ids=True)["choices"][0]
    assert (ended["finish_reason"], ended["token_ids"], ended["text"]) == ("stop", [1], "")
    assert complete(http, logit_bias={"1": 100}, ignore_eos=True)["usage"]["completion_tokens"] == 6
    assert complete(http, logit_bias={"1": 100}, min_tokens=3)["usage"]["completion_tokens"] == 4
    word = complete(http)["choices"][0]["text"][0]
    assert not complete(http, bad_words=[word])["choices"][0]["text"].startswith(word)


def test_repetition_ends_the_text(http):
    answer = complete(
        http,
        allowed_token_ids=[40],
        max_tokens=50,
        repetition_detection={"max_pattern_size": 2, "min_pattern_size": 1, "min_count": 5},
    )
    assert answer["choices"][0]["finish_reason"] == "repetition" and answer["usage"]["completion_tokens"] < 12


def test_truncation_keeps_the_end_or_the_beginning(http):
    ids = list(range(10, 30))
    left = complete(http, prompt=ids, truncate_prompt_tokens=5, return_token_ids=True)
    assert left["choices"][0]["prompt_token_ids"] == ids[-5:] and left["usage"]["prompt_tokens"] == 5
    right = complete(http, prompt=ids, truncate_prompt_tokens=5, truncation_side="right", return_token_ids=True)
    assert right["choices"][0]["prompt_token_ids"] == ids[:5]
    fitted = complete(http, prompt=[5] * 1000, truncate_prompt_tokens=-1, max_tokens=10)
    assert fitted["usage"]["prompt_tokens"] == 246


def test_special_tokens_are_added_unless_not_wanted(http):
    """This tokenizer adds none; the flag must reach it all the same, so its refusal to be a string is the proof."""
    assert complete(http, add_special_tokens=False)["usage"]["prompt_tokens"] == 2
    assert http.post("/v1/completions", json={"prompt": "a", "add_special_tokens": "maybe"}).status_code == 400


def test_ids_come_from_the_client_if_it_has_some(http):
    assert complete(http, request_id="abc")["id"] == "cmpl-abc"
    body = {"prompt": "a", "max_tokens": 1}
    assert http.post("/v1/completions", json=body, headers={"X-Request-Id": "xyz"}).json()["id"] == "cmpl-xyz"
    response = http.post("/v1/completions", json={**body, "request_id": "two words"})
    assert error_of(response)["param"] == "request_id"


def test_timing_on_request(http):
    body = {"prompt": "a", "max_tokens": 3}
    assert http.post("/v1/completions", json=body).json()["metrics"] is None
    headers = {"X-Request-Metrics": "1"}
    times = http.post("/v1/completions", json=body, headers=headers).json()["metrics"]
    assert times["preemptions"] == 0
    assert all(times[name] >= 0 for name in times)
    assert times["queue_time_ms"] + times["prefill_time_ms"] == pytest.approx(times["time_to_first_token_ms"])
    assert http.post("/v1/completions", json={**body, "n": 2}, headers=headers).json()["metrics"] is None
    streamed = events_of(http.post("/v1/completions", json={**body, "stream": True}, headers=headers).text)
    assert ["metrics" in event for event in streamed[:-1]] == [False, False, True]


def test_any_served_name_and_no_name(http):
    assert complete(http, model="also-tiny")["model"] == "also-tiny"
    assert complete(http)["model"] == NAME


def test_unknown_fields_are_ignored(http):
    assert complete(http, no_such_field={"a": 1})["choices"][0]["text"] == complete(http)["choices"][0]["text"]


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"n": True}, "body.n", "Input should be a number, got a boolean"),
        ({"temperature": True}, "body.temperature", "Input should be a number, got a boolean"),
        ({"prompt": [True]}, "body.prompt", "should be text, token ids, or a list of either"),
        ({"stop_token_ids": [1, True]}, "body.stop_token_ids", "Input should be token ids, got a boolean among them"),
        ({"n": 0}, "n", "n must be between 1 and 1024, got 0"),
    ],
)
def test_numbers_that_are_none(http, body, param, message):
    answer = http.post("/v1/completions", json={"prompt": "the", "max_tokens": 1, **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param) and message in error["message"]


@pytest.mark.parametrize("deltas", [True, False])
def test_pieces_of_a_stream_are_logged_unless_switched_off(server, caplog, deltas):
    settings = ServerArgs(enable_log_requests=True, enable_log_outputs=True, enable_log_deltas=deltas, max_log_len=3)
    with server.serve(settings) as http, caplog.at_level("INFO", "quire.obs.logs"):
        chunks = stream(http, prompt="the quick", max_tokens=4)
        complete(http, prompt="the quick", max_tokens=4)
    pieces = [record.getMessage() for record in caplog.records if "streaming delta" in record.getMessage()]
    assert len(pieces) == (len(chunks) if deltas else 0)
    assert not deltas or f"output: {chunks[0]['choices'][0]['text'][:3]!r}" in pieces[0]
