"""Images that requests bring as embeddings: the answers are those to the pictures they were made of, in every family."""

import base64
import io

import numpy as np
import pytest
import torch
from media_files import READER
from media_models import NEW_TOKENS, MediaCase, pictures
from PIL import Image

from quire import LLM, SamplingParams
from quire.features.media.encoder import Encoder
from quire.types.errors import InvalidParameter, NotSupported, RequestError

FAMILIES = ("llava", "llava-next", "pixtral", "lighton-ocr", "qwen2.5-vl", "qwen3-vl", "gemma3", "paligemma", "internvl")
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=5)
ENGINE = {
    "dtype": "float32", "device": "cpu", "max_num_seqs": 8, "kv_cache_memory_bytes": 16 << 20, "enable_mm_embeds": True,
}  # fmt: skip
ASK = "<image>?"

pytestmark = pytest.mark.usefixtures("processed_here")


@pytest.fixture(scope="module")
def reader():
    with LLM(str(READER), **ENGINE) as made:
        yield made


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    case = MediaCase("qwen2.5-vl", tmp_path_factory.mktemp("qwen"))
    with LLM(str(case.directory), **ENGINE) as llm:
        yield case, llm


@pytest.fixture
def encoded(monkeypatch):
    """Embeddings of everything that encoders compute, in order."""
    found, encode = [], Encoder._encode

    def noted(self, modality, items, arrays):
        result = encode(self, modality, items, arrays)
        found.extend(result.values())
        return result

    monkeypatch.setattr(Encoder, "_encode", noted)
    return found


def answers(llm, prompts):
    """Return tokens and the bits of logprobs, which the prefix cache and other batches change for such small sizes."""
    llm.reset_prefix_cache()
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    found = [output.outputs[0] for output in outputs]
    return [(one.token_ids, [{token: each.logprob for token, each in step.items()} for step in one.logprobs]) for one in found]


def digit(number):
    return Image.open(READER / "pictures" / f"{number:02d}.png")


def asked(embeds, prompt=ASK):
    return {"prompt": prompt, "multi_modal_data": {"image": embeds}}


def saved(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_are_those_to_the_picture(name, tmp_path, encoded):
    case = MediaCase(name, tmp_path)
    first, second = pictures()[:2]
    fields = case.family.embeds_fields
    layouts = [{field: case._prepare([image], 1)[0][0][field] for field in fields} for image in (first, second)]
    mark = case.family.placeholder("image")
    texts = [f"{mark}what?", f"{mark} or {mark} well"]
    with LLM(str(tmp_path), max_model_len=1024, **ENGINE) as llm:
        if name == "llava-next":  # an image's arrays depend on the number of images
            texts[1], second, layouts[1] = texts[0], first, layouts[0]
        expected = answers(llm, [asked(first, texts[0]), asked([first, second] if texts[1] != texts[0] else second, texts[1])])
        embeds = list(encoded)
        del encoded[:]
        items = [{"image_embeds": each, **layout} for each, layout in zip(embeds, layouts, strict=False)]
        both = items if texts[1] != texts[0] else items[0]
        assert answers(llm, [asked(items[0], texts[0]), asked(both, texts[1])]) == expected
        assert not encoded, "nothing is encoded"
        if texts[1] != texts[0] and "image_grid_thw" in fields:  # vLLM's form: all images in one array
            whole = {
                "image_embeds": torch.cat(embeds),
                "image_grid_thw": np.concatenate([one["image_grid_thw"] for one in layouts]),
            }
            assert answers(llm, [asked(items[0], texts[0]), asked(whole, texts[1])]) == expected
        with pytest.raises(InvalidParameter, match=f"this model needs {next(iter(fields))}" if fields else "must be floats"):
            answers(llm, [asked(embeds[0] if fields else embeds[0][:, 1:], texts[0])])


def test_forms(reader, encoded):
    expected = answers(reader, [asked(digit(number)) for number in range(3)])
    one, two, three = encoded
    found = answers(reader, [asked(form) for form in (one.numpy(), two[None], {"image_embeds": [three]})])
    assert found == expected
    found = answers(reader, [asked(torch.nn.Parameter(one.clone())), asked(two.double()), asked([three.half().float()])])
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected] and found[:2] == expected[:2]
    with_picture = answers(reader, [asked([digit(0), digit(1)], "<image><image>?")])
    assert answers(reader, [asked([one, digit(1)], "<image><image>?")]) == with_picture
    assert answers(reader, [asked(torch.stack([one, two]), "<image><image>?")]) == with_picture
    named = {**asked(one), "multi_modal_uuids": {"image": "embeddings of a digit"}}
    assert answers(reader, [named]) == answers(reader, [{**named, "multi_modal_data": {"image": None}}])


