"""Tiny random checkpoints of every family that reads images or videos: weights, image processor and tokenizer, and what
transformers answers to prompts with media."""

import functools
import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from media_towers import open_family, picture, tensors
from quire.features.media.families.base import Video

NEW_TOKENS = 6
VIDEO_SETTINGS = {"size": {"shortest_edge": 256, "longest_edge": 4000}}
Inputs = Callable[[list[Any], list[Any]], dict[str, Tensor]]
Part = Any  # a text, a PIL image, or frames of a video as an array [frames, height, width, 3]


@dataclass(frozen=True)
class MediaModel:
    """A family: `make` and `processor` of its unit tests, and the inputs of its transformers class."""

    tests: str  # module of the unit tests
    inputs: Inputs
    marks: dict[str, int]  # special tokens and their ids
    make: dict[str, Any] = field(default_factory=dict)  # arguments of `make`
    processor: tuple[Any, ...] = ()  # arguments of `processor`
    video: bool = False


# ---- what transformers' classes take: arrays of all images and of all videos of a prompt, in order


def joined(images: list[Any], videos: list[Any]) -> dict[str, Tensor]:
    """Join the arrays of all items along their first axis."""
    names = {name: some for some in (images, videos) if some for name in some[0] if name != "frame_tenths"}
    return {name: torch.cat([tensors(each)[name] for each in some]) for name, some in names.items()}


def padded(values: Sequence[Tensor]) -> Tensor:
    """Return a batch of tensors of different sizes, with zeros after each."""
    most = [max(value.shape[axis] for value in values) for axis in range(values[0].ndim)]
    out = values[0].new_zeros(len(values), *most)
    for index, value in enumerate(values):
        out[(index, *(slice(size) for size in value.shape))] = value
    return out


