"""InternVL 3: preprocessing, expansion and embeddings of images and videos as transformers has them."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from media_towers import SMALL, TEXT, largest_difference, open_family, open_tower, picture, randomized, save, tensors
from quire.features.media.families.base import Video
from quire.types.errors import InvalidParameter, ModelError

SIZES = [(32, 32), (80, 31), (7, 60), (1, 1), (64, 64)]
KINDS = {
    "plain": {},
    "normed": {"use_qk_norm": True, "attention_bias": True, "norm_type": "rms_norm", "use_mean_pooling": False},
    "positions": {"use_absolute_position_embeddings": False, "hidden_act": "relu"},
}


def make(directory, kind="plain", **around):
    from transformers import InternVLConfig, InternVLForConditionalGeneration

    config = InternVLConfig(
        text_config={"model_type": "qwen2", **TEXT},
        vision_config={**SMALL, "image_size": [16, 16], "patch_size": [4, 4], **KINDS[kind]},
        image_token_id=190, image_seq_length=4, tie_word_embeddings=False, **around,
    )  # fmt: skip
    model = randomized(InternVLForConditionalGeneration(config))
    with torch.no_grad():
        for name, each in model.named_parameters():
            if name.endswith(("cls_token", "position_embeddings")):
                each.normal_(0.0, 0.3)
    return model, save(model, directory)


def processor():
    from transformers import GotOcr2ImageProcessorPil

    return GotOcr2ImageProcessorPil(size={"height": 16, "width": 16}, max_patches=6)


def clip(frames, width=20, height=30):
    pictures = np.stack([np.asarray(picture(width, height, seed)) for seed in range(frames)])
    return Video(pictures, [*range(frames)], 1.0)


def prepare(family):
    images = [family.preprocess_image(picture(*size, seed), processor(), {}, 1) for seed, size in enumerate(SIZES)]
    return images, [family.preprocess_video(clip(frames), processor(), {}) for frames in (3, 1)]


@pytest.mark.parametrize(("kind", "layer"), [("plain", -1), ("normed", -1), ("normed", 3), ("positions", -2)])
def test_embeddings(tmp_path, kind, layer):
    model, config = make(tmp_path, kind, vision_feature_layer=layer)
    family, tower = open_family(config), open_tower(config, tmp_path)
    for modality, arrays in zip(("image", "video"), prepare(family), strict=True):
        with torch.inference_mode():
            expected = [model.get_image_features(tensors(each)["pixel_values"]).pooler_output.flatten(0, 1) for each in arrays]
            together = tower.encode(modality, [tensors(each) for each in arrays])
            alone = [tower.encode(modality, [tensors(each)])[0] for each in arrays]
        for each, one, more, found in zip(arrays, alone, together, expected, strict=True):
            assert largest_difference(one, found) < 1e-4
            assert largest_difference(more, found) < 1e-4
            expansion = family.expand(modality, each, lambda text: [0])
            assert sum(count for _, count in expansion.embedded) == len(found)
            assert len(found) <= family.max_tokens(modality, processor().to_dict())


def test_names_of_older_and_newer_checkpoints(tmp_path):
    _, config = make(tmp_path)
    known = open_tower(config, tmp_path).state_dict()
    file = tmp_path / "model.safetensors"
    plain = {key.removeprefix("model."): value for key, value in load_file(file).items()}
    for prefix in ("", "model."):
        save_file({f"{prefix}{key}": value for key, value in plain.items()}, file)
        found = open_tower(config, tmp_path).state_dict()
        assert found.keys() == known.keys()
        assert all(torch.equal(found[key], known[key]) for key in known)


def test_expansion_is_the_processors(tmp_path, make_tokenizer):
    from transformers import InternVLProcessor

    _, config = make(tmp_path)
    family = open_family(config)
    marks = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
    tokenizer = make_tokenizer(**marks, video_token="<video>")
    whole = object.__new__(InternVLProcessor)
    whole.image_processor, whole.image_seq_length = processor(), 4
    whole.start_image_token, whole.end_image_token, whole.image_token, whole.video_token = (*marks.values(), "<video>")
    images, videos = prepare(family)
    tiled = processor()(
        images=[picture(*size, seed) for seed, size in enumerate(SIZES)], crop_to_patches=True, return_tensors="np"
    )
    assert np.array_equal(np.concatenate([each["pixel_values"] for each in images]), tiled["pixel_values"])
    assert max(tiled["num_patches"]) > 1
    films = {"pixel_values_videos": [each["pixel_values"] for each in videos]}
    items = [("image", images[0]), ("video", videos[0]), ("image", images[1]), ("video", videos[1])]
    text = "".join(f"{letter}{family.placeholder(modality)}\n" for letter, (modality, _) in zip("abcd", items, strict=True))
    (written,), _ = whole.get_text_with_replacements(
        [text],
        [whole.replace_image_token(tiled, index) for index in range(2)],
        [whole.replace_video_token(films, index) for index in range(2)],
    )
    tokens = list[int]()
    for index, (letter, (modality, arrays)) in enumerate(zip("abcd", items, strict=True)):
        expansion = family.expand(modality, arrays, tokenizer.encode)
        tokens += [*tokenizer.encode(("\n" if index else "") + letter + expansion.before), *expansion.tokens]
        image = tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>")
        embedded = [at for start, count in expansion.embedded for at in range(start, start + count)]
        assert [at for at, token in enumerate(expansion.tokens) if token == image] == embedded
    assert [*tokens, *tokenizer.encode("\n")] == tokenizer.encode(written, add_special_tokens=False)


def test_frames_of_videos_are_prepared_as_images(tmp_path):
    family, video = open_family(make(tmp_path)[1]), clip(3)
    found = family.preprocess_video(video, processor(), {"size": {"height": 16, "width": 16}, "fps": 2})["pixel_values"]
    plain = processor()(images=list(video.frames), return_tensors="np")["pixel_values"]
    assert np.array_equal(found, plain)


def test_an_image_of_another_size_is_refused(tmp_path):
    family, options = open_family(make(tmp_path)[1]), {"size": {"height": 8, "width": 8}}
    with pytest.raises(InvalidParameter, match=r"images of 16 x 16 pixels.*got 8 x 8"):
        family.preprocess_image(picture(9, 9), processor(), options, 1)
    with pytest.raises(InvalidParameter, match=r"images of 16 x 16 pixels.*got 8 x 8"):
        family.preprocess_video(clip(1), processor(), options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_feature_layer": [1, 2]}, "vision_feature_layer must be one layer with InternVL; got 2"),
        ({"downsample_ratio": 0.3}, "downsample_ratio must be 1 / n, with n a divisor of 4 patches; got 0.3"),
        ({"downsample_ratio": 0}, "downsample_ratio must be 1 / n, .*; got 0"),
        ({"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy must be one of default; got 'full'"),
        ({"vision_config": {"num_attention_heads": 3}}, "3 heads must divide hidden_size; got 16"),
        ({"vision_config": {"image_size": [16, 8]}}, r"image_size must be an integer of at least 1; got \[16, 8\]"),
    ],
)
def test_what_is_wrong_in_the_configuration_is_named(tmp_path, change, message):
    _, config = make(tmp_path)
    if "vision_config" in change:
        change = {"vision_config": config["vision_config"] | change["vision_config"]}
    with pytest.raises(ModelError, match=message):
        open_tower(config | change, tmp_path)


def test_the_defaults_are_those_of_the_classes():
    from transformers import InternVLConfig

    full = json.loads(InternVLConfig().to_json_string())
    family = open_family({"architectures": ["InternVLForConditionalGeneration"]})
    assert SimpleNamespace(**family.vision | {"image_size": [448, 448], "patch_size": [14, 14]}) == SimpleNamespace(
        **{key: full["vision_config"][key] for key in family.vision}
    )
    assert (family.count, family.max_tokens("image", {})) == (full["image_seq_length"], 13 * 256)
