"""Idefics 3 and SmolVLM: frames, expansion and image embeddings as transformers has them."""

import numpy as np
import pytest
import torch

from media_towers import SMALL, TEXT, check_embeddings, open_family, open_tower, picture, randomized, render, save, tensors
from quire.types.errors import InvalidParameter, ModelError

SIZES = [(56, 56), (170, 31), (9, 300), (100, 90), (1, 1)]
FRAMES = [(4, 4), (1, 4), (4, 1), (4, 4), (4, 4)]
MARKS = "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"


def make(directory, name="SmolVLM", side=48, **settings):
    import transformers

    config = getattr(transformers, f"{name}Config")(
        text_config={"model_type": "llama", **TEXT},
        vision_config={**SMALL, "image_size": side, "patch_size": 8},
        **{"image_token_id": 190, "scale_factor": 3, **settings},
    )
    model = randomized(getattr(transformers, f"{name}ForConditionalGeneration")(config))
    return model, save(model, directory)


def processor(side=48):
    from transformers import Idefics3ImageProcessorPil

    return Idefics3ImageProcessorPil(size={"longest_edge": 4 * side}, max_image_size={"longest_edge": side})


@pytest.mark.parametrize(("name", "side"), [("SmolVLM", 48), ("Idefics3", 48), ("Idefics3", 88)])
def test_embeddings(tmp_path, name, side):
    model, config = make(tmp_path, name, side, scale_factor=11 if side == 88 else 3)
    family, tower = open_family(config), open_tower(config, tmp_path)
    arrays = [family.preprocess_image(picture(*size, seed), processor(side), {}, 1) for seed, size in enumerate(SIZES)]
    assert [tuple(each["grid"].tolist()) for each in arrays] == FRAMES
    with torch.inference_mode():
        pixels = [tensors(each)["pixel_values"] for each in arrays]
        expected = [model.get_image_features(each[None]).pooler_output[0] for each in pixels]
    check_embeddings(tower, arrays, expected)


def test_positions_of_many_patches_are_rounded_as_they_were_in_training():
    from transformers import Idefics3VisionConfig
    from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionEmbeddings

    from quire.features.media.towers.idefics3 import fractional_positions

    moved = 0
    for side in (25, 26, 29, 32):
        config = Idefics3VisionConfig(hidden_size=1, image_size=side, patch_size=1, num_channels=1)
        embeddings = Idefics3VisionEmbeddings(config)
        with torch.inference_mode():
            embeddings.position_embedding.weight.copy_(torch.arange(side * side)[:, None])
            for parameter in embeddings.patch_embedding.parameters():
                parameter.zero_()
            found = embeddings(torch.zeros(1, 1, side, side), torch.ones(1, side, side, dtype=torch.bool))
        ours = fractional_positions(side, side, side, torch.device("cpu"))
        assert found.flatten().tolist() == ours.tolist()
        moved += int((ours != torch.arange(side * side)).any())
    assert moved == 2


@pytest.mark.parametrize("options", [{}, {"do_image_splitting": False}])
def test_expansion_is_the_processors(tmp_path, make_tokenizer, options):
    from transformers import Idefics3Processor

    rows = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
    tokenizer = make_tokenizer("<image>", *MARKS, *rows)
    _, config = make(tmp_path)
    family = open_family(config | {"image_token_id": tokenizer.convert_tokens_to_ids("<image>")})
    images, text = [picture(*size) for size in SIZES], "a <image>\n b <image><image><s><image>\n\nd<image>"
    found = Idefics3Processor(processor(), tokenizer, image_seq_len=4)(images=images, text=text, return_tensors="np", **options)
    arrays = [family.preprocess_image(image, processor(), options, len(images)) for image in images]
    assert render(family, tokenizer, text, arrays) == found["input_ids"][0].tolist()
    pixels = iter(found["pixel_values"][0])
    assert all(np.array_equal(frame, next(pixels)) for each in arrays for frame in each["pixel_values"])
    settings = {"size": {"longest_edge": 192}, **options}
    assert family.max_tokens("image", settings) == max(4 * len(each["pixel_values"]) for each in arrays)
    assert family.max_tokens("image", {"image_processor": settings}) == family.max_tokens("image", settings)


def test_frames_of_another_size_are_refused(tmp_path):
    _, config = make(tmp_path)
    with pytest.raises(InvalidParameter, match=r"images of 48 x 48 pixels.*got 24 x 24"):
        open_family(config).preprocess_image(picture(9, 9), processor(), {"max_image_size": {"longest_edge": 24}}, 1)


def test_a_factor_that_does_not_divide_the_patches(tmp_path):
    _, config = make(tmp_path)
    with pytest.raises(ModelError, match="scale_factor must divide the 6 patches of a side; got 4"):
        open_family(config | {"scale_factor": 4})
