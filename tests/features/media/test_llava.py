"""LLaVA 1.5: preprocessing, expansion and image embeddings as transformers has them."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from media_towers import (
    SMALL,
    TEXT,
    check_embeddings,
    largest_difference,
    open_family,
    open_tower,
    picture,
    randomized,
    render,
    save,
    tensors,
)
from quire.types.errors import InvalidParameter, ModelError

VISIONS = {
    "clip": {"model_type": "clip_vision_model"},
    "siglip": {"model_type": "siglip_vision_model", "vision_use_head": True},
}
SIZES = [(32, 32), (80, 31), (7, 100), (1, 1)]


def make(directory, kind="clip", **settings):
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    config = LlavaConfig(
        text_config={"model_type": "llama", **TEXT},
        vision_config={**SMALL, "image_size": 34, "patch_size": 8, **VISIONS[kind]},
        image_token_index=190,
        **settings,
    )
    model = randomized(LlavaForConditionalGeneration(config))
    return model, save(model, directory)


def make_relative(directory, name, **settings):
    import transformers

    kind, deep = ("siglip", 3) if name == "DeepseekVL" else ("clip", 12)
    config = getattr(transformers, f"{name}Config")(
        text_config={"model_type": "llama", **TEXT},
        vision_config={**SMALL, "num_hidden_layers": deep, "image_size": 34, "patch_size": 8, **VISIONS[kind]},
        image_token_id=190,
        **settings,
    )
    model = randomized(getattr(transformers, f"{name}ForConditionalGeneration")(config))
    return model, save(model, directory)


def processor(kind="clip"):
    from transformers import CLIPImageProcessorPil, SiglipImageProcessorPil

    if kind == "siglip":
        return SiglipImageProcessorPil(size={"height": 34, "width": 34})
    return CLIPImageProcessorPil(size={"shortest_edge": 34}, crop_size={"height": 34, "width": 34})


@pytest.mark.parametrize(
    ("kind", "layer", "strategy"),
    [
        ("clip", -2, "default"),
        ("clip", [-3, -1, 0], "default"),
        ("clip", 3, "full"),
        ("siglip", -1, "full"),
        ("siglip", 1, "default"),
    ],
)
def test_embeddings(tmp_path, kind, layer, strategy):
    model, config = make(tmp_path, kind, vision_feature_layer=layer, vision_feature_select_strategy=strategy)
    family, tower = open_family(config), open_tower(config, tmp_path)
    arrays = [family.preprocess_image(picture(*size, seed), processor(kind), {}, 1) for seed, size in enumerate(SIZES)]
    with torch.inference_mode():
        expected = [model.get_image_features(tensors(each)["pixel_values"]).pooler_output[0] for each in arrays]
    check_embeddings(tower, arrays, expected)
    assert [len(family.expand("image", each, list).tokens) for each in arrays] == [family.max_tokens("image", {})] * len(SIZES)
    assert {len(each) for each in expected} == {family.max_tokens("image", {})}
    assert largest_difference(expected[0], expected[1]) > 1e-2


@pytest.mark.parametrize(
    ("name", "settings"),
    [("VipLlava", {"vision_feature_layers": [-1, 1, -3]}), ("VipLlava", {"projector_layernorm_eps": 1e-2}), ("DeepseekVL", {})],
)
def test_relatives(tmp_path, name, settings):
    model, config = make_relative(tmp_path, name, **settings)
    kind = "siglip" if name == "DeepseekVL" else "clip"
    family, tower = open_family(config), open_tower(config, tmp_path)
    arrays = [family.preprocess_image(picture(*size, seed), processor(kind), {}, 1) for seed, size in enumerate(SIZES)]
    with torch.inference_mode():
        expected = [
            model.model.get_image_features(tensors(each)["pixel_values"], **layers(model)).pooler_output[0] for each in arrays
        ]
    check_embeddings(tower, arrays, expected)
    assert family.expand("image", arrays[0], list).tokens == [190] * len(expected[0]) == [190] * family.max_tokens("image", {})


def layers(model):
    """Return what the model's own forward passes to it."""
    return {"vision_feature_layer": model.config.vision_feature_layer} if hasattr(model.config, "vision_feature_layer") else {}


