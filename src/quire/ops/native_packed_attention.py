"""Attention over packed sequences on a CPU by a C kernel (`native/packed_attention.c`): RoPE by halves, position bias, windows.
A token's result is bit-exact in any batch.
"""

import struct

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.ops.arguments import Rotation
from quire.ops.native import encodes, kernels, workers

LAYER = struct.Struct("7q 6q q d")  # as in C
MAX_HEAD_DIM = 256


def supports(head_dim: int, rotation: Rotation | None) -> bool:
    """Return whether the kernel exists and supports this attention."""
    return encodes() and head_dim <= MAX_HEAD_DIM and (rotation is None or not rotation.interleaved)


class PackedAttention:
    """One layer's attention on fixed memory: from qkv [C, 3 * heads * head_dim] to out [C, heads * head_dim], float32."""

    def __init__(
        self,
        qkv: Tensor,
        out: Tensor,
        head_dim: int,
        *,
        scale: float,
        window: int | None = None,
        rotation: Rotation | None = None,
        bias: Tensor | None = None,
    ) -> None:
        """window: largest distance between a query and a key that it sees. bias: [heads, 2 * reach + 1] float32."""
        size = out.shape[1]
        angles = (None, None) if rotation is None else (rotation.cos, rotation.sin)
        tensors = qkv, qkv[:, size:], qkv[:, 2 * size :], out, *angles, bias
        assert all(tensor is None or tensor.dtype == torch.float32 for tensor in tensors)
        assert bias is None or bias.is_contiguous()
        self._memory = tensors
        self._packed = LAYER.pack(
            *(0 if tensor is None else tensor.data_ptr() for tensor in tensors),
            *(qkv.stride(0), out.stride(0), size // head_dim, head_dim),
            *(0 if rotation is None else rotation.cos.shape[1], 0 if bias is None else bias.shape[1] // 2),
            *(-1 if window is None else window, scale),
        )

    def run(self, starts: npt.NDArray[np.int32], keys: npt.NDArray[np.int32]) -> None:
        """starts: [sequences + 1] where each begins, and the end of the last one.
        keys: [sequences] how many of its tokens, from the first one, are keys. A query that sees no key gets 0.
        """
        kernels().attend_packed(self._packed, starts, keys, workers())
