"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: preprocessing, expansion and embeddings of images and videos as transformers has them."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from media_towers import TEXT, largest_difference, open_family, open_tower, picture, randomized, save, tensors
from quire.features.media.families.base import Video
from quire.features.media.families.patches import VIDEO_DEFAULTS, fit
from quire.features.media.towers import qwen_vl
from quire.features.media.towers.qwen_vl import Layout
from quire.types.errors import InvalidParameter, ModelError

LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
EYE = {"depth": 3, "num_heads": 2, "patch_size": 4}
VISIONS = {
    "Qwen2VL": {**EYE, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2},
    "Qwen2_5_VL": {
        **EYE, "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32, "fullatt_block_indexes": [1],
        "window_size": 16, "tokens_per_second": 3,
    },
    "Qwen3VL": {
        **EYE, "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32, "num_position_embeddings": 25,
        "deepstack_visual_indexes": [2, 0],
    },
}  # fmt: skip
VISIONS["Qwen3VLMoe"] = VISIONS["Qwen3VL"]
VISIONS["Qwen3_5"] = {key: value for key, value in VISIONS["Qwen3VL"].items() if key != "deepstack_visual_indexes"}
VISIONS["Qwen3_5Moe"] = VISIONS["Qwen3_5"]
FAMILIES = list(VISIONS)
SIZES = [(32, 32), (80, 31), (9, 100), (1, 1), (64, 64)]


def make(directory, name, **vision):
    import transformers

    text = {**TEXT, "rope_parameters": MROPE | ({"mrope_interleaved": True} if "3" in name else {})}
    if name.startswith("Qwen3_5"):
        text |= {"layer_types": ["linear_attention", "full_attention"], **LINEAR}
    if name.endswith("Moe"):
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = getattr(transformers, f"{name}Config")(
        text_config=text, vision_config=VISIONS[name] | vision, image_token_id=190, video_token_id=191,
        vision_start_token_id=192, vision_end_token_id=193,
    )  # fmt: skip
    model = randomized(getattr(transformers, f"{name}ForConditionalGeneration")(config))
    return model, save(model, directory)


def processor(**settings):
    from transformers import Qwen2VLImageProcessorPil

    limits = {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}
    return Qwen2VLImageProcessorPil(**{"patch_size": 4, "size": limits} | settings)


def clip(frames, width, height, rate=4.0, every=2):
    pictures = [np.asarray(picture(width, height, seed)) for seed in range(frames)]
    return Video(np.stack(pictures), [index * every / rate for index in range(frames)], rate, frames * every / rate)


def embeddings(model, modality, arrays):
    """Return what transformers makes of one item, with the levels side by side."""
    given = tensors(arrays)
    if modality == "image":
        found = model.get_image_features(given["pixel_values"], given["image_grid_thw"])
    else:
        found = model.get_video_features(given["pixel_values_videos"], given["video_grid_thw"])
    levels = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
    return torch.cat([torch.cat(tuple(level)) for level in levels], dim=-1)


@pytest.mark.parametrize("name", FAMILIES)
def test_embeddings(tmp_path, name):
    model, config = make(tmp_path, name)
    family, tower = open_family(config), open_tower(config, tmp_path)
    images = [family.preprocess_image(picture(*size, seed), processor(), {}, 1) for seed, size in enumerate(SIZES)]
    limits = {"size": {"shortest_edge": 256, "longest_edge": 8000}}
    videos = [family.preprocess_video(clip(*shape), processor(), limits) for shape in [(5, 31, 40), (2, 80, 9), (4, 31, 40)]]
    for modality, arrays in (("image", images), ("video", videos)):
        with torch.inference_mode():
            expected = [embeddings(model, modality, each) for each in arrays]
            together = tower.encode(modality, [tensors(each) for each in arrays])
            alone = [tower.encode(modality, [tensors(each)])[0] for each in arrays]
        for each, one, more, found in zip(arrays, alone, together, expected, strict=True):
            assert largest_difference(one, found) < 1e-4
            assert largest_difference(more, found) < 1e-4
            expansion = family.expand(modality, each, lambda text: [0])
            assert sum(count for _, count in expansion.embedded) == len(found) == np.prod(expansion.grid)
            assert found.shape[1] == family.levels * 32
            assert len(found) <= family.max_tokens(modality, processor().to_dict() if modality == "image" else limits)