def test_other_embeddings_give_other_answers(reader, encoded):
    """Pages and embeddings of one image are not those of another."""

    def tokens(image):
        [output] = reader.generate(asked(image), GREEDY, use_tqdm=False)
        return output.outputs[0].token_ids

    digits = {number: tokens(digit(number)) for number in range(4, 8)}
    embeds = dict(zip(digits, encoded, strict=True))
    assert len({tuple(found) for found in digits.values()}) > 2
    for _ in range(2):
        assert {number: tokens(each) for number, each in embeds.items()} == digits
        assert {number: tokens(digit(number)) for number in digits} == digits


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (torch.zeros(15, 96), "15 rows; this model has 16 tokens"),
        (torch.zeros(16, 95), r"must be floats \[tokens, 96\]; got \[16, 95\]"),
        (torch.full((16, 96), float("nan")), "must be finite numbers"),
        (torch.full((16, 96), 1e9), "must be finite numbers"),
        ({"image_embeds": torch.zeros(16, 96, dtype=torch.int64)}, "must be floats"),
        ({"image_embeds": torch.zeros(16, 96), "grid": torch.ones(1, 3)}, "has 'grid'; this model takes image_embeds"),
        ({"embeds": torch.zeros(16, 96)}, "must have image_embeds; it has embeds"),
        ({"image_embeds": "text"}, "must be tensors or arrays; got str"),
        (torch.zeros(16, 96).to_sparse(), "must be dense"),
        (torch.zeros(0, 96), "must be floats"),
        ([torch.zeros(2, 16, 96)], "an item of a list must be one image; got 2"),
    ],
)  # fmt: skip
def test_wrong_embeddings_are_refused(reader, wrong, message):
    with pytest.raises(RequestError, match=message):
        answers(reader, [asked(wrong)])


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ([[1, 2, 2], [1, 2, 2]], "cannot be divided"),
        ([[1, 1 << 40, 4]], "must be the sizes of an image"),
        ([[0, 4, 4]], "must be the sizes of an image"),
        ([[1, 4]], "must be integers"),
        ([[1.0, 4.0, 4.0]], "must be integers"),
        ([[1, 60000, 1000]], "this model has"),
    ],
)
def test_wrong_grids_are_refused(qwen, grid, message):
    case, llm = qwen
    embeds = torch.zeros(3, case.model.config.text_config.hidden_size)
    with pytest.raises(RequestError, match=message):
        answers(llm, [asked({"image_embeds": embeds, "image_grid_thw": torch.tensor(grid)}, case.family.placeholder("image"))])


def test_parts_of_messages(reader, encoded):
    chat = [{"role": "user", "content": [{"type": "image_pil", "image_pil": digit(9)}, {"type": "text", "text": "?"}]}]
    reader.reset_prefix_cache()
    [expected] = reader.chat(chat, GREEDY, use_tqdm=False)
    [embeds] = encoded
    for value in (saved(embeds), {"image_embeds": saved(embeds)}, embeds, saved(embeds[None].clone())):
        chat[0]["content"][0] = {"type": "image_embeds", "image_embeds": value}
        reader.reset_prefix_cache()
        [found] = reader.chat(chat, GREEDY, use_tqdm=False)
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids
        assert found.outputs[0].logprobs == expected.outputs[0].logprobs


def test_the_argument_is_needed():
    off = LLM(str(READER), **ENGINE | {"enable_mm_embeds": False})
    with off as llm, pytest.raises(NotSupported, match="image_embeds require enable_mm_embeds"):
        answers(llm, [asked(torch.zeros(16, 96))])
