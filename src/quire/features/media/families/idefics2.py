"""Idefics 2: an image keeps its shape, alone or after its four quarters, and each of these frames has a number of tokens."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from quire.features.media.families.base import Arrays, Expansion, MediaFamily, Tokenize
from quire.features.media.families.fields import image_settings, read_vision, size_field, token_field
from quire.files.reading import shown
from quire.types.errors import InvalidParameter, ModelError
from quire.types.media import Modality

AROUND = "<fake_token_around_image>"
QUARTERS = 4


def resampler_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found = config.get("perceiver_config") or {}
    if not isinstance(found, Mapping):
        raise ModelError(f"config.json: perceiver_config must be an object; got {shown(found)}")
    return found


class Idefics2(MediaFamily):
    tower = "idefics2:Idefics2Tower"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.patch = read_vision(config, kind="idefics2_vision").patch_size
        self.count = size_field(resampler_config(config), "resampler_n_latents", 64, "perceiver_config")
        self.image_token = token_field(config, ("image_token_id",), 32001)

    def placeholder(self, modality: Modality) -> str:  # noqa: ARG002
        return "<image>"

    def expand(self, modality: Modality, arrays: Arrays, tokenize: Tokenize) -> Expansion:  # noqa: ARG002
        between, tokens, spans = tokenize(AROUND), list[int](), list[tuple[int, int]]()
        for _ in arrays["frame_sizes"]:
            tokens += between if tokens else []
            spans.append((len(tokens), self.count))
            tokens += [self.image_token] * self.count
        return Expansion(tokens, AROUND, AROUND, tuple(spans))

    def max_tokens(self, modality: Modality, processor: Mapping[str, Any]) -> int:  # noqa: ARG002
        return self.count * (1 + QUARTERS if image_settings(processor).get("do_image_splitting") else 1)

    def preprocess_image(self, image: Any, processor: Any, options: Mapping[str, Any], count: int) -> Arrays:
        """Return the frames, each in the upper left of `pixel_values`, and their heights and widths."""
        if min(image.size) < 2 and options.get("do_image_splitting", getattr(processor, "do_image_splitting", False)):
            raise InvalidParameter(
                f"an image must have at least 2 x 2 pixels to be split; got {image.width} x {image.height}. Send a larger one, "
                "or set do_image_splitting to false in mm_processor_kwargs."
            )
        arrays = super().preprocess_image(image, processor, options, count)
        pixels = np.asarray(arrays["pixel_values"])[0]
        if "pixel_attention_mask" not in arrays:
            raise InvalidParameter(
                "mm_processor_kwargs must not have do_pad; got do_pad=False. Remove it.", "mm_processor_kwargs"
            )
        mask = np.asarray(arrays["pixel_attention_mask"])[0]
        sizes = np.stack([mask[:, :, 0].sum(1), mask[:, 0].sum(1)], axis=1).astype(np.int64)
        if sizes.min() < self.patch:
            raise InvalidParameter(
                f"mm_processor_kwargs must give images of at least {self.patch} x {self.patch} pixels, one patch of the "
                "model's image encoder. Remove the arguments that change the size.",
                "mm_processor_kwargs",
            )
        return {"pixel_values": pixels, "frame_sizes": sizes}

    def complete_text(self, text: str, images: int) -> str:  # noqa: ARG002
        """Write one mark between neighbouring images, and a space between a mark and a word."""
        return re.sub(rf"{AROUND}(?=[^\s<])", f"{AROUND} ", text.replace(AROUND * 2, AROUND))
