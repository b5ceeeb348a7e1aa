"""LLaVA-NeXT, its video model and LLaVA-OneVision: tiles are joined, cut to the image, and each row ends with a newline."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.features.media.families.anyres import LlavaNext, LlavaNextVideo, LlavaOnevision, LlavaVideo, unpadded
from quire.features.media.towers.llava import LlavaTower
from quire.features.media.towers.parts import by_shape
from quire.features.media.towers.vit import tower_renames
from quire.layers.parameter import parameter
from quire.types.media import Modality


class LlavaNextTower(LlavaTower):
    family: ClassVar[type[LlavaNext]] = LlavaNext
    sizes: LlavaNext

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.sizes = self.family(config)
        self.image_newline = parameter(self.multi_modal_projector.linear_2.outputs)
        self.renames = (*tower_renames(("multi_modal_projector", "image_newline")), *self.vision_tower.renames)

    def encode(self, modality: Modality, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:  # noqa: ARG002
        tiles = by_shape([item["pixel_values"] for item in items], self.features)
        return [self.join(each, item["image_sizes"].tolist()) for each, item in zip(tiles, items, strict=True)]

    def join(self, tiles: Tensor, size: Sequence[int]) -> Tensor:
        """Return the embeddings [embeddings, hidden size] of an image of this height and width.

        tiles: the whole image, and its larger copy [1 + tiles, patches, hidden size].
        """
        whole = tiles[0]
        if len(tiles) == 1:
            return torch.cat([whole, self.image_newline[None]])
        side, image = self.sizes.side, (size[0], size[1])
        tall, wide = self.sizes.tiles(image)
        joined = tiles[1:].view(tall, wide, side, side, -1).transpose(1, 2).flatten(0, 1).flatten(1, 2)
        rows, columns = unpadded(image, tall * side, wide * side)
        joined = self.shrink(joined[rows, columns])
        newlines = self.image_newline.expand(len(joined), 1, -1)
        return torch.cat([whole, torch.cat([joined, newlines], dim=1).flatten(0, 1)])

    def shrink(self, x: Tensor) -> Tensor:
        """Return x [rows, columns, hidden size] interpolated to the shape that the family gives it."""
        shape = self.sizes.shrunk(x.shape[0], x.shape[1])
        return x if shape == x.shape[:2] else resized(x[None], shape)[0]


def resized(x: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return x [images, rows, columns, width] interpolated to these rows and columns."""
    return F.interpolate(x.permute(0, 3, 1, 2), shape, mode="bilinear").permute(0, 2, 3, 1)


class LlavaVideoTower(LlavaNextTower):
    sizes: LlavaVideo

    def encode(self, modality: Modality, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        if modality == "image":
            return super().encode(modality, items)
        frames = by_shape([item["pixel_values"] for item in items], self.frame_features)
        newlines = self.image_newline.expand(self.sizes.newlines, -1)
        return [torch.cat([each.flatten(0, 1), newlines]) for each in frames]

    def frame_features(self, pixels: Tensor) -> Tensor:
        """pixels [frames, channels, height, width] -> [frames, tokens, hidden size]."""
        raise NotImplementedError


class LlavaNextVideoTower(LlavaVideoTower):
    family = LlavaNextVideo
    sizes: LlavaNextVideo

    def frame_features(self, pixels: Tensor) -> Tensor:
        x = self.selected(pixels).mT.reshape(len(pixels), -1, self.sizes.side, self.sizes.side)
        pool = F.avg_pool2d if self.sizes.mode == "average" else F.max_pool2d
        return self.multi_modal_projector(pool(x, self.sizes.stride).flatten(2).mT)


class LlavaOnevisionTower(LlavaVideoTower):
    family = LlavaOnevision

    def frame_features(self, pixels: Tensor) -> Tensor:
        x = self.features(pixels).view(len(pixels), self.sizes.side, self.sizes.side, -1)
        return resized(x, (self.sizes.pooled(),) * 2).flatten(1, 2)
