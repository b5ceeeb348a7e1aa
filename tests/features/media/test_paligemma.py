"""PaliGemma: preprocessing, the prompt and image embeddings as transformers has them."""

import json

import numpy as np
import pytest
import torch

from media_towers import SMALL, TEXT, check_embeddings, open_family, open_tower, picture, randomized, render, save, tensors

SIZES = [(34, 34), (80, 31), (7, 100), (1, 1)]


def make(directory, kind="gemma", **settings):
    from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration

    config = PaliGemmaConfig(
        text_config={"model_type": kind, **TEXT},
        vision_config={
            "model_type": "siglip_vision_model",
            **SMALL,
            "image_size": 34,
            "patch_size": 8,
            "vision_use_head": False,
        },
        **{"image_token_index": 190, "projection_dim": 32, "hidden_size": 32, "tie_word_embeddings": False, **settings},
    )
    model = randomized(PaliGemmaForConditionalGeneration(config))
    return model, save(model, directory)


def processor():
    from transformers import SiglipImageProcessorPil

    found = SiglipImageProcessorPil(size={"height": 34, "width": 34})
    found.image_seq_length = 16
    return found


def test_embeddings(tmp_path):
    model, config = make(tmp_path)
    family, tower = open_family(config), open_tower(config, tmp_path)
    arrays = [family.preprocess_image(picture(*size, seed), processor(), {}, 1) for seed, size in enumerate(SIZES)]
    with torch.inference_mode():
        expected = [model.get_image_features(tensors(each)["pixel_values"]).pooler_output[0] for each in arrays]
    check_embeddings(tower, arrays, expected)
    assert {len(each) for each in expected} == {family.max_tokens("image", {})} == {16}


@pytest.mark.parametrize("text", ["caption", "", "<image>caption en", "<image><image>Which?\n", "a <image> b <image> c"])
def test_the_prompt_is_the_processors(tmp_path, make_tokenizer, text):
    from transformers import PaliGemmaProcessor

    _, config = make(tmp_path)
    tokenizer = make_tokenizer(image_token="<image>", other="<bos>")
    tokenizer.bos_token = "<bos>"
    family = open_family(config | {"image_token_index": tokenizer.image_token_id})
    images = [picture(40, 30), picture(5, 90)][: max(1, text.count("<image>"))]
    found = PaliGemmaProcessor(processor(), tokenizer)(images=[images], text=[text], return_tensors="np")
    arrays = [family.preprocess_image(image, processor(), {}, len(images)) for image in images]
    assert np.array_equal(np.concatenate([each["pixel_values"] for each in arrays]), found["pixel_values"])
    assert render(family, tokenizer, text, arrays) == found["input_ids"][0].tolist()


def test_the_defaults_are_those_of_the_class():
    from transformers import PaliGemmaConfig

    full = json.loads(PaliGemmaConfig().to_json_string())
    architecture = {"architectures": ["PaliGemmaForConditionalGeneration"]}
    short, whole = open_family({"model_type": "paligemma", **architecture}), open_family({**full, **architecture})
    assert (short.vision, short.image_token) == (whole.vision, whole.image_token)
    assert short.max_tokens("image", {}) == 256
