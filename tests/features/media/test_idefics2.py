"""Idefics 2: frames of any size, expansion and image embeddings as transformers has them."""

import numpy as np
import pytest
import torch

from media_towers import SMALL, TEXT, check_embeddings, open_family, open_tower, picture, randomized, render, save
from quire.types.errors import InvalidParameter

SIZES = [(56, 56), (99, 31), (9, 200), (90, 60), (1, 1)]
SPLIT = {"do_image_splitting": True}


def make(directory, **settings):
    from transformers import Idefics2Config, Idefics2ForConditionalGeneration

    config = Idefics2Config(
        text_config={"model_type": "mistral", **TEXT, "sliding_window": None},
        vision_config={**SMALL, "image_size": 72, "patch_size": 8},
        perceiver_config={"resampler_n_latents": 5, "resampler_depth": 2, "resampler_n_heads": 4, "resampler_head_dim": 6,
                          "num_key_value_heads": 2, **settings},
        image_token_id=190,
    )  # fmt: skip
    model = randomized(Idefics2ForConditionalGeneration(config))
    return model, save(model, directory)


def processor():
    from transformers import Idefics2ImageProcessorPil

    return Idefics2ImageProcessorPil(size={"shortest_edge": 20, "longest_edge": 70})


def reference(arrays):
    """Return pixels and masks of the frames of several images as the image processor pads them."""
    frames = [
        torch.tensor(frame[:, :height, :width])
        for each in arrays
        for frame, (height, width) in zip(each["pixel_values"], each["frame_sizes"].tolist(), strict=True)
    ]
    most = [max(frame.shape[axis] for frame in frames) for axis in range(3)]
    pixels, mask = torch.zeros(1, len(frames), *most), torch.zeros(1, len(frames), *most[1:], dtype=torch.long)
    for index, frame in enumerate(frames):
        _, height, width = frame.shape
        pixels[0, index, :, :height, :width], mask[0, index, :height, :width] = frame, 1
    return {"pixel_values": pixels, "pixel_attention_mask": mask}


@pytest.mark.parametrize("options", [{}, SPLIT])
@pytest.mark.parametrize("settings", [{}, {"hidden_size": 32, "rms_norm_eps": 0.1}])
def test_embeddings(tmp_path, options, settings):
    model, config = make(tmp_path, **settings)
    family, tower = open_family(config), open_tower(config, tmp_path)
    arrays = [family.preprocess_image(picture(*size, seed), processor(), options, 1) for seed, size in enumerate(SIZES[:4])]
    with torch.inference_mode():
        [found] = model.get_image_features(**reference(arrays)).pooler_output
    expected = found.chunk(len(arrays))
    check_embeddings(tower, arrays, list(expected))
    assert {len(each) for each in expected} == {family.max_tokens("image", options)} == {25 if options else 5}


@pytest.mark.parametrize("options", [{}, SPLIT])
@pytest.mark.parametrize("text", ["a <image>\n b <image><image><s><image>word", "<image>?", "<image> a"])
def test_expansion_is_the_processors(tmp_path, make_tokenizer, options, text):
    from transformers import Idefics2Processor

    tokenizer = make_tokenizer("<image>", "<fake_token_around_image>", "<end_of_utterance>")
    _, config = make(tmp_path)
    family = open_family(config | {"image_token_id": tokenizer.convert_tokens_to_ids("<image>")})
    images = [picture(*size) for size in SIZES[: text.count("<image>")]]
    eyes = processor()
    eyes.do_image_splitting = bool(options)  # the processor expands by this attribute, whatever a call says
    found = Idefics2Processor(eyes, tokenizer, image_seq_len=5)(images=images, text=text, return_tensors="np")
    arrays = [family.preprocess_image(image, processor(), options, len(images)) for image in images]
    assert render(family, tokenizer, text, arrays) == found["input_ids"][0].tolist()
    whole = reference(arrays)
    assert all(np.array_equal(whole[name], found[name]) for name in whole)


def test_images_without_a_patch_are_refused(tmp_path):
    _, config = make(tmp_path)
    family = open_family(config)
    with pytest.raises(InvalidParameter, match="at least 8 x 8 pixels"):
        family.preprocess_image(picture(9, 9), processor(), {"size": {"height": 7, "width": 20}}, 1)
    with pytest.raises(InvalidParameter, match="at least 2 x 2 pixels to be split; got 1 x 9"):
        family.preprocess_image(picture(1, 9), processor(), SPLIT, 1)
    with pytest.raises(InvalidParameter, match="must not have do_pad"):
        family.preprocess_image(picture(9, 9), processor(), {"do_pad": False}, 1)
