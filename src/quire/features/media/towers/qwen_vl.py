"""Encoders of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5.

Patches come in squares of `spatial_merge_size`, whose patches are merged to one embedding at the end. Each frame is a sequence
of its own. In most layers of Qwen2.5-VL patches attend within windows; its patches are sorted by window in all layers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.features.media.families.qwen_vl import GRIDS, MAX_PATCHES, Qwen2_5VL, Qwen2VL, Qwen3_5, Qwen3VL
from quire.features.media.towers.base import Tower
from quire.features.media.towers.packed import (
    Block,
    CubeEmbedding,
    PackedAttention,
    PaddedMLP,
    Rotations,
    inverse_frequencies,
    rotate_by_grid,
    sequences,
)
from quire.features.media.towers.parts import VisionMLP, project
from quire.features.media.towers.vit import Positions
from quire.files.reading import shown
from quire.layers.linear import Linear
from quire.layers.norm import LayerNorm, Norm, RMSNorm
from quire.layers.rope import rope_parameters
from quire.ops.packed_attention import Sequences
from quire.types.errors import ModelError
from quire.types.media import Modality
from quire.types.plan import Longs

EPSILON = 1e-6
PIXELS: Mapping[Modality, str] = {"image": "pixel_values", "video": "pixel_values_videos"}
Grid = tuple[int, int, int]  # frames, rows and columns of patches


class Run(NamedTuple):
    """Frames of an item that are encoded together."""

    item: int
    first: int
    frames: int
    area: int  # patches of a frame
    grid: Grid

    @property
    def patches(self) -> slice:
        return slice(self.first * self.area, (self.first + self.frames) * self.area)


def runs_of(grids: Sequence[Grid]) -> list[list[Run]]:
    """Divide items at their frames, so that at most MAX_PATCHES are encoded together, or one frame: memory stays bounded."""
    batches, room = list[list[Run]](), 0
    for item, (frames, rows, columns) in enumerate(grids):
        area, first = rows * columns, 0
        while first < frames:
            if room < area:
                batches.append([])
                room = MAX_PATCHES
            count = min(frames - first, max(1, room // area))
            batches[-1].append(Run(item, first, count, area, (count, rows, columns)))
            first, room = first + count, room - count * area
    return batches


class Layout:
    """Where the patches of several images are, in the order of the arrays."""

    def __init__(self, grids: Sequence[Grid], merge: int, device: torch.device) -> None:
        self.grids, self.merge, self.device = grids, merge, device
        self.counts = [frames * rows * columns for frames, rows, columns in grids]

    def frames(self) -> Sequences:
        return sequences([rows * columns for frames, rows, columns in self.grids for _ in range(frames)])

    def upload(self, values: Longs) -> Tensor:
        return torch.from_numpy(values).to(self.device, non_blocking=True)

    def places(self) -> Longs:
        """Return the row and the column of each patch in its frame, [2, T]."""
        return np.concatenate(
            [np.tile(places_of(rows, columns, self.merge), frames) for frames, rows, columns in self.grids], 1
        )

    def windows(self, side: int) -> tuple[Longs, list[int]]:
        """Return the order of squares by window, and the squares of each window. side: of a window, in squares.

        Windows of equal size are neighbours, so that attention runs few times.
        """
        found, at = list[Longs](), 0
        for (frames, rows, columns), count in zip(self.grids, self.counts, strict=True):
            inside = windows_of(rows // self.merge, columns // self.merge, side)
            squares = count // frames // self.merge**2
            found += [window + (at + frame * squares) for frame in range(frames) for window in inside]
            at += frames * squares
        found.sort(key=len, reverse=True)
        return np.concatenate(found), [len(window) for window in found]

    def of_squares(self, order: Longs) -> Longs:
        """Return the patches of squares, [T]."""
        unit = self.merge**2
        return (order[:, None] * unit + np.arange(unit)).reshape(-1)


@lru_cache(64)
def places_of(rows: int, columns: int, merge: int) -> Longs:
    """Return the row and the column of each patch of a frame, square by square, [2, rows * columns]."""
    places = np.indices((rows, columns)).reshape(2, rows // merge, merge, columns // merge, merge)
    return places.transpose(0, 1, 3, 2, 4).reshape(2, -1)


@lru_cache(64)
def windows_of(rows: int, columns: int, side: int) -> list[Longs]:
    """Return the squares of each window of a frame, both row by row."""
    squares = np.arange(rows * columns).reshape(rows, columns)
    return [
        squares[top : top + side, left : left + side].reshape(-1)
        for top in range(0, rows, side)
        for left in range(0, columns, side)
    ]


class Merger(nn.Module):
    """Squares of patches -> embeddings. after: the norm is of whole squares, and not of patches."""

    def __init__(self, width: int, squares: int, outputs: int, norm: Callable[[int], Norm], *, after: bool = False) -> None:
        super().__init__()
        self.inner = width * squares
        self.norm, self.after = norm(self.inner if after else width), after
        self.linear_fc1, self.linear_fc2 = Linear(self.inner, self.inner, bias=True), Linear(self.inner, outputs, bias=True)

    if TYPE_CHECKING:

        def __call__(self, x: Tensor) -> Tensor: ...

    def forward(self, x: Tensor) -> Tensor:
        """x [T, width] -> [T / squares, outputs]."""
        x = self.norm(x.view(-1, self.inner)) if self.after else self.norm(x).view(-1, self.inner)
        return project(self.linear_fc2, F.gelu(project(self.linear_fc1, x)))


class Patches(nn.Module):
    def __init__(self, vision: Mapping[str, Any], width: int, *, bias: bool) -> None:
        super().__init__()
        frames, side = vision["temporal_patch_size"], vision["patch_size"]
        self.proj = CubeEmbedding(vision["in_channels"], frames, side, width, bias=bias)

    def forward(self, pixels: Tensor) -> Tensor:
        """pixels [T, channels * frames * patch * patch] -> [T, width]."""
        x: Tensor = self.proj(pixels)
        return x


class Qwen2VLTower(Tower):
    family: type[Qwen2VL] = Qwen2VL
    renames = (
        (r"^(?!(model\.)?visual\.)", None),
        (r"^(model\.)?visual\.", ""),
        (r"^merger\.ln_q\.", "merger.norm."),
        (r"^merger\.mlp\.0\.", "merger.linear_fc1."),
        (r"^merger\.mlp\.2\.", "merger.linear_fc2."),
        (r"^(blocks\.\d+\.mlp)\.linear_fc", r"\1.fc"),
    )

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        vision = self.vision = self.family(config).vision
        self.merge: int = vision["spatial_merge_size"]
        self.width, self.outputs = self.widths()
        heads = vision["num_heads"]
        if self.width % (4 * heads):
            raise ModelError(f"vision_config: the width of {heads} heads must be a multiple of 4; got {self.width} / {heads}")
        self.head_dim, self.base = self.width // heads, float(rope_parameters(vision)["rope_theta"])
        self.patch_embed = Patches(vision, self.width, bias=self.patch_bias)
        self.blocks = nn.ModuleList(self.make_block(heads) for _ in range(vision["depth"]))
        self.merger = Merger(self.width, self.merge**2, self.outputs, self.make_norm)

    patch_bias = False

    def widths(self) -> tuple[int, int]:
        """Return the width of the encoder and of its embeddings."""
        return self.vision["embed_dim"], self.vision["hidden_size"]

    def make_norm(self, size: int) -> Norm:
        return LayerNorm(size, EPSILON)

    def make_mlp(self) -> nn.Module:
        return VisionMLP(self.width, int(self.width * self.vision["mlp_ratio"]), self.vision["hidden_act"])

    def make_block(self, heads: int) -> Block:
        norms = self.make_norm(self.width), self.make_norm(self.width)
        return Block(norms, PackedAttention(self.width, heads, bias=True), self.make_mlp())

    def encode(self, modality: Modality, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        grids: list[Grid] = [tuple(item[GRIDS[modality]][0].tolist()) for item in items]
        found = [list[Tensor]() for _ in items]
        for runs in runs_of(grids):
            parts = [items[run.item][PIXELS[modality]][run.patches] for run in runs]
            x = self.patch_embed(torch.cat(parts))
            embeddings = self.run(x, Layout([run.grid for run in runs], self.merge, x.device))
            for run, part in zip(runs, torch.split(embeddings, [len(part) // self.merge**2 for part in parts]), strict=True):
                found[run.item].append(part)
        return [torch.cat(parts) if len(parts) > 1 else parts[0] for parts in found]

    def run(self, x: Tensor, layout: Layout) -> Tensor:
        """x [T, width] -> [embeddings, levels * hidden size]."""
        rotations, frames = self.rotations(layout, layout.places()), layout.frames()
        for block in self.blocks:
            x = block(x, rotations, frames)
        return self.merger(x)

    def rotations(self, layout: Layout, places: Longs) -> Rotations:
        rows, columns = layout.upload(places)
        frequencies = inverse_frequencies(self.base, self.head_dim // 2, layout.device)
        return rotate_by_grid(rows, columns, (frequencies, frequencies))


class Qwen2_5VLTower(Qwen2VLTower):  # noqa: N801
    family = Qwen2_5VL

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        vision = self.vision
        self.side = vision["window_size"] // self.merge // vision["patch_size"]
        self.whole = frozenset(vision["fullatt_block_indexes"])
        if self.side < 1:
            raise ModelError(f"vision_config: window_size must be at least {self.merge * vision['patch_size']}; "
                             f"got {vision['window_size']}")  # fmt: skip

    def widths(self) -> tuple[int, int]:
        return self.vision["hidden_size"], self.vision["out_hidden_size"]

    def make_norm(self, size: int) -> Norm:
        return RMSNorm(size, EPSILON)

    def make_mlp(self) -> nn.Module:
        return PaddedMLP(self.width, self.vision["intermediate_size"], self.vision["hidden_act"], bias=True)

    def run(self, x: Tensor, layout: Layout) -> Tensor:
        squares, sizes = layout.windows(self.side)
        patches = layout.of_squares(squares)
        by_window, by_frame = (layout.upload(order) for order in (patches, np.argsort(patches)))
        rotations = self.rotations(layout, layout.places()[:, patches])
        windows, frames = sequences([size * self.merge**2 for size in sizes]), layout.frames()
        x = x[by_window]
        for index, block in enumerate(self.blocks):
            parts, order = (frames, (by_frame, by_window)) if index in self.whole else (windows, None)
            x = block(x, rotations, parts, order)
        return self.merger(x)[layout.upload(np.argsort(squares))]


class Qwen3VLTower(Qwen2VLTower):
    family = Qwen3VL
    patch_bias = True

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        vision = self.vision
        self.side = math.isqrt(vision["num_position_embeddings"])
        self.pos_embed = Positions(vision["num_position_embeddings"], self.width)
        self.tapped = list(vision["deepstack_visual_indexes"])
        if not all(type(layer) is int and 0 <= layer < vision["depth"] for layer in self.tapped):
            raise ModelError(
                f"vision_config: deepstack_visual_indexes must be layers below {vision['depth']}; got {shown(self.tapped)}"
            )
        self.deepstack_merger_list = nn.ModuleList(
            Merger(self.width, self.merge**2, self.outputs, self.make_norm, after=True) for _ in self.tapped
        )

    def widths(self) -> tuple[int, int]:
        return self.vision["hidden_size"], self.vision["out_hidden_size"]

    def make_mlp(self) -> nn.Module:
        return VisionMLP(self.width, self.vision["intermediate_size"], self.vision["hidden_act"])

    def run(self, x: Tensor, layout: Layout) -> Tensor:
        x = x + self.positions(layout).to(x.dtype)
        rotations, frames = self.rotations(layout, layout.places()), layout.frames()
        levels = list[Tensor]()  # by rising layer, whatever the order of their mergers
        for index, block in enumerate(self.blocks):
            x = block(x, rotations, frames)
            if index in self.tapped:
                levels.append(self.deepstack_merger_list[self.tapped.index(index)](x))
        return torch.cat([self.merger(x), *levels], dim=-1)

    def positions(self, layout: Layout) -> Tensor:
        """Return the learned positions of a square image, interpolated to each image's grid, [T, width] float32."""
        square = self.pos_embed.weight.float().view(1, self.side, self.side, -1).permute(0, 3, 1, 2)
        found = []
        for frames, rows, columns in layout.grids:
            grid = F.interpolate(square, size=(rows, columns), mode="bilinear", align_corners=True)[0].flatten(1)
            row, column = layout.upload(places_of(rows, columns, self.merge))
            found.append(grid.T[row * columns + column].repeat(frames, 1))
        return torch.cat(found)


class Qwen3_5Tower(Qwen3VLTower):  # noqa: N801
    family = Qwen3_5
