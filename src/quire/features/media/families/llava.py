"""LLaVA 1.5, VipLLaVA and DeepSeek-VL: an image is scaled to one size, and every patch is a token."""

from collections.abc import Mapping
from typing import Any, ClassVar

from quire.features.media.families.base import Arrays, Expansion, MediaFamily, Tokenize
from quire.features.media.families.fields import (
    CLIP_LARGE,
    VisionConfig,
    check_image_size,
    choice_field,
    feature_layers,
    read_vision,
    token_field,
)
from quire.types.media import Modality

STRATEGIES = ("default", "full")  # default: without the first token of the encoder


class FixedSizeFamily(MediaFamily):
    """A family whose images are scaled to the size of `vision`, and have `count` tokens each."""

    vision: VisionConfig
    image_token: int
    count: int
    embeds_fields: ClassVar[Mapping[str, tuple[int, ...]]] = {}

    def expand(self, modality: Modality, arrays: Arrays, tokenize: Tokenize) -> Expansion:  # noqa: ARG002
        return Expansion([self.image_token] * self.count)

    def max_tokens(self, modality: Modality, processor: Mapping[str, Any]) -> int:  # noqa: ARG002
        return self.count

    def preprocess_image(self, image: Any, processor: Any, options: Mapping[str, Any], count: int) -> Arrays:
        arrays = super().preprocess_image(image, processor, options, count)
        check_image_size(arrays["pixel_values"].shape, self.vision.image_size)
        return arrays


class Llava(FixedSizeFamily):
    tower = "llava:LlavaTower"
    vision_defaults: ClassVar[Mapping[str, Any]] = CLIP_LARGE
    default_token: ClassVar[int] = 32000
    default_layer: ClassVar[int | tuple[int, ...]] = -2
    layer_field: ClassVar[str] = "vision_feature_layer"
    default_strategy: ClassVar[str] = "default"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.vision = read_vision(config, self.vision_defaults)
        self.image_token = token_field(config, ("image_token_index", "image_token_id"), self.default_token)
        name = self.layer_field if self.layer_field in config else "vision_feature_layer"
        self.states = feature_layers(config, self.vision.layers, name, self.default_layer)
        strategy = choice_field(config, "vision_feature_select_strategy", STRATEGIES, self.default_strategy)
        self.dropped = int(strategy == "default")  # tokens of the encoder that are left out, from the first
        self.count = self.vision.side**2 + self.vision.class_tokens - self.dropped

    def placeholder(self, modality: Modality) -> str:  # noqa: ARG002
        return "<image>"


class VipLlava(Llava):
    """LLaVA with hidden states of several layers side by side."""

    tower = "llava:VipLlavaTower"
    default_layer = (-2, -5, -8, -11, 6)
    layer_field = "vision_feature_layers"


class DeepseekVL(Llava):
    """LLaVA with the encoder's normalized output and other names."""

    tower = "llava:DeepseekVLTower"
    vision_defaults: ClassVar[Mapping[str, Any]] = {"model_type": "siglip_vision_model"}
    default_token, default_strategy = 100015, "full"

    def placeholder(self, modality: Modality) -> str:  # noqa: ARG002
        return "<image_placeholder>"
