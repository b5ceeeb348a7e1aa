"""PaliGemma: SigLIP and one linear layer."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from quire.features.media.families.fields import read_vision, text_width
from quire.features.media.families.paligemma import VISION
from quire.features.media.towers.base import Tower
from quire.features.media.towers.parts import Part, by_shape, project
from quire.features.media.towers.vit import VisionEncoder, tower_renames
from quire.layers.linear import Linear
from quire.types.media import Modality


class LinearProjector(Part):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = Linear(inputs, outputs, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return project(self.linear, x)


class PaliGemmaTower(Tower):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        vision = read_vision(config, VISION)
        self.vision_tower = VisionEncoder(vision)
        self.multi_modal_projector = LinearProjector(vision.width, text_width(config))
        self.renames = tower_renames()

    def features(self, pixels: Tensor) -> Tensor:
        """pixels [images, channels, height, width] -> [images, tokens, hidden size]."""
        return self.multi_modal_projector(self.vision_tower(pixels))

    def encode(self, modality: Modality, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:  # noqa: ARG002
        return [found.flatten(0, 1) for found in by_shape([item["pixel_values"] for item in items], self.features)]
