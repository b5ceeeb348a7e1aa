"""The kernels of one attention layer: their shapes, their memory, their order.

    tiles        rows of several tokens, over the pages
    long tiles   the same for long rows, over a copy of their keys and values in one place, some heads at a time
    shared       splits that several rows of one token have in common
    splits       the other splits of rows of one token
    merges       rows with several splits

It does not know how a batch was cut.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from quire.attn import work_split
from quire.attn.backend import AttentionSpec, slopes_of
from quire.attn.batch import Batch
from quire.ops.kv import MANTISSA_BITS, kv_scales, lies_by_page

MERGED_AT_ONCE = 16


@dataclass(frozen=True)
class Geometry:
    """How one kind of layer is cut into programs."""

    dim_block: int
    tile_m: int  # queries times sharing heads
    tile_n: int  # keys
    tile_warps: int
    tile_stages: int
    split_m: int
    split_n: int
    split_warps: int
    split_stages: int
    shared_m: int  # rows times sharing heads; its keys come as those of a split
    shared_warps: int
    shared_stages: int
    long_m: int = 128
    long_n: int = 128
    long_warps: int = 8
    long_stages: int = 3


@dataclass(frozen=True)
class Plan:
    tiles: Tensor  # [tiles, 3] int32: row or -1, first token within the row, 0
    copies: Tensor  # [copies, 3] int32: row, first key, place in the copy
    long_tiles: Tensor  # [long tiles, 3] int32: row, first token within the row, place of the row's key 0
    splits: Tensor  # [splits, 4] int32: row or -1, split, place among the parts or -1, key length
    merges: Tensor  # [merges, 3] int32: row or -1, first part, parts
    shared: Tensor  # [shared, 3] int32: split, first member, members or -1
    members: Tensor  # [members, 2] int32: row, its first part
    parts: int
    keys: int  # in the copy
    copied: int  # keys times heads that there is memory for


@lru_cache
def geometry(share: int, head_dim: int, dtype: torch.dtype) -> Geometry:
    dim_block = max(16, _power_of_two(head_dim))
    heads = _power_of_two(share)
    if dtype == torch.float32:  # exact products take no tensor cores: small blocks, for registers' sake
        return Geometry(dim_block, max(32, heads), 32, 4, 1, max(16, heads), 32, 4, 1, max(32, heads), 4, 1)
    if dim_block > 128:
        return Geometry(dim_block, max(128, heads), 64, 8, 2, max(16, heads), 64, 4, 2, max(64, heads), 4, 2)
    if dim_block > 64:
        return Geometry(dim_block, max(128, heads), 64, 8, 3, max(16, heads), 128, 4, 2, max(128, heads), 8, 2)
    return Geometry(dim_block, max(128, heads), 64, 4, 3, max(16, heads), 128, 4, 2, max(128, heads), 8, 2)


@lru_cache
def narrowed(shape: Geometry, dtype: torch.dtype) -> Geometry:
    """The same for a cache of 8 bits: the halves of a head are matrices too, and unpacking wants many small programs."""
    shape = replace(shape, dim_block=max(32, shape.dim_block))
    large = dtype == torch.float32 or shape.dim_block > 128
    return shape if large else replace(shape, split_n=64, split_warps=2, split_stages=3)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def reads_in_blocks(spec: AttentionSpec, query: Tensor) -> bool:
    """Whether blocks of keys that lie in one place can be fetched by the tensor copy engine, and that is worth a copy, which
    is of the queries' type."""
    if query.device.type != "cuda" or torch.cuda.get_device_capability(query.device) != (9, 0):
        return False
    return spec.head_dim in (64, 128) and query.dtype != torch.float32


