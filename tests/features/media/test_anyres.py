"""LLaVA-NeXT and LLaVA-OneVision: tiles, expansion and embeddings of images and frames as transformers has them."""

import json

import numpy as np
import pytest
import torch

from media_towers import SMALL, TEXT, check_embeddings, open_family, open_tower, picture, randomized, render, save, tensors
from quire.features.media.families.base import Video
from quire.types.errors import InvalidParameter, ModelError

SIZES = [(34, 34), (34, 68), (68, 34), (90, 31), (7, 100), (100, 90), (101, 33), (1, 1), (300, 2), (67, 69)]
GRID = [[34, 68], [68, 34], [68, 68], [34, 102], [102, 34]]
LARGE = [[34 * rows, 34 * columns] for rows in range(1, 4) for columns in range(1, 4)]
EYES = {
    "LlavaNext": {"model_type": "clip_vision_model"},
    "LlavaNextVideo": {"model_type": "clip_vision_model"},
    "LlavaOnevision": {"model_type": "siglip_vision_model", "vision_use_head": False},
}


def make(directory, name, **settings):
    import transformers

    config = getattr(transformers, f"{name}Config")(
        text_config={"model_type": "qwen2" if name == "LlavaOnevision" else "llama", **TEXT},
        vision_config={**SMALL, "image_size": 34, "patch_size": 8, **EYES[name]},
        image_grid_pinpoints=LARGE if name == "LlavaOnevision" else GRID,
        **{"image_token_index": 190, "vision_aspect_ratio": "anyres_max_3", **settings},
    )
    model = randomized(getattr(transformers, f"{name}ForConditionalGeneration")(config))
    return model, save(model, directory)


def processor(name):
    from transformers import LlavaNextImageProcessorPil, LlavaOnevisionImageProcessorPil

    size = {"height": 34, "width": 34}
    if name == "LlavaOnevision":
        return LlavaOnevisionImageProcessorPil(size=size, image_grid_pinpoints=LARGE)
    return LlavaNextImageProcessorPil(size={"shortest_edge": 34}, crop_size=size, image_grid_pinpoints=GRID)


def expected_embeddings(model, arrays, **options):
    with torch.inference_mode():
        items = [tensors(each) for each in arrays]
        return [
            model.get_image_features(each["pixel_values"][None], each["image_sizes"][None], **options).pooler_output[0]
            for each in items
        ]


@pytest.mark.parametrize("name", EYES)
def test_embeddings(tmp_path, name):
    model, config = make(tmp_path, name)
    family, tower = open_family(config), open_tower(config, tmp_path)
    arrays = [family.preprocess_image(picture(*size, seed), processor(name), {}, 1) for seed, size in enumerate(SIZES)]
    assert len({len(each["pixel_values"]) for each in arrays}) > 2
    options = {"vision_aspect_ratio": "anyres_max_3"} if name == "LlavaOnevision" else {}
    expected = expected_embeddings(model, arrays, **options)
    check_embeddings(tower, arrays, expected)
    assert [len(family.expand("image", each, list).tokens) for each in arrays] == list(map(len, expected))
    assert max(map(len, expected)) <= family.max_tokens("image", {}) <= 1.35 * max(map(len, expected))


def test_one_of_several_images_has_no_larger_copy(tmp_path):
    model, config = make(tmp_path, "LlavaOnevision")
    family, tower = open_family(config), open_tower(config, tmp_path)
    arrays = [
        family.preprocess_image(picture(*size, seed), processor("LlavaOnevision"), {}, 2) for seed, size in enumerate(SIZES)
    ]
    assert {each["pixel_values"].shape for each in arrays} == {(1, 3, 34, 34)}
    check_embeddings(tower, arrays, expected_embeddings(model, arrays, batch_num_images=[2]))


