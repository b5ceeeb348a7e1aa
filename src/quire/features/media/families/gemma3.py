"""Gemma 3: an image is scaled to one size, and becomes `mm_tokens_per_image` tokens."""

from collections.abc import Mapping
from math import isqrt
from typing import Any, ClassVar

import numpy as np

from quire.features.media.families.base import Arrays, Expansion, MediaFamily, Tokenize
from quire.features.media.families.fields import check_image_size, image_settings, read_vision, size_field, token_field
from quire.types.errors import ModelError
from quire.types.media import Modality

# of the processor's class: they are stronger than those of preprocessor_config.json
CROP_SETTINGS: Mapping[str, Any] = {
    "do_pan_and_scan": False,
    "pan_and_scan_min_crop_size": 256, "pan_and_scan_max_num_crops": 4, "pan_and_scan_min_ratio_to_activate": 1.2,
}  # fmt: skip
INTRODUCTION = "Here is the original image "
CROPS = " and here are some crops to help you see better "


def pooled_side(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the tokens along each side of an image, and the patches along each side of a token."""
    vision, count = read_vision(config), size_field(config, "mm_tokens_per_image", 256)
    side = isqrt(count)
    if side * side != count or side > vision.side or vision.side // (vision.side // side) != side:
        raise ModelError(
            f"config.json: mm_tokens_per_image must be the square of a number that divides the {vision.side} patches of a "
            f"side; got {count}"
        )
    return side, vision.side // side


class Gemma3(MediaFamily):
    tower = "gemma3:Gemma3Tower"
    bidirectional = "item"
    embeds_fields: ClassVar[Mapping[str, tuple[int, ...]]] = {}

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.image_size = read_vision(config).image_size
        self.count = pooled_side(config)[0] ** 2
        self.image_token = token_field(config, ("image_token_index", "image_token_id"), 262144)
        self.begin = token_field(config, ("boi_token_index", "boi_token_id"), 255999)
        self.end = token_field(config, ("eoi_token_index", "eoi_token_id"), 256000)

    def placeholder(self, modality: Modality) -> str:  # noqa: ARG002
        return "<start_of_image>"

    def expand(self, modality: Modality, arrays: Arrays, tokenize: Tokenize) -> Expansion:  # noqa: ARG002
        """Return one range of image tokens, or one for the image and each of its crops with text between them."""
        one = [self.begin, *[self.image_token] * self.count, self.end]
        crops = len(arrays["pixel_values"]) - 1
        before = f"{INTRODUCTION}\n\n" if crops else "\n\n"
        tokens, starts = list(one), [1]
        for crop in range(crops):
            tokens += tokenize(f"\n\n{' ' if crop else CROPS}\n\n")
            starts.append(len(tokens) + 1)
            tokens += one
        return Expansion(tokens, before, "\n\n", tuple((start, self.count) for start in starts))

    def max_tokens(self, modality: Modality, processor: Mapping[str, Any]) -> int:  # noqa: ARG002
        settings = {**CROP_SETTINGS, **{name: value for name, value in image_settings(processor).items() if value is not None}}
        crops = size_field(settings, "pan_and_scan_max_num_crops", where="preprocessor_config.json")
        return self.count * (1 + crops if settings.get("do_pan_and_scan") else 1)

    def arrays_of_embeds(self, count: int, fields: Arrays) -> Arrays:  # noqa: ARG002
        return {"pixel_values": np.empty(max(1, count // self.count))}  # the image, and its crops

    def preprocess_image(self, image: Any, processor: Any, options: Mapping[str, Any], count: int) -> Arrays:
        arrays = super().preprocess_image(image, processor, {**CROP_SETTINGS, **options}, count)
        check_image_size(arrays["pixel_values"].shape, self.image_size)
        return {"pixel_values": arrays["pixel_values"]}