@dataclass
class Launch:
    spec: AttentionSpec
    plan: Plan
    query: Tensor  # [T, heads, head_dim]
    kv: Tensor  # [pages, 2, kv_heads, page_size, head_dim], of 8 bits with scales
    out: Tensor  # [T, heads, head_dim]
    batch: Batch
    tables: Tensor  # [R, max_pages] int32
    sinks: Tensor | None  # [heads]

    def __post_init__(self) -> None:
        """What several of the kernels are given."""
        spec, kv = self.spec, self.kv
        share = spec.heads // spec.kv_heads
        self._shape = geometry(share, spec.head_dim, self.query.dtype)
        scales = kv_scales(kv)
        self._cache = (kv, kv) if scales is None else (kv.view(torch.int16), scales)
        self._bits = MANTISSA_BITS.get(kv.dtype, 0)
        if self._bits:
            self._shape = narrowed(self._shape, self.query.dtype)
        slopes = slopes_of(spec, self.query.device)
        assert slopes is None or self.sinks is None
        self._biases = slopes if slopes is not None else self.out if self.sinks is None else self.sinks
        self._query_stride, self._out_stride = self.query.stride(0), self.out.stride(0)
        self._page_strides = kv.stride(0), kv.stride(1), self.tables.stride(0)
        self._options: dict[str, Any] = {
            "SHARE": share, "HEAD_DIM": spec.head_dim,
            "SOFT_CAP": spec.soft_cap or 0.0, "SINKS": self.sinks is not None, "SLOPES": slopes is not None,
        }  # fmt: skip

    def run(self) -> None:
        assert lies_by_page(self.kv) and self.query.stride()[1:] == (self.spec.head_dim, 1)
        # Taken whether it is needed or not: the run that measures memory sees what any step may take.
        memory = self.out.new_empty(self._words(), dtype=torch.float32)
        plan = self.plan
        if plan.tiles.shape[0]:
            self._tiles()
        if plan.keys:
            self._long_tiles(memory)
        if plan.splits.shape[0] or plan.merges.shape[0]:
            self._splits(memory)

    def _words(self) -> int:
        """Of 4 bytes."""
        spec, plan = self.spec, self.plan
        parts = plan.parts * spec.heads * (spec.head_dim + 1)
        return max(parts, 2 * plan.copied * spec.head_dim * self.query.element_size() // 4)

    def _tiles(self) -> None:
        from quire.ops.kernels.attention import tiles_kernel
        from quire.ops.kernels.launcher import overlapping

        batch, shape = self.batch, self._shape
        tiles_kernel[(self.spec.kv_heads, self.plan.tiles.shape[0])](
            self.query, *self._cache, self.out, self._biases, self.tables, batch.row_starts, batch.kv_lengths, self.plan.tiles,
            self._query_stride, self._out_stride, *self._page_strides, self.spec.scale, **self._options, BITS=self._bits,
            DIM_BLOCK=shape.dim_block, PAGE_SIZE=self.kv.shape[3], WINDOW=self.spec.window or 0,
            BLOCK_M=shape.tile_m, BLOCK_N=shape.tile_n, num_warps=shape.tile_warps, num_stages=shape.tile_stages,
            **overlapping(),
        )  # fmt: skip

    def _long_tiles(self, memory: Tensor) -> None:
        from triton.tools.tensor_descriptor import TensorDescriptor

        from quire.ops.kernels.attention import copy_kernel, long_tiles_kernel
        from quire.ops.kernels.launcher import overlapping

        plan, spec, batch, shape = self.plan, self.spec, self.batch, self._shape
        copy, block = memory.view(self.query.dtype), [shape.long_n, spec.head_dim]
        at_once = min(spec.kv_heads, plan.copied // plan.keys)
        for first in range(0, spec.kv_heads, at_once):
            heads = min(at_once, spec.kv_heads - first)
            lane = heads * plan.keys
            copy_kernel[(heads, plan.copies.shape[0])](
                *self._cache, copy, self.tables, batch.kv_lengths, plan.copies, *self._page_strides, first, plan.keys,
                BITS=self._bits, HEAD_DIM=spec.head_dim, PAGE_SIZE=self.kv.shape[3], BLOCK=shape.long_n, num_warps=4,
                **overlapping(),
            )  # fmt: skip
            keys, values = (
                TensorDescriptor(base, [lane, spec.head_dim], [spec.head_dim, 1], block)
                for base in (copy, copy[lane * spec.head_dim :])
            )
            long_tiles_kernel[(heads, plan.long_tiles.shape[0])](
                self.query, self.out, self._biases, batch.row_starts, batch.kv_lengths, plan.long_tiles,
                self._query_stride, self._out_stride, first, plan.keys, spec.scale, keys, values, **self._options,
                WINDOW=spec.window or 0,
                BLOCK_M=shape.long_m, BLOCK_N=shape.long_n, num_warps=shape.long_warps, num_stages=shape.long_stages,
                **overlapping(),
            )  # fmt: skip

    def _splits(self, memory: Tensor) -> None:
        from quire.ops.kernels.attention import merge_kernel, shared_kernel, splits_kernel
        from quire.ops.kernels.launcher import overlapping

        plan, spec, shape, starts = self.plan, self.spec, self._shape, self.batch.row_starts
        parts, weights = memory, memory[plan.parts * spec.heads * spec.head_dim :]
        options = {
            **self._options, "BITS": self._bits, "DIM_BLOCK": shape.dim_block, "PAGE_SIZE": self.kv.shape[3],
            "HEADS": spec.heads, "SPLIT": work_split.SPLIT, "BLOCK_N": min(shape.split_n, work_split.SPLIT),
        }  # fmt: skip
        if plan.shared.shape[0]:
            shared_kernel[(spec.kv_heads, plan.shared.shape[0])](
                self.query, *self._cache, parts, weights, self._biases, self.tables, starts, plan.shared, plan.members,
                self._query_stride, *self._page_strides, spec.scale, **options,
                BLOCK_M=shape.shared_m, num_warps=shape.shared_warps, num_stages=shape.shared_stages, **overlapping(),
            )  # fmt: skip
        if plan.splits.shape[0]:
            splits_kernel[(spec.kv_heads, plan.splits.shape[0])](
                self.query, *self._cache, self.out, parts, weights, self._biases, self.tables, starts, plan.splits,
                self._query_stride, self._out_stride, *self._page_strides, spec.scale, **options,
                WINDOW=spec.window or 0, BLOCK_M=shape.split_m, num_warps=shape.split_warps, num_stages=shape.split_stages,
                **overlapping(),
            )  # fmt: skip
        if plan.merges.shape[0]:
            merge_kernel[(spec.heads, plan.merges.shape[0])](
                parts, weights, self.out, starts, plan.merges, self._out_stride,
                HEADS=spec.heads, HEAD_DIM=spec.head_dim, DIM_BLOCK=shape.dim_block, BLOCK=MERGED_AT_ONCE, num_warps=1,
                **overlapping(),
            )  # fmt: skip
