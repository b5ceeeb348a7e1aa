"""Parts of messages with embeddings in place of images: the answers are those to the pictures, and hostile ones are refused."""

import base64
import io
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from serving import error_of

READER = Path(__file__).parents[1] / "fixtures" / "reader-llava"
CHAT = "/v1/chat/completions"
SHAPE = (16, 96)


@pytest.fixture
def server(reader_server):
    yield reader_server
    reader_server.wait_idle()


@pytest.fixture(scope="module")
def embeds():
    """What transformers' encoder makes of the pictures [pictures, tokens, hidden size]."""
    from transformers import AutoImageProcessor, LlavaForConditionalGeneration

    model = LlavaForConditionalGeneration.from_pretrained(READER, dtype=torch.float32).eval()
    processor = AutoImageProcessor.from_pretrained(READER, backend="pil")
    images = [Image.open(READER / "pictures" / f"{number:02d}.png").convert("RGB") for number in range(4)]
    with torch.inference_mode():
        found = model.get_image_features(**processor(images=images, return_tensors="pt"))
    found = getattr(found, "pooler_output", found)
    return [torch.as_tensor(each).reshape(SHAPE).clone() for each in found]


def saved(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


def text(data):
    return base64.b64encode(data).decode()


def ask(server, *values, **named):
    parts = [{"type": "image_embeds", "image_embeds": value, **named} for value in values]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]
    return server.http.post(CHAT, json={"messages": messages, "max_tokens": 4, "temperature": 0, "add_special_tokens": True})


def read(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def test_answers_are_those_to_the_pictures(server, embeds):
    def shown(number):
        picture = (READER / "pictures" / f"{number:02d}.png").read_bytes()
        part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text(picture)}"}}
        messages = [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}]
        body = {"messages": messages, "max_tokens": 4, "temperature": 0, "add_special_tokens": True}
        return read(server.http.post(CHAT, json=body))

    pictures = [shown(number) for number in range(4)]
    assert len(set(pictures)) > 2
    for form in (lambda each: text(saved(each)), lambda each: {"image_embeds": text(saved(each.double()))}):
        answers = [ask(server, form(each)) for each in embeds]
        assert [read(answer) for answer in answers] == pictures
        assert answers[0].json()["usage"]["prompt_tokens_details"]["multimodal_tokens"] == {"image": 16}
    assert read(ask(server, text(saved(embeds[1])), uuid="one")) == pictures[1] == read(ask(server, None, uuid="one"))


class Evil:
    def __reduce__(self):
        return Path.touch, (Path("touched"),)


def archived(table, storage=b"", **options):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", **options) as archive:
        archive.writestr("archive/data.pkl", table)
        archive.writestr("archive/data/0", storage)
    return file.getvalue()


def sized(*sizes):
    """Return a file whose tensor claims other sizes than its storage has."""
    data = saved(torch.zeros(SHAPE))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        table = archive.read("archive/data.pkl" if "archive/data.pkl" in archive.namelist() else archive.namelist()[0])
    claimed = b"".join(b"J" + int(size).to_bytes(4, "little") for size in sizes)
    return archived(table.replace(b"K\x10K\x60", claimed, 1), bytes(16 * 96 * 4))


HOSTILE = {
    "no base64": ("?", "base64"),
    "empty": ("", "image_embeds must be one dense tensor"),
    "no archive": (text(b"x" * 1000), "must be one dense tensor"),
    "a pickle that calls": (text(archived(pickle.dumps(Evil()))), "must be one dense tensor"),
    "an old pickle": (text(pickle.dumps(np.zeros(SHAPE))), "must be one dense tensor"),
    "a table": (text(saved({"a": torch.zeros(SHAPE)})), "must be one dense tensor"),
    "a sparse tensor": (text(saved(torch.zeros(SHAPE).to_sparse())), "must be one dense tensor"),
    "sizes beyond the file": (text(sized(1600, 96)), "must be one dense tensor"),
    "enormous sizes": (text(sized(2**31 - 1, 2**31 - 1)), "must be one dense tensor"),
    "an expanded row": (text(saved(torch.zeros(1, 1).expand(1 << 15, 1 << 15))), "must be one dense tensor"),
    "compressed": (text(archived(b"x" * 1000, compression=zipfile.ZIP_DEFLATED)), "must be one dense tensor"),
    "cut off": (text(saved(torch.zeros(SHAPE))[:-100]), "must be one dense tensor"),
    "too few rows": (text(saved(torch.zeros(8, 96))), "8 rows; this model has 16 tokens"),
    "too many rows": (text(saved(torch.zeros(4000, 96))), "4000 rows; this model has 16 tokens"),
    "not finite": (text(saved(torch.full(SHAPE, float("inf")))), "must be finite"),
    "integers": (text(saved(torch.zeros(SHAPE, dtype=torch.long))), "must be floats"),
    "another name": ({"image_embeds": text(saved(torch.zeros(SHAPE))), "x" * 500: ""}, "this model takes image_embeds"),
    "without embeddings": ({"image_grid_thw": ""}, "must be the base64 text"),
    "numbers": ([[0.0] * 96] * 16, "must be the base64 text"),
    "nothing": (None, "image_embeds"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_embeddings_are_refused(server, name):
    value, message = HOSTILE[name]
    answer = ask(server, value)
    assert answer.status_code == 400, answer.text
    found = error_of(answer)["message"]
    assert message in found and "messages[0].content[0]" in found and len(found) < 400
    assert not Path("touched").exists()
