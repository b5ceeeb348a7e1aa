"""Layers of encoders that pack images of any size: patches [T, width], and attention within each sequence of patches.

patches   [ image a, 4 x 6 | image b, 2 x 4 | video c, 2 frames of 2 x 2 ]
sequences [ 24             | 8              | 4      | 4                 ]     or the windows of each image
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.features.media.towers.parts import project
from quire.layers.linear import Linear, MatrixPart, MergedLinear
from quire.layers.norm import Norm
from quire.layers.parameter import WeightSlices, parameter, whole
from quire.ops.activation import check_activation
from quire.ops.packed_attention import Sequences, reference_attend_packed
from quire.ops.qkv import turn

ALIGNED = 8  # values of a row of matrices: 16 bytes
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


class PaddedColumns(MergedLinear):
    """Merged layers whose outputs are padded with zeros to `padded` each."""

    def __init__(self, inputs: int, names: Sequence[str], size: int, padded: int, *, bias: bool) -> None:
        super().__init__(inputs, dict.fromkeys(names, padded), bias=bias)
        self.size, self.padded = size, padded

    def parts(self, path: str) -> Mapping[str, MatrixPart]:
        return {
            name: MatrixPart(self.size, ((index * self.padded, range(self.size)),))
            for index, name in enumerate(self.tensors(path))
        }

    def finish(self, device: torch.device) -> None:
        super().finish(device)
        for each in (self.weight, self.bias):
            if each is not None:
                each.data.view(len(self.names), self.padded, -1)[:, self.size :] = 0.0


class PaddedRows(Linear):
    """A layer whose inputs are padded with zeros from `size`."""

    def __init__(self, size: int, padded: int, outputs: int, *, bias: bool) -> None:
        super().__init__(padded, outputs, bias=bias)
        self.size = size

    def weight_slices(self, path: str) -> WeightSlices:
        taken = super().weight_slices(path)
        return taken | {f"{path}.weight": whole(self.weight.data[:, : self.size])}

    def finish(self, device: torch.device) -> None:
        super().finish(device)
        self.weight.data[:, self.size :] = 0.0


class PaddedMLP(nn.Module):
    """Gated feed-forward with an inner size that GEMMs of 16-bit types are fast with: 3420 of Qwen2.5-VL becomes 3424."""

    def __init__(self, width: int, inner: int, activation: str, *, bias: bool) -> None:
        super().__init__()
        padded = -(-inner // ALIGNED) * ALIGNED
        self.activation = check_activation(activation)
        self.gate_up = PaddedColumns(width, ("gate_proj", "up_proj"), inner, padded, bias=bias)
        self.down_proj = PaddedRows(inner, padded, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, width] -> [T, width]."""
        inner: Any = self.gate_up.method.apply_gated(self.gate_up, x, self.activation)
        return project(self.down_proj, inner)


class Block(nn.Module):
    def __init__(self, norms: tuple[Norm, Norm], attention: PackedAttention, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = norms
        self.attn, self.mlp = attention, mlp

    def forward(self, x: Tensor, rotations: Rotations, parts: Sequences, order: Order | None = None) -> Tensor:
        normed, x = self.norm2.add(self.attn(self.norm1(x), rotations, parts, order), x)
        out: Tensor = self.mlp(normed)
        return x + out
