"""Families in turn, and decoders that transformers runs: a served model's tokens are transformers' greedy ones,
in every protocol.

One server per family, whose engine is a process of its own, as in `quire serve`. Prompts are cut in steps of 16 tokens.
"""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import selection
from forked import nursery
from more_families import MORE
from oracle import COMPOSITES, FALLBACK, FAMILIES, make_checkpoint, open_reference
from quire.config.families import architectures
from recomputed_families import RECOMPUTED
from recurrent_families import RECURRENT
from serving import NAME, Running, events_of
from tiny_model import VOCABULARY, make_tokenizer

# one checkpoint of each architecture: the first of the table
NATIVE = {family.architecture: name for name, family in reversed(FAMILIES.items())}
SAMPLE = ("persimmon", "bitnet")
WITH_EYES = ("Gemma3ForConditionalGeneration", "LlavaForConditionalGeneration")
ALL = {**FAMILIES, **FALLBACK, **COMPOSITES, **RECURRENT, **RECOMPUTED}
NAMES = [*sorted({*NATIVE.values()} - {*MORE}), *SAMPLE, *WITH_EYES]
STRUCTURED = ("llama", "persimmon")
NEW_TOKENS = 20
CORE, CHANGED = 3, 1  # of both lists
PROMPTS = [
    torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (37, 9)
]


def test_every_architecture_is_in_the_table():
    """Who adds a family to the registry adds a checkpoint of it to tests/oracle.py, and so to all tests of families."""
    generating = {name for name, card in architectures().items() if card.kind != "encoder"}
    assert {*NATIVE, *(family.architecture for family in RECURRENT.values())} == generating
    assert not set(SAMPLE) - set(FALLBACK) and len({FALLBACK[name].model for name in SAMPLE}) == len(SAMPLE)
    assert not {FALLBACK[name].model for name in SAMPLE} & set(architectures())