def test_long_videos_are_encoded_in_parts(tmp_path, monkeypatch):
    model, config = make(tmp_path, "Qwen2_5_VL", intermediate_size=21)  # of which GEMMs of 16-bit types get 24
    family, tower = open_family(config), open_tower(config, tmp_path)
    shapes = [(7, 31, 40), (2, 80, 9), (1, 200, 200), (3, 31, 40)]
    options = {"size": {"shortest_edge": 256, "longest_edge": 4000}}
    videos = [tensors(family.preprocess_video(clip(*shape), processor(), options)) for shape in shapes]
    monkeypatch.setattr(qwen_vl, "MAX_PATCHES", 300)
    layouts = list[Layout]()
    monkeypatch.setattr(qwen_vl, "Layout", lambda *given: layouts.append(Layout(*given)) or layouts[-1])
    with torch.inference_mode():
        for found, video in zip(tower.encode("video", videos), videos, strict=True):
            assert largest_difference(found, embeddings(model, "video", video)) < 1e-4
    assert len(layouts) > 3
    assert all(sum(layout.counts) <= 300 for layout in layouts)


@pytest.mark.parametrize("name", ["Qwen2VL", "Qwen3VL"])
def test_names_of_older_and_newer_checkpoints(tmp_path, name):
    """Published by Qwen: `visual...`; as transformers writes it: `model.visual...`."""
    _, config = make(tmp_path, name)
    known = open_tower(config, tmp_path).state_dict()
    file = tmp_path / "model.safetensors"
    plain = {key.removeprefix("model."): value for key, value in load_file(file).items()}
    for prefix in ("", "model."):
        save_file({f"{prefix}{key}" if key.startswith("visual.") else key: value for key, value in plain.items()}, file)
        found = open_tower(config, tmp_path).state_dict()
        assert found.keys() == known.keys()
        assert all(torch.equal(found[key], known[key]) for key in known)


def hf_processor(name):
    """Return the processor without a video processor, which would need torchvision."""
    import transformers

    whole = object.__new__(getattr(transformers, f"{name}Processor"))
    whole.image_processor = processor()
    whole.video_processor = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    whole.image_token, whole.video_token = "<|image_pad|>", "<|video_pad|>"
    whole.vision_start_token, whole.vision_end_token = "<|vision_start|>", "<|vision_end|>"
    return whole