def test_names_of_older_and_newer_checkpoints(tmp_path):
    """Published: `vision_tower.vision_model...`; as transformers has it in memory: `model.vision_tower...`."""
    _, config = make(tmp_path)
    known = open_tower(config, tmp_path).state_dict()
    file, stored = tmp_path / "model.safetensors", load_file(tmp_path / "model.safetensors")
    assert any(name.startswith("vision_tower.") for name in stored)
    plain = {name.replace("vision_tower.vision_model.", "vision_tower."): value for name, value in stored.items()}
    older = {name.replace("vision_tower.", "vision_tower.vision_model."): value for name, value in plain.items()}
    older["vision_tower.vision_model.embeddings.position_ids"] = torch.arange(17)[None]
    for renamed in (older, {f"model.{name}": value for name, value in plain.items()}):
        save_file(renamed, file)
        found = open_tower(config, tmp_path).state_dict()
        assert found.keys() == known.keys()
        assert all(torch.equal(found[name], known[name]) for name in known)


def test_expansion_is_the_processors(tmp_path, make_tokenizer):
    from transformers import LlavaProcessor

    _, config = make(tmp_path)
    tokenizer = make_tokenizer(image_token="<image>")
    family = open_family(config | {"image_token_index": tokenizer.image_token_id})
    images = [picture(40, 30), picture(5, 90)]
    whole = LlavaProcessor(processor(), tokenizer, 8, "default", num_additional_image_tokens=1)
    text = "a <image> b <image><s>"
    found = whole(images=images, text=text, return_tensors="np")
    arrays = [family.preprocess_image(image, processor(), {}, 2) for image in images]
    assert np.array_equal(np.concatenate([each["pixel_values"] for each in arrays]), found["pixel_values"])
    assert render(family, tokenizer, text, arrays) == found["input_ids"][0].tolist()


def test_an_image_of_another_size_is_refused(tmp_path):
    _, config = make(tmp_path)
    with pytest.raises(InvalidParameter, match=r"images of 34 x 34 pixels.*got 16 x 16"):
        open_family(config).preprocess_image(picture(9, 9), processor(), {"crop_size": {"height": 16, "width": 16}}, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_feature_layer": 4}, "vision_feature_layer must be one or more layers of 3; got 4"),
        ({"vision_feature_select_strategy": "best"}, "must be one of default, full; got 'best'"),
        ({"vision_config": {"model_type": "eye"}}, "model_type must be one of clip_vision_model, .*'eye_vision_model'"),
        ({"vision_config": {"patch_size": 0}}, "patch_size must be an integer of at least 1; got 0"),
        ({"vision_config": {"hidden_act": "sine"}}, "hidden_act must be one of .*; got 'sine'"),
    ],
)
def test_what_is_wrong_in_the_configuration_is_named(tmp_path, change, message):
    _, config = make(tmp_path)
    if isinstance(vision := change.get("vision_config"), dict):
        change = {"vision_config": config["vision_config"] | vision}
    with pytest.raises(ModelError, match=message):
        open_tower(config | change, tmp_path)


def test_the_defaults_are_those_of_the_classes():
    """A published config.json leaves out what equals them."""
    import transformers
    from transformers import LlavaConfig

    from quire.features.media.families.fields import ENCODERS, read_vision, text_width

    full = json.loads(LlavaConfig().to_json_string())
    family = open_family({"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"})
    assert family.vision == read_vision(full)
    assert family.max_tokens("image", {}) == 576
    assert family.image_token == full["image_token_index"]
    for kind in ENCODERS:
        nested = {"model_type": kind}
        whole = json.loads(LlavaConfig(vision_config=nested).to_json_string())
        assert read_vision({"vision_config": nested}) == read_vision(whole)
    for name in ("Idefics3", "SmolVLM"):
        whole = json.loads(getattr(transformers, f"{name}Config")().to_json_string())
        assert read_vision({}, kind="idefics3_vision") == read_vision(whole, kind="idefics3_vision")
    assert text_width({"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32064}}) == 4096
