"""PaliGemma: images come first, then <bos>, the text and a newline; all tokens attend to each other."""

from collections.abc import Mapping
from typing import Any

from quire.features.media.families.fields import read_vision, token_field
from quire.features.media.families.llava import FixedSizeFamily
from quire.types.media import Modality

VISION: Mapping[str, Any] = {
    "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4096, "num_hidden_layers": 27,
    "num_attention_heads": 16, "image_size": 224, "patch_size": 14,
}  # fmt: skip
IMAGE = "<image>"
BEGIN = "<bos>"


class PaliGemma(FixedSizeFamily):
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

    def complete_text(self, text: str, images: int) -> str:
        """Write the images in front if the text has no placeholders, <bos> after the last one, and a newline at the end."""
        if IMAGE not in text:
            text = IMAGE * images + text
        before, image, after = text.rpartition(IMAGE)
        return f"{before}{image}{BEGIN}{after}\n"