@pytest.mark.parametrize("name", ["Qwen2VL", "Qwen2_5_VL", "Qwen3VL"])
def test_expansion_is_the_processors(tmp_path, make_tokenizer, name):
    from transformers.video_utils import VideoMetadata

    tokenizer = make_tokenizer(start="<|vision_start|>", end="<|vision_end|>", image="<|image_pad|>", video="<|video_pad|>")

    _, config = make(tmp_path, name)
    family, whole = open_family(config), hf_processor(name)
    videos = [clip(5, 31, 40), clip(4, 40, 40, rate=3.0, every=1)]
    images = [family.preprocess_image(picture(*size), processor(), {}, 2) for size in [(40, 31), (9, 64)]]
    clips = [family.preprocess_video(video, processor(), {}) for video in videos]
    metadata = list[VideoMetadata]()
    for video, every in zip(videos, (2, 1), strict=True):
        total = len(video.frames) * every
        metadata.append(VideoMetadata(total, fps=video.frame_rate, frames_indices=[*range(0, total, every)]))
    if name == "Qwen2_5_VL":
        for each, times in zip(clips, metadata, strict=True):
            assert each["second_per_grid_ts"].tolist() == [np.float32(2 / times.sampled_fps)]
            assert family.expand("video", each, tokenizer.encode).interval == 3 * np.float32(2 / times.sampled_fps)
    items = [("image", images[0]), ("video", clips[0]), ("image", images[1]), ("video", clips[1])]
    text = "".join(f"{letter}{family.placeholder(modality)}" for letter, (modality, _) in zip("abcd", items, strict=True))
    pictures = {"image_grid_thw": torch.as_tensor(np.concatenate([each["image_grid_thw"] for each in images]))}
    grids = torch.as_tensor(np.concatenate([each["video_grid_thw"] for each in clips]))
    films = {"video_grid_thw": grids, "video_metadata": metadata}
    (written,), _ = whole.get_text_with_replacements(
        [text],
        [whole.replace_image_token(pictures, index) for index in range(2)],
        [whole.replace_video_token(films, index) for index in range(2)],
    )
    expected = tokenizer.encode(written, add_special_tokens=False)
    tokens = list[int]()
    for letter, (modality, arrays) in zip("abcd", items, strict=True):
        expansion = family.expand(modality, arrays, tokenizer.encode)
        tokens += [*tokenizer.encode(letter), *expansion.tokens]
        pad = tokenizer.convert_tokens_to_ids(f"<|{modality}_pad|>")
        embedded = [at for start, count in expansion.embedded for at in range(start, start + count)]
        assert [at for at, token in enumerate(expansion.tokens) if token == pad] == embedded
    assert tokens == expected


