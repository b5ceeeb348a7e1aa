"""The official client against a real server process with the default model."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from server_process import serving

pytestmark = pytest.mark.model
LOCAL = (
    "--distributed-executor-backend",
    "uni",
    "--device",
    "cpu",
    "--dtype",
    "float32",  # without kernels for packed weights, every step would dequantize them
    "--max-model-len",
    "1024",
    "--kv-cache-memory-bytes",
    "128m",
)
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with (
        serving(Path("smollm2"), *LOCAL, "--api-key", "secret") as server,
        openai.OpenAI(base_url=f"{server.url()}/v1", api_key="secret", max_retries=0) as client,
    ):
        yield client


def test_chat(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "messages": QUESTION, "temperature": 0, "max_completion_tokens": 24}
    answer = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    text = answer.choices[0].message.content
    assert "Paris" in text and answer.choices[0].finish_reason == "stop"
    scores = answer.choices[0].logprobs.content
    assert len(scores) == answer.usage.completion_tokens and all(len(score.top_logprobs) == 2 for score in scores)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens


def test_completions(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 16, "temperature": 0.8, "seed": 5, "n": 2}
    answer = client.completions.create(**asked, logprobs=1)
    texts = ["", ""]
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in answer.choices] and texts[0] != texts[1]
    assert len(answer.choices[0].logprobs.tokens) == 16


def test_requests_without_sampling_fields_use_the_authors_defaults(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 16, "seed": 5}
    texts = [client.completions.create(**asked, **more).choices[0].text for more in ({}, {"temperature": 0.2, "top_p": 0.9})]
    assert texts[0] == texts[1] != client.completions.create(**asked, temperature=1, top_p=1).choices[0].text


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="tiny", messages=QUESTION, temperature=5)
    with pytest.raises(openai.NotFoundError, match="nobody"):
        client.chat.completions.create(model="nobody", messages=QUESTION)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    assert [model.id for model in client.models.list()] == ["tiny"]