@pytest.mark.parametrize("name", EYES)
@pytest.mark.parametrize("count", [1, 3])
def test_expansion_is_the_processors(tmp_path, make_tokenizer, name, count):
    import transformers

    _, config = make(tmp_path, name)
    tokenizer = make_tokenizer(image_token="<image>", video_token="<video>")
    family = open_family(config | {"image_token_index": tokenizer.image_token_id})
    kind = getattr(transformers, f"{name}Processor")
    if name == "LlavaNext":
        whole = kind(processor(name), tokenizer, 8, "default", num_additional_image_tokens=1)
    else:  # without a video processor, which requires torchvision
        whole = kind.__new__(kind)
        whole.patch_size, whole.num_additional_image_tokens = 8, 1
        whole.image_processor, whole.num_image_tokens, whole.vision_aspect_ratio = processor(name), 16, "anyres_max_3"
        whole.vision_feature_select_strategy = "full" if name == "LlavaOnevision" else "default"
        whole.image_token = "<image>"
    for start in range(0, len(SIZES) - count + 1, count):
        images = [picture(*size) for size in SIZES[start : start + count]]
        arrays = [family.preprocess_image(image, processor(name), {}, count) for image in images]
        text = "<image> a".join(["", "\n<s>"] + ["\n\n"] * (count - 1))
        if name == "LlavaNext":
            ids = whole(images=images, text=text, return_tensors="np")["input_ids"][0].tolist()
        else:
            found = processor(name)(images=[images] if name == "LlavaOnevision" else images, return_tensors="np")
            pieces = text.split("<image>")
            pieces[1:] = [whole.replace_image_token(found, index) + part for index, part in enumerate(pieces[1:])]
            ids = tokenizer.encode("".join(pieces))
            for each, pixels in zip(arrays, found["pixel_values"], strict=True):
                assert np.array_equal(each["pixel_values"], pixels[: len(each["pixel_values"])])
        assert render(family, tokenizer, text, arrays) == ids


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("LlavaOnevision", {}),
        ("LlavaNextVideo", {}),
        ("LlavaNextVideo", {"spatial_pool_mode": "max", "spatial_pool_stride": 4}),
    ],
)
def test_videos(tmp_path, name, settings):
    model, config = make(tmp_path, name, video_token_index=191, **settings)
    family, tower = open_family(config), open_tower(config, tmp_path)
    videos = [
        Video(np.stack([np.asarray(picture(width, 40, seed)) for seed in range(frames)]), list(range(frames)), 1.0)
        for width, frames in ((50, 3), (34, 1), (20, 5))
    ]
    arrays = [family.preprocess_video(video, processor(name), {}) for video in videos]
    with torch.inference_mode():
        expected = [model.get_video_features(tensors(each)["pixel_values"][None]).pooler_output[0] for each in arrays]
        found = tower.encode("video", [tensors(each) for each in arrays])
    for each, ours, wanted in zip(arrays, found, expected, strict=True):
        assert (ours - wanted).abs().max() < 1e-4
        assert family.expand("video", each, list).tokens == [191] * len(wanted)
    assert family.max_tokens("video", {"num_frames": 5}) == len(expected[2])
    assert family.max_tokens("video", {}) == 32 * len(expected[1]) - 31 * family.newlines
    white = Video(np.full((1, 9, 9, 3), 255, np.uint8), [0.0], 1.0)
    options = {"image_mean": [0.5] * 3, "image_std": [0.25] * 3, "num_frames": 1}  # of the video processor
    assert np.allclose(family.preprocess_video(white, processor(name), options)["pixel_values"], 2.0)


@pytest.mark.parametrize("name", EYES)
def test_the_defaults_are_those_of_the_classes(name):
    import transformers

    full = json.loads(getattr(transformers, f"{name}Config")().to_json_string())
    architecture = f"{name}ForConditionalGeneration"
    family = open_family({"architectures": [architecture], "model_type": full["model_type"]})
    whole = open_family({**full, "architectures": [architecture]})
    for field in ("vision", "image_token", "states", "dropped", "count", "choices"):
        assert getattr(family, field) == getattr(whole, field), field
    assert family.max_tokens("image", {}) == (729 + 7938 + 162 if name == "LlavaOnevision" else 576 * 5 + 48)


def test_what_is_wrong_is_named(tmp_path):
    _, config = make(tmp_path, "LlavaOnevision")
    for change, message in (
        ({"vision_aspect_ratio": "square"}, "vision_aspect_ratio must be anyres_max_ and a number; got 'square'"),
        ({"image_grid_pinpoints": [[34, 20]]}, "pairs of a height and a width of at least 34"),
        ({"vision_feature_select_strategy": "default"}, "'default' for CLIP and 'full' for SigLIP"),
    ):
        with pytest.raises(ModelError, match=message):
            open_family(config | change)
    with pytest.raises(InvalidParameter, match="must not have image_grid_pinpoints"):
        open_family(config).preprocess_image(picture(9, 9), processor("LlavaOnevision"), {"image_grid_pinpoints": GRID}, 1)