@dataclass
class Case:
    http: httpx.Client
    reference: Any
    digits: list[int]  # the ids of "0" and "1"

    def expected(self, prompt: list[int], only: list[int] | None = None, count: int = NEW_TOKENS) -> tuple[list[int], Any]:
        """transformers' greedy tokens and the logprobs [n, V] they were chosen by."""
        ids, logprobs = list(prompt), []
        for _ in range(count):
            with torch.inference_mode():
                logits = self.reference(torch.tensor([ids]), use_cache=False).logits[0, -1].float()
            logprobs.append(logits.log_softmax(-1))
            allowed = torch.full_like(logits, 0.0 if only is None else float("-inf"))
            allowed[only or []] = 0.0
            ids.append(int((logits + allowed).argmax()))
        return ids[len(prompt) :], torch.stack(logprobs)

    def ask(self, **more: Any) -> dict[str, Any]:
        body = {"model": NAME, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return self.post("/v1/completions", body | more)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    with nursery(tmp_path_factory.mktemp("engines"), "engine") as command:
        yield command


@contextlib.contextmanager
def served(name: str, directory: Path, command: tuple[str, ...]) -> Iterator[Case]:
    settings = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    if name == "gemma4":  # transformers has an input of its layers for every token of it
        settings["vocab_size_per_layer_input"] = VOCABULARY
    family = ALL[name]
    make_checkpoint(replace(family, settings=family.settings | settings), directory)
    tokenizer = make_tokenizer(directory)
    running = Running(directory, command, dtype="float32", max_num_batched_tokens=16)
    try:
        yield Case(running.http, open_reference(directory), [tokenizer.token_to_id("0"), tokenizer.token_to_id("1")])
        running.wait_idle()
    finally:
        running.close()


@pytest.mark.parametrize("name", selection.select(NAMES, ALL, CORE, CHANGED))
def test_served(tmp_path, engines, name):
    with served(name, tmp_path, engines) as case:
        check_answers(case)
        check_protocols(case)
        if name in STRUCTURED:
            check_structured(case)


MANY = [*sorted({*NATIVE.values()} & {*MORE}), "bamba", "lfm2"]


@pytest.mark.parametrize("name", selection.select(MANY, ALL, CORE, CHANGED))
def test_more_served(tmp_path, engines, name):
    with served(name, tmp_path, engines) as case:
        check_answers(case)


@pytest.mark.parametrize("name", selection.select([*RECOMPUTED], ALL, 1, 0))
def test_served_without_keys_and_values(tmp_path, engines, name):
    """Models of transformers whose layers do not fit the cache: it holds their tokens, and prefixes are found."""
    with served(name, tmp_path, engines) as case:
        check_answers(case)


def check_answers(case: Case) -> None:
    (first, logprobs), (second, _) = (case.expected(prompt) for prompt in PROMPTS)
    check_batch(case, first, second)
    check_prefix_hit_and_logprobs(case, first, logprobs)
    check_several_of_one(case, second)
    check_stream(case, second)


def check_batch(case: Case, first: list[int], second: list[int]) -> None:
    choices = case.ask(prompt=PROMPTS)["choices"]
    assert [choice["token_ids"] for choice in choices] == [first, second]


def check_prefix_hit_and_logprobs(case: Case, expected: list[int], logprobs: torch.Tensor) -> None:
    answer = case.ask(prompt=PROMPTS[0], logprobs=2)
    [choice] = answer["choices"]
    assert choice["token_ids"] == expected
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 36
    chosen = logprobs.gather(1, torch.tensor(expected)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(choice["logprobs"]["token_logprobs"]), chosen, atol=1e-3, rtol=1e-3)


def check_several_of_one(case: Case, expected: list[int]) -> None:
    choices = case.ask(prompt=PROMPTS[1], n=3, temperature=1.0, top_k=1)["choices"]
    assert [choice["token_ids"] for choice in choices] == [expected] * 3
    one, other = (case.ask(prompt=PROMPTS[1], n=2, temperature=1.0, seed=5)["choices"] for _ in range(2))
    assert [choice["token_ids"] for choice in one] == [choice["token_ids"] for choice in other]
    assert one[0]["token_ids"] != one[1]["token_ids"]


def check_stream(case: Case, expected: list[int]) -> None:
    body = {"model": NAME, "prompt": PROMPTS[1], "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    text = case.http.post("/v1/completions", json=body | {"stream": True, "return_token_ids": True}).text
    *events, last = events_of(text)
    assert last == "[DONE]"
    assert [token for event in events for token in event["choices"][0]["token_ids"]] == expected


def check_protocols(case: Case) -> None:
    """One conversation in every protocol, whole and as a stream."""
    model, messages = {"model": NAME}, [{"role": "user", "content": "the quick brown fox"}]
    prompt = case.post("/tokenize", model | {"messages": messages})["tokens"]
    expected, _ = case.expected(prompt)
    text = case.post("/detokenize", model | {"tokens": [token for token in expected if token > 1]})["prompt"]
    greedy = model | {"temperature": 0, "ignore_eos": True}
    chat = greedy | {"messages": messages, "max_tokens": NEW_TOKENS}
    answer = case.post("/v1/chat/completions", chat | {"return_token_ids": True})
    assert answer["prompt_token_ids"] == prompt
    assert answer["choices"][0]["token_ids"] == expected
    assert answer["choices"][0]["message"]["content"] == text
    events = events_of(case.http.post("/v1/chat/completions", json=chat | {"stream": True}).text)
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events[:-1]) == text
    response = greedy | {"input": messages, "max_output_tokens": NEW_TOKENS}
    assert case.post("/v1/responses", response)["output"][0]["content"][0]["text"] == text
    deltas = named_events(case.http.post("/v1/responses", json=response | {"stream": True}).text, "response.output_text.delta")
    assert "".join(event["delta"] for event in deltas) == text
    assert case.post("/v1/messages", chat)["content"][0]["text"] == text
    deltas = named_events(case.http.post("/v1/messages", json=chat | {"stream": True}).text, "content_block_delta")
    assert "".join(event["delta"]["text"] for event in deltas) == text


def named_events(text: str, name: str) -> list[Any]:
    blocks = [block.split("\n", 1) for block in text.split("\n\n") if block.startswith(f"event: {name}\n")]
    return [json.loads(data.removeprefix("data: ")) for _, data in blocks]


def check_structured(case: Case) -> None:
    expected, _ = case.expected(PROMPTS[1], only=case.digits, count=6)
    [choice] = case.ask(prompt=PROMPTS[1], structured_outputs={"regex": "[01]{6}"}, ignore_eos=False)["choices"]
    assert choice["token_ids"][:6] == expected
    assert choice["text"] == "".join("01"[case.digits.index(token)] for token in expected)
    assert choice["finish_reason"] == "stop"
