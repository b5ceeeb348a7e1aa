"""Attention on a CPU by a kernel in C (`native/paged_attention.c`): head norms, rotation, the way into the cache and attention
over pages are one call. Keys are read where they lie, whatever the order of their pages. A token's numbers are the same to the
last bit in any company, and however its row is cut.

No library at hand does it well: those that multiply repack every row's keys first, for three or four queries.
"""

import struct

import torch
from torch import Tensor

from quire.ops.arguments import HeadNorms, Rotation
from quire.ops.native import kernels, workers

LAYER = struct.Struct("10q 10q 3d")  # as in C
ROWS = struct.Struct("5q")
STEP, MOST_COMPONENTS = 16, 512  # of a head


def suits(kv: Tensor) -> bool:
    """Is the kernel there, and such a cache for it?"""
    head_dim = kv.shape[4]
    whole = head_dim % STEP == 0 and head_dim <= MOST_COMPONENTS
    in_order = kv.stride(4) == 1 and kv.stride(3) == head_dim
    return kv.dtype == torch.float32 and not kv.is_cuda and whole and in_order and kernels() is not None


class Rows:
    """Rows of tokens in one cache group; a row may have none."""

    def __init__(self, tables: Tensor, lengths: Tensor, starts: Tensor) -> None:
        """tables [R, P], lengths [R], the tokens themselves included, and starts [R + 1] of the rows' tokens, int32."""
        assert tables.dtype == lengths.dtype == starts.dtype == torch.int32 and len(starts) == len(lengths) + 1
        assert tables.stride(1) == 1 and lengths.is_contiguous() and starts.is_contiguous()
        self._memory = tables, lengths, starts
        self.packed = ROWS.pack(*(tensor.data_ptr() for tensor in self._memory), tables.stride(0), len(lengths))


class PagedAttention:
    """One layer's attention on memory that stays: from the first rows of `qkv` [C, (heads + 2 * kv_heads) * head_dim] to those
    of `out` [C, heads * head_dim], where no row has several tokens. Where tokens of one row see each other, in two calls:
    without an `out`, keys and values go to the cache; `placed`, they are there, and `qkv` are queries alone. The numbers are
    the same in either way.
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

    def run(self, rows: Rows) -> None:
        kernels().attend(self.packed, rows.packed, workers())
