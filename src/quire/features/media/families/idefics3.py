"""Idefics 3 and SmolVLM: an image is cut into frames of one size, row by row, and followed by the whole image in one frame."""

from collections.abc import Mapping
from math import ceil
from typing import Any

import numpy as np

from quire.features.media.families.base import Arrays, Expansion, MediaFamily, Tokenize
from quire.features.media.families.fields import (
    VisionConfig,
    check_image_size,
    image_settings,
    read_vision,
    size_field,
    token_field,
)
from quire.types.errors import ModelError
from quire.types.media import Modality

LARGEST_SIDE = 4096  # to which the image processor scales an image down
AROUND = "<fake_token_around_image>"


def read_frames(config: Mapping[str, Any]) -> tuple[VisionConfig, int]:
    """Return the encoder's configuration, and how many patches along each side become one token."""
    vision, factor = read_vision(config, kind="idefics3_vision"), size_field(config, "scale_factor", 2)
    if vision.side % factor:
        raise ModelError(f"config.json: scale_factor must divide the {vision.side} patches of a side; got {factor}")
    return vision, factor


class Idefics3(MediaFamily):
    tower = "idefics3:Idefics3Tower"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        vision, factor = read_frames(config)
        self.image_size, self.count = vision.image_size, (vision.side // factor) ** 2
        self.image_token = token_field(config, ("image_token_id",), 128257)

    def placeholder(self, modality: Modality) -> str:  # noqa: ARG002
        return "<image>"

    def expand(self, modality: Modality, arrays: Arrays, tokenize: Tokenize) -> Expansion:  # noqa: ARG002
        """Return the frames' image tokens, each after its name such as <row_1_col_2>."""
        rows, columns = map(int, arrays["grid"])
        names = ["\n" * (row > 1 and column == 1) + f"{AROUND}<row_{row}_col_{column}>"
                 for row in range(1, rows + 1) for column in range(1, columns + 1)]  # fmt: skip
        names.append("\n\n" * (rows > 0) + f"{AROUND}<global-img>")
        tokens, spans = list[int](), list[tuple[int, int]]()
        for name in names:
            tokens += tokenize(name)
            spans.append((len(tokens), self.count))
            tokens += [self.image_token] * self.count
        return Expansion([*tokens, *tokenize(AROUND)], embedded=tuple(spans))

    def max_tokens(self, modality: Modality, processor: Mapping[str, Any]) -> int:  # noqa: ARG002
        settings = image_settings(processor)
        if settings.get("do_image_splitting", True) is False:
            return self.count
        longest = size_field(settings.get("size") or {}, "longest_edge", 4 * 364, "preprocessor_config.json")
        return self.count * (ceil(min(longest, LARGEST_SIDE) / self.image_size) ** 2 + 1)

    def preprocess_image(self, image: Any, processor: Any, options: Mapping[str, Any], count: int) -> Arrays:
        arrays = super().preprocess_image(image, processor, {**options, "return_row_col_info": True}, count)
        pixels = np.asarray(arrays["pixel_values"])[0]
        check_image_size(pixels.shape, self.image_size)
        grid = np.array([arrays["rows"][0][0], arrays["cols"][0][0]], dtype=np.int64)
        return {"pixel_values": pixels, "grid": grid}
