"""Layers of image encoders. Images of equal size are a batch [images, tokens, width], so none attends to another."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.layers.linear import Linear, MergedLinear
from quire.layers.norm import LayerNorm
from quire.layers.parameter import parameter
from quire.ops.activation import ACTIVATIONS
from quire.types.errors import ModelError


class Part(nn.Module):
    """A module whose result is one tensor."""

    if TYPE_CHECKING:

        def __call__(self, *inputs: Any) -> Tensor: ...


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


VISION_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {**ACTIVATIONS, "quick_gelu": _quick_gelu}


def vision_activation(name: str) -> Callable[[Tensor], Tensor]:
    if name not in VISION_ACTIVATIONS:
        raise ModelError(f"vision_config: hidden_act must be one of {', '.join(sorted(VISION_ACTIVATIONS))}; got {name!r}")
    return VISION_ACTIVATIONS[name]


def project(layer: Linear, x: Tensor) -> Tensor:
    """Apply a linear layer outside of the language model: LoRA adapters do not change it."""
    return layer.method.apply(layer, x)


def by_shape(inputs: Sequence[Tensor], run: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return `run` of each input [images, ...], with the inputs of one shape after the first dimension in one call."""
    alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, each in enumerate(inputs):
        alike[tuple(each.shape[1:])].append(index)
    found: dict[int, Tensor] = {}
    for members in alike.values():
        outputs = run(torch.cat([inputs[index] for index in members]))
        found |= zip(members, outputs.split_with_sizes([len(inputs[index]) for index in members]), strict=True)
    return [found[index] for index in range(len(inputs))]


class PatchEmbedding(Part):
    """One vector per square patch. Pixels at the right and lower edge that fill no patch are left out."""

    def __init__(self, channels: int, patch: int, width: int, *, bias: bool) -> None:
        super().__init__()
        self.patch = patch
        self.weight = parameter(width, channels, patch, patch)
        self.bias = parameter(width) if bias else None

    def forward(self, pixels: Tensor) -> Tensor:
        """pixels [images, channels, height, width] -> [images, rows, columns, width]."""
        images, channels, height, width = pixels.shape
        rows, columns = height // self.patch, width // self.patch
        x = pixels[..., : rows * self.patch, : columns * self.patch]
        x = x.reshape(images, channels, rows, self.patch, columns, self.patch).permute(0, 2, 4, 1, 3, 5)
        return F.linear(x.flatten(3), self.weight.flatten(1), self.bias)


class VisionAttention(Part):
    """Attention of all tokens of an image to each other. The checkpoint stores q_proj, k_proj, v_proj and out_proj."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = MergedLinear(width, dict.fromkeys(("q_proj", "k_proj", "v_proj"), width), bias=True)
        self.out_proj = Linear(width, width, bias=True)

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        """x [images, tokens, width]; seen [images, 1, 1, tokens]: keys that are attended to, None: all."""
        query, key, value = project(self.qkv, x).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        return project(self.out_proj, out.transpose(1, 2).flatten(2))


class VisionMLP(Part):
    def __init__(self, width: int, inner: int, activation: str) -> None:
        super().__init__()
        self.fc1, self.fc2 = Linear(width, inner, bias=True), Linear(inner, width, bias=True)
        self.activation = vision_activation(activation)

    def forward(self, x: Tensor) -> Tensor:
        return project(self.fc2, self.activation(project(self.fc1, x)))


class VisionLayer(Part):
    def __init__(self, width: int, inner: int, heads: int, activation: str, eps: float) -> None:
        super().__init__()
        self.layer_norm1, self.layer_norm2 = LayerNorm(width, eps), LayerNorm(width, eps)
        self.self_attn, self.mlp = VisionAttention(width, heads), VisionMLP(width, inner, activation)

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x), seen)
        return x + self.mlp(self.layer_norm2(x))
