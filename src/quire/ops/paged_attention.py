"""Attention on a CPU by a C kernel (`native/paged_attention.c`): head norms, RoPE, the cache write and attention over pages in
one call. Keys are read in place, whatever the order of their pages. A token's result is bit-exact in any batch, for any
chunking.

Libraries repack every row's keys first, which is slow for three or four queries.
"""

import struct

import torch
from torch import Tensor

from quire.ops.arguments import HeadNorms, Rotation
from quire.ops.native import kernels, workers

LAYER = struct.Struct("10q 10q 3d")  # as in C
ROWS, TURNED_ROWS = struct.Struct("5q"), struct.Struct("6q")
HEAD_DIM_STEP, MAX_HEAD_DIM = 16, 512


def suits(kv: Tensor) -> bool:
    """Return whether the kernel exists and supports this cache."""
    head_dim = kv.shape[4]
    whole = head_dim % HEAD_DIM_STEP == 0 and head_dim <= MAX_HEAD_DIM
    in_order = kv.stride(4) == 1 and kv.stride(3) == head_dim
    return kv.dtype == torch.float32 and not kv.is_cuda and whole and in_order and kernels() is not None


class AttentionRows:
    """AttentionRows of tokens in one cache group; a row may be empty."""

    def __init__(self, tables: Tensor, lengths: Tensor, starts: Tensor, rotary: Tensor | None = None) -> None:
        """Hold int32 tables [R, P], lengths [R] including the rows' own tokens, and starts [R + 1] of the rows' tokens.

        rotary: [T] int64 each token's row in the rotation's tables; None: its position
        """
        assert tables.dtype == lengths.dtype == starts.dtype == torch.int32 and len(starts) == len(lengths) + 1
        assert tables.stride(1) == 1 and lengths.is_contiguous() and starts.is_contiguous()
        self._memory = tables, lengths, starts, rotary
        values = tables.data_ptr(), lengths.data_ptr(), starts.data_ptr(), tables.stride(0), len(lengths)
        if rotary is None:
            self.packed = ROWS.pack(*values)
            return
        assert rotary.dtype == torch.int64 and rotary.is_contiguous()
        self.packed = TURNED_ROWS.pack(*values, rotary.data_ptr())


class PagedAttention:
    """One layer's attention on fixed memory: from qkv [C, (heads + 2 * kv_heads) * head_dim] to `out` [C, heads * head_dim].

    One call if no row has several tokens. Otherwise two: without `out`, keys and values are written to the cache; with
    `placed`, they are there already, and `qkv` has queries only. Results are the same in both ways.
    """

    def __init__(
        self,
        kv: Tensor,
        qkv: Tensor,
        out: Tensor | None,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None = None,
        rotation: Rotation | None = None,
        norms: HeadNorms | None = None,
        placed: bool = False,
    ) -> None:
        _, _, kv_heads, page_size, head_dim = kv.shape
        queries = qkv.shape[1] - (0 if placed else 2 * kv_heads * head_dim)
        angles = [] if rotation is None else [rotation.cos, rotation.sin]
        weights = [] if norms is None else [(weight.float() + norms.offset) for weight in (norms.query, norms.key)]
        self._memory = kv, qkv, out, *angles, *weights
        outputs = [] if out is None else [out]
        columns = [qkv] if placed else [qkv, qkv[:, queries:], qkv[:, queries + kv_heads * head_dim :]]
        tensors = [columns, outputs, [kv[:, 0], kv[:, 1]], angles, weights]
        addresses = [[tensor.data_ptr() for tensor in some] for some in tensors]
        self.packed = LAYER.pack(
            *(address for some, count in zip(addresses, (3, 1, 2, 2, 2), strict=True) for address in (*some, 0, 0, 0)[:count]),
            *(qkv.stride(0), 0 if out is None else out.stride(0), kv.stride(0), kv.stride(2)),
            *(queries // head_dim // kv_heads, kv_heads, head_dim, angles[0].shape[1] if angles else 0, page_size, window or 0),
            *(scale, 0.0 if norms is None else norms.eps, soft_cap or 0.0),
        )

    def run(self, rows: AttentionRows) -> None:
        kernels().attend(self.packed, rows.packed, workers())
