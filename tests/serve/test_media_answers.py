"""A trained model that reads digits, served: every answer is that of transformers to the same picture, in every protocol."""

import base64
import io
import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from serving import events_of

READER = Path(__file__).parents[1] / "fixtures" / "reader-llava"
FIXED = [path.read_bytes() for path in sorted((READER / "pictures").iterdir())]
EXPECTED = json.loads((READER / "expected_png.json").read_text())
COUNT = 64
MAX_TOKENS = 16  # the least of /v1/responses
IMAGE = 12


def made(seed):
    """Return a picture of parts of two others, as a file."""
    chance = random.Random(seed)
    left, right = (np.asarray(Image.open(io.BytesIO(chance.choice(FIXED))).convert("RGB")) for _ in range(2))
    out = io.BytesIO()
    Image.fromarray(np.hstack([left[:, :16], np.roll(right, seed % 5, 0)[:, 16:]])).save(out, "PNG")
    return out.getvalue()


PICTURES = [*FIXED, *(made(seed) for seed in range(COUNT - len(FIXED)))]


@pytest.fixture
def server(reader_server):
    yield reader_server
    reader_server.wait_idle()


def data(i):
    return base64.b64encode(PICTURES[i]).decode()


def url(i):
    return f"data:image/png;base64,{data(i)}"


def part(i):
    return {"type": "image_url", "image_url": {"url": url(i)}}


def block(i):
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data(i)}}


TEXT = {"type": "text", "text": "?"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
GREEDY = {"temperature": 0, "max_tokens": MAX_TOKENS}
OLLAMA = {"stream": False, "options": {"temperature": 0, "num_predict": MAX_TOKENS}}


def message_of(answer):
    return answer["choices"][0]["message"]["content"]


def output_of(answer):
    return answer["output"][0]["content"][0]["text"]


def user(*content):
    return [{"role": "user", "content": list(content)}]


# path, body for a picture, and the text of its answer
PROTOCOLS = {
    "chat": (
        "/v1/chat/completions",
        lambda i: {"messages": user(part(i), TEXT), "add_special_tokens": True, **GREEDY},
        message_of,
    ),
    "tool": (
        "/v1/chat/completions",
        lambda i: {
            "messages": [
                {"role": "user", "content": "="},
                {"role": "assistant", "content": "", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "a", "content": [part(i), TEXT]},
            ],
            **GREEDY,
        },
        message_of,
    ),
    "responses": (
        "/v1/responses",
        lambda i: {
            "input": user({"type": "input_image", "image_url": url(i)}, {"type": "input_text", "text": "?"}),
            "temperature": 0,
            "max_output_tokens": MAX_TOKENS,
        },
        output_of,
    ),
    "anthropic": (
        "/v1/messages",
        lambda i: {"messages": user(block(i), TEXT), **GREEDY},
        lambda answer: answer["content"][0]["text"],
    ),
    "ollama": (
        "/api/chat",
        lambda i: {"messages": [{"role": "user", "content": "?", "images": [data(i)]}], **OLLAMA},
        lambda answer: answer["message"]["content"],
    ),
    "ollama's prompt": (
        "/api/generate",
        lambda i: {"prompt": "?", "images": [data(i)], **OLLAMA},
        lambda answer: answer["response"],
    ),
}


def ask(server, protocol, i):
    path, body, text = PROTOCOLS[protocol]
    answer = server.http.post(path, json=body(i))
    assert answer.status_code == 200, answer.text
    return text(answer.json())


@pytest.fixture(scope="module")
def oracle(reader_server):
    """Return transformers' answers to every picture, by protocol."""
    import torch
    from transformers import AutoImageProcessor, LlavaForConditionalGeneration

    processor = AutoImageProcessor.from_pretrained(READER, backend="pil")
    images = [Image.open(io.BytesIO(each)).convert("RGB") for each in PICTURES]
    pixels = processor(images=images, return_tensors="pt")["pixel_values"]
    model = LlavaForConditionalGeneration.from_pretrained(READER, dtype=torch.float32)

    def answers(ids):
        tokens = torch.tensor([ids]).expand(COUNT, -1)
        mask = torch.ones_like(tokens)
        found = model.generate(
            input_ids=tokens, attention_mask=mask, pixel_values=pixels, do_sample=False, max_new_tokens=MAX_TOKENS
        )
        rows = found[:, len(ids) :].tolist()
        return [reader_server.llm.tokenizer.decode(row, skip_special_tokens=True) for row in rows]

    return {protocol: answers(prompt_of(reader_server, protocol)) for protocol in PROTOCOLS}


def prompt_of(server, protocol):
    """Return the tokens of the prompt, which are the same for every picture."""
    prompts, generate = [], server.llm.generate

    def note(prompt, *args, **options):
        prompts.append(prompt)
        return generate(prompt, *args, **options)

    server.llm.generate = note
    try:
        ask(server, protocol, 0)
    finally:
        del server.llm.generate
    [prompt] = prompts
    assert prompt.ids.count(IMAGE) == 16
    return prompt.ids


def test_64_pictures_at_once_are_read_as_transformers_reads_them(server, oracle):
    """Repeated and in another order, in every protocol at the same time."""
    assert oracle["chat"][: len(EXPECTED)] == [each["text"] for each in EXPECTED]
    assert len({oracle["chat"][i] for i in range(COUNT)}) > 20  # an answer says which picture was seen
    asked = [(protocol, i) for protocol in PROTOCOLS for i in range(COUNT)]
    for seed in range(2):
        random.Random(seed).shuffle(asked)
        with ThreadPoolExecutor(COUNT) as clients:
            found = list(clients.map(lambda one: ask(server, *one), asked))
        assert found == [oracle[protocol][i] for protocol, i in asked]


def test_parts_have_the_names_of_responses_too(server):
    parts = [{"type": "input_image", "image_url": url(1)}, {"type": "input_text", "text": "?"}]
    for content in (parts, [part(1), "?"]):
        answer = server.http.post(PROTOCOLS["chat"][0], json={"messages": user(*content), **GREEDY})
        assert message_of(answer.json()) == EXPECTED[1]["text"]


def test_streams_say_the_same(server, oracle):
    path, body, _ = PROTOCOLS["chat"]
    for i in range(3):
        events = events_of(server.http.post(path, json={**body(i), "stream": True}).text)
        deltas = [event["choices"][0]["delta"].get("content") or "" for event in events[:-1] if event["choices"]]
        assert "".join(deltas) == oracle["chat"][i]


def test_a_repeated_picture_is_processed_once(server, monkeypatch):
    cache, path, body = server.llm.media.cache, *PROTOCOLS["chat"][:2]
    server.call(server.llm.reset_mm_cache())
    processed = []
    monkeypatch.setattr(server.llm.media, "on_processed", processed.append)
    for protocol in PROTOCOLS:
        ask(server, protocol, 5)
    assert len(processed) == 1 and cache.bytes
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda _: server.http.post(path, json=body(6)).json(), range(8)))
    assert len(processed) == 2 and len({message_of(answer) for answer in answers}) == 1
