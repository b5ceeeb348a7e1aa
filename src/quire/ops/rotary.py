"""Rotary position embedding: turns the two halves of each head (the pairing Hugging Face checkpoints are stored for)."""

import torch
from torch import Tensor


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Turns the first rotary_dim components of each head in place; the others stay. Computed in float32.

    x [T, heads, head_dim]; cos and sin [T, 1, rotary_dim] float32, the sines of the first half negative.
    """
    size = cos.shape[-1]
    turning = x if size == x.shape[-1] else x[..., :size]
    wide = turning if turning.dtype == torch.float32 else turning.float()
    swapped = torch.cat(wide.chunk(2, dim=-1)[::-1], dim=-1)
    turned = torch.mul(wide, cos, out=wide).addcmul_(swapped, sin)
    if turned is not turning:
        turning.copy_(turned)
