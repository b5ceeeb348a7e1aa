"""Rotary position embedding: rotates the two halves of each head (the pairing Hugging Face checkpoints are stored for)."""

import torch
from torch import Tensor


def rotate(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, head_dim], positions [T], cos and sin [max_position, rotary_dim / 2] float32.

    Only the first rotary_dim components of a head turn; the others pass. Computed in float32.
    """
    half = cos.shape[1]
    c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)  # [T, 1, half]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    turned = torch.cat((first * c - second * s, second * c + first * s), dim=-1).to(x.dtype)
    return turned if 2 * half == x.shape[-1] else torch.cat((turned, x[..., 2 * half :]), dim=-1)
