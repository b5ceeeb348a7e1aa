"""Mistral 3 and Pixtral: preprocessing, expansion and embeddings of images as transformers has them."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from media_towers import SMALL, TEXT, largest_difference, open_family, open_tower, picture, randomized, save, tensors
from quire.types.errors import InvalidParameter, ModelError

SIZES = [(32, 32), (80, 31), (7, 60), (1, 1), (64, 64)]
KINDS = {
    "mistral3": {"spatial_merge_size": 2, "tie_word_embeddings": False},
    "biased": {"spatial_merge_size": 3, "multimodal_projector_bias": True, "vision_feature_layer": -2},
    "lighton": {"spatial_merge_size": 2, "tie_word_embeddings": False},
    "pixtral": {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    "layers": {"vision_feature_layer": [0, 2], "vision_feature_select_strategy": "full"},
}
LLAVA = ("pixtral", "layers")


def make(directory, kind, **around):
    import transformers

    name = "Llava" if kind in LLAVA else "LightOnOcr" if kind == "lighton" else "Mistral3"
    config = getattr(transformers, f"{name}Config")(
        text_config={"model_type": "qwen3" if kind == "lighton" else "mistral", **TEXT, "rms_norm_eps": 1e-3},
        vision_config={"model_type": "pixtral", **SMALL, "patch_size": 4, "head_dim": 8},
        **{"image_token_id" if kind == "lighton" else "image_token_index": 190}, **(KINDS[kind] | around),
    )  # fmt: skip
    model = randomized(getattr(transformers, f"{name}ForConditionalGeneration")(config))
    return model, save(model, directory)


def processor(patch=5):
    from transformers import PixtralImageProcessorPil

    return PixtralImageProcessorPil(size={"longest_edge": 64}, patch_size={"height": patch, "width": patch})


def embeddings(model, arrays):
    """The image is given twice, for transformers fails with a single embedding."""
    given = {name: torch.cat([value] * 2) for name, value in tensors(arrays).items()}
    return model.get_image_features(given["pixel_values"], image_sizes=given["image_sizes"].tolist()).pooler_output[0]


@pytest.mark.parametrize("kind", list(KINDS))
def test_embeddings(tmp_path, kind):
    model, config = make(tmp_path, kind)
    family, tower = open_family(config), open_tower(config, tmp_path)
    options = {"patch_size": 4} if kind == "lighton" else {}
    arrays = [
        family.preprocess_image(picture(*size, seed), processor(), options, 1)
        for seed, size in enumerate(SIZES if kind != "lighton" else SIZES[:3])
    ]
    with torch.inference_mode():
        expected = [embeddings(model, each) for each in arrays]
        together = tower.encode("image", [tensors(each) for each in arrays])
        alone = [tower.encode("image", [tensors(each)])[0] for each in arrays]
    for each, one, more, found in zip(arrays, alone, together, expected, strict=True):
        assert largest_difference(one, found) < 1e-4
        assert largest_difference(more, found) < 1e-4
        expansion = family.expand("image", each, lambda text: [0])
        embedded = expansion.embedded or ((0, len(expansion.tokens)),)
        assert sum(count for _, count in embedded) == len(found) <= family.max_tokens("image", processor().to_dict())
    if kind != "lighton":
        assert len(expected[-1]) == family.max_tokens("image", processor().to_dict())


@pytest.mark.parametrize("kind", ["mistral3", "pixtral", "lighton"])
def test_names_of_older_and_newer_checkpoints(tmp_path, kind):
    _, config = make(tmp_path, kind)
    known = open_tower(config, tmp_path).state_dict()
    file = tmp_path / "model.safetensors"
    plain = {key.removeprefix("model."): value for key, value in load_file(file).items()}
    for prefix in ("", "model."):
        save_file({f"{prefix}{key}": value for key, value in plain.items()}, file)
        found = open_tower(config, tmp_path).state_dict()
        assert found.keys() == known.keys()
        assert all(torch.equal(found[key], known[key]) for key in known)


@pytest.mark.parametrize("kind", ["mistral3", "pixtral"])
def test_expansion_is_the_processors(tmp_path, make_tokenizer, kind):
    """The class of transformers needs torchvision, so its rule stands here: a mark ends each row, and another one the image."""
    _, config = make(tmp_path, kind)
    family, side = open_family(config), 4 * KINDS[kind].get("spatial_merge_size", 1)
    tokenizer = make_tokenizer(image="[IMG]", row="[IMG_BREAK]", last="[IMG_END]")
    for size in SIZES:
        arrays = family.preprocess_image(picture(*size), processor(), {}, 1)
        found = processor()(images=[picture(*size)], patch_size=side, return_tensors="np")
        assert np.array_equal(arrays["pixel_values"], found["pixel_values"])
        height, width = found["image_sizes"][0].tolist()
        rows = ["[IMG]" * (width // side)] * (height // side)
        expansion = family.expand("image", arrays, tokenizer.encode)
        assert expansion.tokens == tokenizer.encode("[IMG_BREAK]".join(rows) + "[IMG_END]")
        image = tokenizer.convert_tokens_to_ids("[IMG]")
        embedded = [at for start, count in expansion.embedded for at in range(start, start + count)]
        assert [at for at, token in enumerate(expansion.tokens) if token == image] == embedded
        assert tokenizer.encode(family.placeholder("image")) == [image]


def test_expansion_of_lighton_ocr_is_the_processors(tmp_path, make_tokenizer):
    """Its processor leaves patches that fill no square."""
    from transformers import LightOnOcrProcessor

    tokenizer = make_tokenizer(image="<|image_pad|>")
    image = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    family = open_family(make(tmp_path, "lighton")[1] | {"image_token_id": image})
    whole = object.__new__(LightOnOcrProcessor)
    whole.image_token, whole.effective_patch_size = "<|image_pad|>", 8
    assert tokenizer.encode(family.placeholder("image")) == [image]
    for size in SIZES[:3]:
        arrays = family.preprocess_image(picture(*size), processor(), {"patch_size": 4}, 1)
        tokens = tokenizer.encode(whole.replace_image_token(arrays, 0))
        assert family.expand("image", arrays, tokenizer.encode).tokens == tokens


def test_another_patch_size_is_refused(tmp_path):
    _, config = make(tmp_path, "mistral3")
    with pytest.raises(InvalidParameter, match=r"patch_size must be 8.*; got 4"):
        open_family(config).preprocess_image(picture(9, 9), processor(), {"patch_size": 4}, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_feature_layer": [1, 2]}, "vision_feature_layer must be one layer with Mistral 3; got 2"),
        ({"spatial_merge_size": 0}, "spatial_merge_size must be an integer of at least 1; got 0"),
        ({"vision_config": {"num_attention_heads": 3}}, "the width of 3 heads must be a multiple of 4; got 16 / 3"),
        ({"vision_config": {"patch_size": None, "num_channels": "three"}}, "num_channels must be an integer of at least 1"),
    ],
)
def test_what_is_wrong_in_the_configuration_is_named(tmp_path, change, message):
    _, config = make(tmp_path, "mistral3")
    if "vision_config" in change:
        change = {"vision_config": config["vision_config"] | change["vision_config"]}
    with pytest.raises(ModelError, match=message):
        open_tower(config | change, tmp_path)


def test_the_defaults_are_those_of_the_classes():
    from transformers import Mistral3Config, PixtralVisionConfig

    for nested, full in (
        ({}, json.loads(Mistral3Config().to_json_string())),
        ({"vision_config": {"model_type": "pixtral"}}, {"vision_config": PixtralVisionConfig().to_dict()}),
    ):
        family = open_family({"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", **nested})
        assert family.vision == {key: full["vision_config"][key] for key in family.defaults} | nested.get("vision_config", {})
