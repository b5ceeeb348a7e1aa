"""Gemma 3: preprocessing, expansion and image embeddings as transformers has them, with and without crops."""

import numpy as np
import pytest
import torch

from media_towers import SMALL, TEXT, check_embeddings, open_family, open_tower, picture, randomized, render, save, tensors
from quire.types.errors import ModelError

SIZES = [(56, 56), (130, 31), (7, 90), (300, 120)]
CROPS = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 16}
NAMES = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}


def make(directory, **settings):
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    config = Gemma3Config(
        text_config={**TEXT, "sliding_window": 16},
        vision_config={
            "model_type": "siglip_vision_model",
            **SMALL,
            "image_size": 56,
            "patch_size": 8,
            "vision_use_head": False,
        },
        **{
            "mm_tokens_per_image": 9,
            "image_token_index": 190,
            "boi_token_index": 191,
            "eoi_token_index": 192,
            "tie_word_embeddings": False,
            **settings,
        },
    )
    model = randomized(Gemma3ForConditionalGeneration(config))
    return model, save(model, directory)


def processor():
    from transformers import Gemma3ImageProcessorPil

    return Gemma3ImageProcessorPil(size={"height": 56, "width": 56})


@pytest.mark.parametrize("options", [{}, CROPS])
def test_embeddings(tmp_path, options):
    model, config = make(tmp_path)
    family, tower = open_family(config), open_tower(config, tmp_path)
    arrays = [family.preprocess_image(picture(*size, seed), processor(), options, 1) for seed, size in enumerate(SIZES)]
    assert [len(each["pixel_values"]) for each in arrays] == ([1, 5, 1, 4] if options else [1] * 4)
    with torch.inference_mode():
        expected = [model.get_image_features(tensors(each)["pixel_values"]).pooler_output.flatten(0, 1) for each in arrays]
    check_embeddings(tower, arrays, expected)


@pytest.mark.parametrize("options", [{}, CROPS])
@pytest.mark.parametrize(
    "text", ["<s>user\n<start_of_image>What?", "a\n\n<start_of_image>\n\nb <start_of_image>\n", "<start_of_image>"]
)
def test_expansion_is_the_processors(tmp_path, make_tokenizer, text, options):
    """Newlines around an image become one token with those of the text."""
    from transformers import Gemma3Processor

    tokenizer = make_tokenizer(**NAMES)
    ids = {f"{name}_index": tokenizer.convert_tokens_to_ids(NAMES[name]) for name in ("boi_token", "eoi_token", "image_token")}
    _, config = make(tmp_path)
    family = open_family(config | ids)
    images = [picture(130, 31), picture(20, 20)][: text.count("<start_of_image>")]
    found = Gemma3Processor(processor(), tokenizer, image_seq_length=9)(
        images=images, text=text, return_tensors="np", **options
    )
    arrays = [family.preprocess_image(image, processor(), options, len(images)) for image in images]
    assert np.array_equal(np.concatenate([each["pixel_values"] for each in arrays]), found["pixel_values"])
    assert render(family, tokenizer, text, arrays) == found["input_ids"][0].tolist()
    embeddings = sum(count for _, count in family.expand("image", arrays[0], tokenizer.encode).embedded)
    assert embeddings == 9 * len(arrays[0]["pixel_values"]) <= family.max_tokens("image", options)


def test_the_most_tokens(tmp_path):
    _, config = make(tmp_path)
    family = open_family(config)
    assert family.max_tokens("image", {"do_pan_and_scan": None, "pan_and_scan_max_num_crops": None}) == 9
    assert family.max_tokens("image", {"image_processor": {"do_pan_and_scan": True, "pan_and_scan_max_num_crops": 2}}) == 27


@pytest.mark.parametrize("count", [8, 25, 64])
def test_tokens_that_are_no_squares_of_patches(tmp_path, count):
    _, config = make(tmp_path)
    with pytest.raises(ModelError, match=f"mm_tokens_per_image must be the square .* 7 patches of a side; got {count}"):
        open_family(config | {"mm_tokens_per_image": count})