@pytest.mark.parametrize("name", ["Qwen2VL", "Qwen3VL"])
def test_frames_of_videos_are_prepared_as_images(tmp_path, name):
    """transformers prepares videos with torchvision only; its images and its patches of videos tell what it would make."""
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    _, config = make(tmp_path, name)
    family, video = open_family(config), clip(5, 31, 44)
    # frames of 32 x 40 pixels, whatever the limits are counted for
    limits = {"size": {"shortest_edge": 1, "longest_edge": 10**6}}
    prepared = family.preprocess_video(video, processor(**limits), limits)
    frames = [
        torch.as_tensor(family.preprocess_image(frame, processor(**limits), {}, 1)["pixel_values"]) for frame in video.frames
    ]
    assert prepared["video_grid_thw"].tolist() == [[3, 12, 8]]
    found = torch.as_tensor(prepared["pixel_values_videos"]).view(3, 96, 3, 2, 16)
    for index in range(6):
        frame = frames[min(index, 4)].view(96, 3, 2, 16)[:, :, 0]
        assert largest_difference(found[index // 2, :, :, index % 2], frame) < 1e-5
    pixels = torch.rand(1, 3, 3, 16, 24)
    plain = (pixels[0].permute(0, 2, 3, 1) * 255).round().to(torch.uint8).numpy()
    settings = {"do_resize": False, "image_mean": [0, 0, 0], "image_std": [1, 1, 1]}
    patches, *grid = Qwen3VLVideoProcessor().patchify(torch.as_tensor(plain).permute(0, 3, 1, 2)[None] / 255, 4, 2, 2)
    ours = family.preprocess_video(Video(plain, [0.0, 0.5, 1.0], 2.0), processor(), settings)
    assert ours["video_grid_thw"].tolist() == [grid]
    assert largest_difference(torch.as_tensor(ours["pixel_values_videos"]), patches[0]) < 1e-6


def test_sizes_of_images_and_videos_are_those_of_transformers():
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as resize_image
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as resize_video

    random = np.random.default_rng(5)
    family = open_family({"architectures": ["Qwen3VLForConditionalGeneration"], "vision_config": {"patch_size": 14}})
    for _ in range(300):
        height, frames = int(random.integers(1, 3000)), int(random.integers(2, 30))
        width = int(np.clip(height * np.exp(random.uniform(-5, 5)), 1, 60000))
        least, most = 56 * 56, int(random.choice([28 * 28 * 4, 28 * 28 * 1280]))
        settings = VIDEO_DEFAULTS | {"size": {"shortest_edge": least, "longest_edge": most}}
        expected = resize_image(height, width, 28, least, most)
        assert fit(height, width, 28, least, most) == expected
        assert expected[0] * expected[1] // 28**2 <= family.max_tokens("image", settings)
        expected = resize_video(frames, height, width, 2, 28, least, most)
        assert family.video_size(frames, (height, width), settings) == expected
        assert expected[0] * expected[1] // 28**2 * -(-frames // 2) <= family.max_tokens("video", settings)


def test_the_pixels_of_videos_can_be_capped(tmp_path):
    """Numbers by hand: transformers' own cap needs torchvision."""
    sizes = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "cap_pixels_per_frame": True}
    older, newer = (open_family(make(tmp_path / name, name)[1]) for name in ("Qwen2VL", "Qwen3VL"))
    limits = {"size": {"shortest_edge": 64, "longest_edge": 64 * 100}}
    # of 100 tokens of 8 x 8 pixels, 90 are shared by 10 pairs: 9 per frame
    assert older.video_size(20, (80, 80), sizes | limits | {"max_video_tokens": 100}) == (24, 24)
    assert older.video_size(20, (80, 80), sizes | limits | {"max_video_tokens": 100, "cap_pixels_per_frame": False}) == (80, 80)
    # at most 4 tokens per frame
    assert newer.video_size(4, (80, 80), sizes | limits | {"max_video_tokens": 4}) == (16, 16)
    assert newer.video_size(4, (80, 80), sizes | limits | {"max_video_tokens": 4, "cap_pixels_per_frame": False}) == (40, 40)


@pytest.mark.parametrize(
    ("video", "options", "message"),
    [
        (clip(1, 40, 40), {}, "at least 2 frames; got 1"),
        (clip(2, 1, 201), {}, "at most 200 times the shorter one; got"),
        (clip(2, 9, 8), {"do_resize": False}, "multiples of 8; got 9 x 8"),
        (clip(2, 8, 8), {"patch_size": 7}, "patch_size must be 4.*; got 7"),
        (clip(2, 8, 8), {"size": {"shortest_edge": "a"}}, "size.shortest_edge must be an integer of at least 1; got 'a'"),
    ],
)
def test_videos_that_cannot_be_prepared_are_refused(tmp_path, video, options, message):
    _, config = make(tmp_path, "Qwen3VL")
    with pytest.raises(InvalidParameter, match=message):
        open_family(config).preprocess_video(video, processor(), options)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("Qwen2VL", {"patch_size": 0}, "patch_size must be an integer of at least 1; got 0"),
        ("Qwen2VL", {"num_heads": 3}, "the width of 3 heads must be a multiple of 4; got 16 / 3"),
        ("Qwen2_5_VL", {"window_size": 7}, "window_size must be at least 8; got 7"),
        ("Qwen3VL", {"deepstack_visual_indexes": [3]}, r"deepstack_visual_indexes must be layers below 3; got \[3\]"),
    ],
)
def test_what_is_wrong_in_the_configuration_is_named(tmp_path, name, change, message):
    _, config = make(tmp_path, name)
    with pytest.raises(ModelError, match=message):
        open_tower(config | {"vision_config": config["vision_config"] | change}, tmp_path)


@pytest.mark.parametrize("name", ["Qwen2VL", "Qwen2_5_VL", "Qwen3VL"])
def test_the_defaults_are_those_of_the_classes(name):
    """A published config.json leaves out what equals them."""
    import transformers

    full = json.loads(getattr(transformers, f"{name}Config")().to_json_string())["vision_config"]
    family = open_family({"architectures": [f"{name}ForConditionalGeneration"]})
    assert {key: full[key] for key in family.defaults} == {
        key: list(value) if isinstance(value, tuple) else value for key, value in family.defaults.items()
    }
