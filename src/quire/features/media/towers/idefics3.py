"""Idefics 3 and SmolVLM: SigLIP with positions as fractions of the image, and squares of patches projected to one token."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quire.features.media.families.fields import text_width
from quire.features.media.families.idefics3 import read_frames
from quire.features.media.towers.base import Tower
from quire.features.media.towers.parts import Part, by_shape, project
from quire.features.media.towers.vit import UNREAD, VisionEncoder
from quire.layers.linear import Linear
from quire.types.media import Modality

RENAMES = (
    (r"^(?!(model\.)?(vision_model|connector)\.)", None),
    (r"^model\.", ""),
    (r"^vision_model\.", "vision_tower."),
    *UNREAD,
)


def fractional_positions(rows: int, columns: int, side: int, device: torch.device) -> Tensor:
    """Return the index of each patch's position embedding [rows * columns], of side * side.

    A patch's row and column are fractions of the image in float32, looked up among as many intervals as a side has
    positions: rounding puts some patches into the interval of their neighbour, which the models were trained with.
    """
    edges = torch.arange(1 / side, 1.0, 1 / side)

    def found(count: int) -> Tensor:
        fractions = torch.arange(count, dtype=torch.float32) * (1.0 / torch.tensor(count))
        return torch.bucketize(fractions.clamp(max=1.0 - 1e-6), edges, right=True)

    return (found(rows)[:, None] * side + found(columns)).flatten().to(device)


class ModalityProjection(Part):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.proj = Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return project(self.proj, x)


class Connector(Part):
    def __init__(self, side: int, factor: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.side, self.factor = side, factor
        self.modality_projection = ModalityProjection(inputs * factor**2, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """x [frames, patches, width] -> [frames, tokens, hidden size]."""
        short = self.side // self.factor
        x = x.view(len(x), short, self.factor, short, self.factor, -1).transpose(2, 3)
        return self.modality_projection(x.reshape(len(x), short * short, -1))


class Idefics3Tower(Tower):
    order: Tensor
    renames = RENAMES

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        vision, factor = read_frames(config)
        self.vision_tower = VisionEncoder(vision)
        self.connector = Connector(vision.side, factor, vision.width, text_width(config))

    def finish(self, device: torch.device) -> None:
        side = self.connector.side
        self.order = fractional_positions(side, side, side, device)

    def features(self, pixels: Tensor) -> Tensor:
        """pixels [frames, channels, height, width] -> [frames, tokens, hidden size]."""
        return self.connector(self.vision_tower(pixels, self.order))

    def encode(self, modality: Modality, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:  # noqa: ARG002
        return [found.flatten(0, 1) for found in by_shape([item["pixel_values"] for item in items], self.features)]
