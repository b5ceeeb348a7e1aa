"""The official client, unchanged, against a real socket."""

import openai
import pytest

from serving import NAME

ASK = [{"role": "user", "content": "Grüße, 漢字 ☃"}]


@pytest.fixture
def client(http):
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("how", [{"temperature": 0}, {"temperature": 1, "seed": 42}])
def test_chat(client, how):
    whole = client.chat.completions.create(model=NAME, messages=ASK, max_completion_tokens=40, **how)
    parts = list(
        client.chat.completions.create(
            model=NAME, messages=ASK, max_completion_tokens=40, stream=True, stream_options={"include_usage": True}, **how
        )
    )
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == whole.choices[0].message.content and whole.choices[0].message.role == "assistant"
    assert parts[-1].usage == whole.usage.model_copy(update={"prompt_tokens_details": parts[-1].usage.prompt_tokens_details})
    assert parts[-2].choices[0].finish_reason == whole.choices[0].finish_reason


@pytest.mark.parametrize("how", [{"temperature": 0}, {"temperature": 1, "seed": 42}])
@pytest.mark.parametrize("prompt", ["the quick brown", "héllo wörld ☃ 漢字"])
def test_completions(client, prompt, how):
    whole = client.completions.create(model=NAME, prompt=prompt, max_tokens=40, **how)
    parts = client.completions.create(model=NAME, prompt=prompt, max_tokens=40, stream=True, **how)
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text


def test_logprobs_and_n(client):
    answer = client.chat.completions.create(
        model=NAME, messages=ASK, max_tokens=3, n=2, logprobs=True, top_logprobs=2, temperature=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert all(len(token.top_logprobs) == 2 for choice in answer.choices for token in choice.logprobs.content)
    completion = client.completions.create(model=NAME, prompt="a", max_tokens=3, logprobs=2, echo=True)
    assert completion.choices[0].logprobs.token_logprobs[0] is None


def test_models(client):
    assert [model.id for model in client.models.list()] == [NAME, "also-tiny"]
    assert client.models.retrieve(NAME).id == NAME


def test_errors(client):
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="gpt-9", messages=ASK)
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=NAME, prompt="a", temperature=3)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=NAME, messages=ASK, temperature=3, stream=True)
