"""Gemma 3: SigLIP, averages over squares of patches, a norm and a projection."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from quire.features.media.families.fields import VisionConfig, read_vision, text_width
from quire.features.media.families.gemma3 import pooled_side
from quire.features.media.towers.base import Tower
from quire.features.media.towers.parts import Part, by_shape
from quire.features.media.towers.vit import VisionEncoder, tower_renames
from quire.layers.norm import RMSNorm
from quire.layers.parameter import parameter
from quire.types.media import Modality


class PoolingProjector(Part):
    def __init__(self, vision: VisionConfig, pooled: int, outputs: int) -> None:
        super().__init__()
        self.side, self.pooled = vision.side, pooled
        self.mm_soft_emb_norm = RMSNorm(vision.width, vision.eps, offset=1.0)
        self.mm_input_projection_weight = parameter(vision.width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """x [images, patches, width] -> [images, tokens, hidden size]."""
        squares = F.avg_pool2d(x.mT.reshape(len(x), -1, self.side, self.side), self.pooled)
        normed: Tensor = self.mm_soft_emb_norm(squares.flatten(2).mT.contiguous())
        return normed @ self.mm_input_projection_weight


class Gemma3Tower(Tower):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        vision = read_vision(config)
        self.vision_tower = VisionEncoder(vision)
        self.multi_modal_projector = PoolingProjector(vision, pooled_side(config)[1], text_width(config))
        self.renames = tower_renames()

    def features(self, pixels: Tensor) -> Tensor:
        """pixels [images, channels, height, width] -> [images, tokens, hidden size]."""
        return self.multi_modal_projector(self.vision_tower(pixels))

    def encode(self, modality: Modality, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:  # noqa: ARG002
        return [found.flatten(0, 1) for found in by_shape([item["pixel_values"] for item in items], self.features)]
