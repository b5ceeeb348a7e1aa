"""PaliGemma: images come first, then <bos>, the text and a newline; all of it attends to all of it."""

from collections.abc import Mapping
from typing import Any

from quire.features.media.families.base import Arrays, Expansion, MediaFamily, Tokenize
from quire.features.media.families.fields import check_image_size, read_vision, token_field
from quire.types.media import Modality

VISION: Mapping[str, Any] = {
    "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4096, "num_hidden_layers": 27,
    "num_attention_heads": 16, "image_size": 224, "patch_size": 14,
}  # fmt: skip
IMAGE = "<image>"
BEGIN = "<bos>"


class PaliGemma(MediaFamily):
    tower = "paligemma:PaliGemmaTower"
    bidirectional = "prompt"
    adds_special_tokens = False

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.vision = read_vision(config, VISION)
        self.count = self.vision.side**2
        self.image_token = token_field(config, ("image_token_index", "image_token_id"), 256000)

    def placeholder(self, modality: Modality) -> str:  # noqa: ARG002
        return IMAGE

    def expand(self, modality: Modality, arrays: Arrays, tokenize: Tokenize) -> Expansion:  # noqa: ARG002
        return Expansion([self.image_token] * self.count)

    def max_tokens(self, modality: Modality, processor: Mapping[str, Any]) -> int:  # noqa: ARG002
        return self.count

    def preprocess_image(self, image: Any, processor: Any, options: Mapping[str, Any], count: int) -> Arrays:
        arrays = super().preprocess_image(image, processor, options, count)
        check_image_size(arrays["pixel_values"].shape, self.vision.image_size)
        return arrays

    def complete_text(self, text: str, images: int) -> str:
        """Write the images in front if the text has no placeholders, <bos> after the last one, and a newline at the end."""
        if IMAGE not in text:
            text = IMAGE * images + text
        before, image, after = text.rpartition(IMAGE)
        return f"{before}{image}{BEGIN}{after}\n"