def tiles(images: list[Any], videos: list[Any]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    if images:
        found["pixel_values"] = padded([tensors(each)["pixel_values"] for each in images])
        found["image_sizes"] = torch.stack([tensors(each)["image_sizes"] for each in images])
    if videos:
        found["pixel_values_videos"] = padded([tensors(each)["pixel_values"] for each in videos])
    return found


def counted_tiles(images: list[Any], videos: list[Any]) -> dict[str, Tensor]:
    """As `tiles`, with the number of images of the prompt."""
    return tiles(images, videos) | ({"batch_num_images": torch.tensor([len(images)])} if images else {})


def any_size(images: list[Any], videos: list[Any]) -> dict[str, Tensor]:
    return {
        "pixel_values": padded([pixels for each in images for pixels in tensors(each)["pixel_values"]]),
        "image_sizes": torch.cat([tensors(each)["image_sizes"] for each in images]),
    }


def frames(images: list[Any], videos: list[Any]) -> dict[str, Tensor]:
    return {"pixel_values": torch.cat([tensors(each)["pixel_values"] for each in images])[None]}


def masked_frames(images: list[Any], videos: list[Any]) -> dict[str, Tensor]:
    return importlib.import_module("test_idefics2").reference(images)


def in_order(images: list[Any], videos: list[Any]) -> dict[str, Tensor]:
    """Images before videos: prompts of `PROMPTS` have them so."""
    return {"pixel_values": torch.cat([tensors(each)["pixel_values"] for each in (*images, *videos)])}


QWEN_MARKS = {"<|image_pad|>": 190, "<|video_pad|>": 191, "<|vision_start|>": 192, "<|vision_end|>": 193}
IMAGE_MARK = {"<image>": 190}
VIDEO_MARKS = {"<image>": 190, "<video>": 191}
PIXTRAL_MARKS = {"[IMG]": 190, "[IMG_BREAK]": 191, "[IMG_END]": 192}
FRAME_MARKS = {"<fake_token_around_image>": 191, "<end_of_utterance>": 192}
GRID_MARKS = {"<global-img>": 193} | {f"<row_{at // 4 + 1}_col_{at % 4 + 1}>": 150 + at for at in range(16)}
MODELS: dict[str, MediaModel] = {
    "llava": MediaModel("test_llava", joined, IMAGE_MARK),
    "llava-siglip": MediaModel(
        "test_llava", joined, IMAGE_MARK, {"kind": "siglip", "vision_feature_select_strategy": "full"}, ("siglip",)
    ),
    "vip-llava": MediaModel("test_llava", joined, IMAGE_MARK, {"name": "VipLlava", "vision_feature_layers": [-1, 1, -3]}),
    "deepseek-vl": MediaModel("test_llava", joined, {"<image_placeholder>": 190}, {"name": "DeepseekVL"}, ("siglip",)),
    "llava-next": MediaModel("test_anyres", tiles, IMAGE_MARK, {"name": "LlavaNext"}, ("LlavaNext",)),
    "llava-next-video": MediaModel(
        "test_anyres", tiles, VIDEO_MARKS, {"name": "LlavaNextVideo", "video_token_index": 191}, ("LlavaNextVideo",), True
    ),
    "llava-onevision": MediaModel(
        "test_anyres", counted_tiles, VIDEO_MARKS, {"name": "LlavaOnevision", "video_token_index": 191},
        ("LlavaOnevision",), True,
    ),
    "gemma3": MediaModel("test_gemma3", joined, {"<image_soft_token>": 190, "<start_of_image>": 191, "<end_of_image>": 192}),
    "paligemma": MediaModel("test_paligemma", joined, {"<image>": 190, "<bos>": 191}),
    "idefics2": MediaModel("test_idefics2", masked_frames, IMAGE_MARK | FRAME_MARKS),
    "idefics3": MediaModel("test_idefics3", frames, IMAGE_MARK | FRAME_MARKS | GRID_MARKS, {"name": "Idefics3"}),
    "smolvlm": MediaModel("test_idefics3", frames, IMAGE_MARK | FRAME_MARKS | GRID_MARKS),
    "internvl": MediaModel(
        "test_internvl", in_order, {"<IMG_CONTEXT>": 190, "<video>": 191, "<img>": 192, "</img>": 193}, video=True
    ),
    "mistral3": MediaModel("test_pixtral", any_size, PIXTRAL_MARKS, {"kind": "mistral3"}),
    "pixtral": MediaModel("test_pixtral", any_size, PIXTRAL_MARKS, {"kind": "pixtral"}),
    "lighton-ocr": MediaModel("test_pixtral", any_size, {"<|image_pad|>": 190}, {"kind": "lighton"}, (4,)),
    **{
        name: MediaModel("test_qwen_vl", joined, QWEN_MARKS, {"name": kind}, video=True)
        for name, kind in (
            ("qwen2-vl", "Qwen2VL"), ("qwen2.5-vl", "Qwen2_5_VL"), ("qwen3-vl", "Qwen3VL"), ("qwen3-vl-moe", "Qwen3VLMoe"),
            ("qwen3.5", "Qwen3_5"), ("qwen3.5-moe", "Qwen3_5Moe"),
        )
    },
}  # fmt: skip


def write_tokenizer(directory: Path, marks: dict[str, int]) -> Tokenizer:
    """Write a tokenizer of single bytes and special tokens."""
    special = {"<pad>": 0, "<s>": 1, "</s>": 2, **marks}
    letters = sorted(letter for letter in pre_tokenizers.ByteLevel.alphabet() if letter.isascii() or letter in "ĠĊ")
    made = Tokenizer(models.BPE({letter: 4 + index for index, letter in enumerate(letters)} | special, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(list(special))
    made.save(str(directory / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(named))
    return made


def clip(count: int, width: int, height: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.stack([np.asarray(picture(width, height, seed + index)) for index in range(count)])


class MediaCase:
    """A checkpoint in a directory, transformers' model of it, and its answers."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name, self.directory, self.entry = name, directory, MODELS[name]
        module = importlib.import_module(self.entry.tests)
        torch.manual_seed(3)
        maker = module.make_relative if self.entry.make.get("name") in ("VipLlava", "DeepseekVL") else module.make
        self.model, self.config = maker(directory, **self.entry.make)
        self.processor = module.processor(*self.entry.processor)
        self.processor.save_pretrained(directory)
        self.video_settings = VIDEO_SETTINGS if name.startswith("qwen") else {}
        if self.video_settings:
            (directory / "video_preprocessor_config.json").write_text(json.dumps(self.video_settings))
        self._tokenizer = write_tokenizer(directory, self.entry.marks)
        self.family = open_family(self.config)
        self._answers: dict[Any, tuple[list[int], Tensor]] = {}

    @functools.cached_property
    def prompts(self) -> list[list[Part]]:
        """Return prompts with media at the start, in the middle, at the end, one after the other, and without any."""
        one, two, three, four, five = pictures()
        found: list[list[Part]] = [
            [one, "what is it?"],
            ["see ", two, " and say"],
            ["at the end: ", three],
            ["a", four, five, "b"],
            [two, "or", one, " then ", five, "?"],
        ]
        if self.name != "paligemma":  # whose prompts always have an image: transformers' answers without depend on its kernels
            found.append(["no picture at all"])
        if self.entry.video:
            film, other = clip(5, 33, 40), clip(5, 47, 22, seed=9)
            found += [["look: ", film, " well"], [three, " and ", other, film, "?"]]
        return found

    @functools.cached_property
    def longest(self) -> int:
        """Return as many tokens as the longest prompt has, or some more."""
        return max(2 + sum(self._count(part, parts) for part in parts) for parts in self.prompts)

    def _count(self, part: Part, parts: Sequence[Part]) -> int:
        def tokenize(text: str) -> list[int]:
            return self._tokenizer.encode(text, add_special_tokens=False).ids

        if isinstance(part, str):
            return len(tokenize(part))
        images, videos = self._prepare([part], len(_media(parts)[0]))
        expansion = self.family.expand(_modality(part), (*images, *videos)[0], tokenize)
        return len(tokenize(expansion.before)) + len(expansion.tokens) + len(tokenize(expansion.after))

    def prompt(self, parts: Sequence[Part]) -> dict[str, Any]:
        """Return a prompt for `LLM`: texts and media in their order."""
        images, videos = _media(parts)
        texts = [part if isinstance(part, str) else self.family.placeholder(_modality(part)) for part in parts]
        data = {name: items for name, items in (("image", images), ("video", videos)) if items}
        return {"prompt": "".join(texts)} | ({"multi_modal_data": data} if data else {})

    def answer(self, ids: Sequence[int], parts: Sequence[Part], count: int = NEW_TOKENS) -> tuple[list[int], Tensor]:
        """Return transformers' greedy tokens, and the log-probabilities of each step [tokens, vocabulary]."""
        key = (tuple(ids), tuple(map(id, parts)), count)
        if key not in self._answers:
            self._answers[key] = self.generate(self.model, ids, parts, count)
        return self._answers[key]

    def generate(
        self, model: Any, ids: Sequence[int], parts: Sequence[Part], count: int = NEW_TOKENS, **options: Any
    ) -> tuple[list[int], Tensor]:
        """Return what a model of transformers generates."""
        with torch.inference_mode():
            found = model.generate(
                input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), do_sample=False,
                min_new_tokens=count, max_new_tokens=count, eos_token_id=None, pad_token_id=0,
                output_logits=True, return_dict_in_generate=True, **self.inputs(ids, parts), **options,
            )  # fmt: skip
        return found.sequences[0, len(ids) :].tolist(), torch.cat(found.logits).log_softmax(-1)

    def logprobs(self, ids: Sequence[int], parts: Sequence[Part], following: Sequence[int] = ()) -> Tensor:
        """Return transformers' log-probabilities after each token of a prompt and of an answer. [tokens, vocabulary]"""
        inputs = self.inputs(ids, parts)
        for name in ("token_type_ids", "mm_token_type_ids"):
            if name in inputs:
                kinds = torch.full((1, len(following)), int(self.name == "paligemma"))
                inputs[name] = torch.cat([inputs[name], kinds], 1)
        with torch.inference_mode():
            whole = torch.tensor([[*ids, *following]])
            found = self.model(input_ids=whole, attention_mask=torch.ones_like(whole), use_cache=False, **inputs)
        logprobs: Tensor = found.logits[0].log_softmax(-1)
        return logprobs

    def inputs(self, ids: Sequence[int], parts: Sequence[Part]) -> dict[str, Tensor]:
        images, videos = self._prepare(parts, len(_media(parts)[0]))
        return (self.entry.inputs(images, videos) if images or videos else {}) | self._kinds(ids)

    def _prepare(self, parts: Sequence[Part], count: int) -> tuple[list[Any], list[Any]]:
        """Return the arrays of images and of videos. count: images of the prompt"""
        images, videos = _media(parts)
        shown = [Video(video, [*map(float, range(len(video)))], 1.0) for video in videos]
        return (
            [self.family.preprocess_image(image, self.processor, {}, count) for image in images],
            [self.family.preprocess_video(video, self.processor, self.video_settings) for video in shown],
        )

    def _kinds(self, ids: Sequence[int]) -> dict[str, Tensor]:
        """Return what transformers' processors say about the kind of each token, for models that ask."""
        if self.name == "gemma3":
            return {"token_type_ids": torch.tensor([[int(token == 190) for token in ids]])}
        if self.name == "paligemma":
            return {"token_type_ids": torch.zeros(1, len(ids), dtype=torch.long)}
        if self.name.startswith("qwen") and {190, 191} & set(ids):
            return {"mm_token_type_ids": torch.tensor([[{190: 1, 191: 2}.get(token, 0) for token in ids]])}
        return {}


def _modality(part: Part) -> Any:
    return "image" if isinstance(part, Image.Image) else "video"


def _media(parts: Sequence[Part]) -> tuple[list[Any], list[Any]]:
    media = [part for part in parts if not isinstance(part, str)]
    return [part for part in media if _modality(part) == "image"], [part for part in media if _modality(part) == "video"]


@functools.cache
def pictures() -> list[Any]:
    """Return pictures of odd sizes."""
    return [picture(*size, seed) for seed, size in enumerate([(33, 47), (80, 31), (64, 64), (12, 90), (41, 23)])]
