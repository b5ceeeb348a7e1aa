"""Layers of encoders that pack images of any size: patches [T, width], and attention within each sequence of patches.

patches   [ image a, 4 x 6 | image b, 2 x 4 | video c, 2 frames of 2 x 2 ]
sequences [ 24             | 8              | 4      | 4                 ]     or the windows of each image
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.attn.batch import PLAIN
from quire.features.media.towers.parts import project
from quire.layers.linear import Linear, MergedLinear
from quire.layers.mlp import GatedMLP
from quire.layers.norm import Norm
from quire.layers.parameter import parameter
from quire.ops.packed_attention import Sequences, reference_attend_packed
from quire.ops.qkv import turn

Order = tuple[Tensor, Tensor]  # indices [T] that sort patches, and those that sort them back


@dataclass(frozen=True)
class Rotations:
    """Rotary embedding of each patch: two [T, 1, head_dim] float32, the sines of the first half negative."""

    cos: Tensor
    sin: Tensor


def sequences(lengths: Sequence[int]) -> Sequences:
    """Return sequences of these lengths, one after the other."""
    return [(end - length, length, length) for end, length in zip(accumulate(lengths), lengths, strict=True)]


def rotate_by_grid(rows: Tensor, columns: Tensor, frequencies: tuple[Tensor, Tensor]) -> Rotations:
    """Return the rotations of patches at rows [T] and columns [T] int64.

    frequencies: of rows and of columns, [head_dim / 4] float32 each.
    """
    angles = torch.cat([at.unsqueeze(1) * each for at, each in zip((rows, columns), frequencies, strict=True)], dim=1)
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    return Rotations(torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1))


def inverse_frequencies(base: float, dim: int, device: torch.device) -> Tensor:
    return 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim))


class CubeEmbedding(nn.Module):
    """One vector per patch of one or several frames; the checkpoint stores a convolution."""

    def __init__(self, channels: int, frames: int, patch: int, width: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = parameter(width, channels, frames, patch, patch)
        self.bias = parameter(width) if bias else None

    def forward(self, pixels: Tensor) -> Tensor:
        """pixels [T, channels * frames * patch * patch] -> [T, width]."""
        return F.linear(pixels, self.weight.flatten(1), self.bias)


class PackedAttention(nn.Module):
    """Attention of patches to those of their own sequence.

    The checkpoint stores `qkv`, or q_proj, k_proj and v_proj (`separate`).
    """

    def __init__(self, width: int, heads: int, *, bias: bool, separate: bool = False) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        if separate:
            self.qkv: Linear = MergedLinear(width, dict.fromkeys(("q_proj", "k_proj", "v_proj"), width), bias=bias)
        else:
            self.qkv = Linear(width, 3 * width, bias=bias)
        self.proj = Linear(width, width, bias=bias)

    def forward(self, x: Tensor, rotations: Rotations, parts: Sequences, order: Order | None = None) -> Tensor:
        """x [T, width] -> [T, width]. order: sorts the patches by `parts`; None: they are sorted."""
        qkv = project(self.qkv, x).view(len(x), 3 * self.heads, -1)
        turn(qkv[:, : 2 * self.heads], rotations.cos, rotations.sin)
        if order is not None:
            qkv = qkv[order[0]]
        query, key, value = qkv.chunk(3, dim=1)
        # neighbours of one length are one call of the library's attention: faster than ours for sequences as long as images
        out = reference_attend_packed(query, key, value, parts, {}, scale=self.scale)
        return project(self.proj, (out if order is None else out[order[1]]).flatten(1))


class Block(nn.Module):
    def __init__(self, norms: tuple[Norm, Norm], attention: PackedAttention, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = norms
        self.attn, self.mlp = attention, mlp

    def forward(self, x: Tensor, rotations: Rotations, parts: Sequences, order: Order | None = None) -> Tensor:
        normed, x = self.norm2.add(self.attn(self.norm1(x), rotations, parts, order), x)
        out: Tensor = self.mlp(normed, PLAIN) if isinstance(self.mlp, GatedMLP) else self.mlp(normed)
        return x + out
