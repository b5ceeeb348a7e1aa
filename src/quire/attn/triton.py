"""Attention in Triton over page tables, for CUDA devices.

`plan` cuts the batch on the host and sends the cuts in one copy; `run` launches at most three kernels, whose grids are
numbers the host knows. Rows of several tokens are cut into tiles of queries, rows of one token into splits of keys.

A plan in memory that stays (`FixedSplits`) has a list of splits of fixed length, and one merge for each row:

    splits [ row 0 | row 0 | row 1 | -1 | -1 | -1 ]      merges [ row 0 | -1 ]      programs whose row is -1 leave at once
"""

import importlib.util
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.attn.backend import AttentionSpec
from quire.attn.batch import Batch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LARGEST_HEAD = 256
MOST_SHARING = 64
SPLIT = 256  # keys of one split; the same for every batch, so that a row's result is its own
MERGED_AT_ONCE = 16

Ints = npt.NDArray[np.int32]


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


@dataclass(frozen=True)
class Plan:
    tiles: Tensor  # [tiles, 2] int32: row, first token within the row
    splits: Tensor  # [splits, 3] int32: row or -1, split, place among the parts or -1
    merges: Tensor  # [merges, 3] int32: row or -1, first part, parts
    parts: int


class TritonAttention:
    def refuse(self, spec: AttentionSpec, device: torch.device, dtype: torch.dtype) -> list[str]:
        reasons = []
        if device.type != "cuda":
            reasons.append(f"it needs a CUDA device, not {device.type}")
        elif importlib.util.find_spec("triton") is None:
            reasons.append("the package triton is not installed")
        elif torch.cuda.get_device_capability(device) < (8, 0):
            reasons.append("it needs compute capability 8.0 or newer")
        if dtype not in DTYPES:
            reasons.append(f"it does not compute in {str(dtype).removeprefix('torch.')}")
        if spec.head_dim > LARGEST_HEAD:
            reasons.append(f"its heads have at most {LARGEST_HEAD} components, not {spec.head_dim}")
        if spec.heads // spec.kv_heads > MOST_SHARING:
            reasons.append(f"at most {MOST_SHARING} query heads may share a KV head, not {spec.heads // spec.kv_heads}")
        return reasons

    def plan(self, batch: Batch, group: int, spec: AttentionSpec, kv: Tensor) -> None:
        tokens = geometry(spec.heads // spec.kv_heads, spec.head_dim, kv.dtype).tile_m // (spec.heads // spec.kv_heads)
        batch.plans["triton", group] = cut(batch, spec.window, tokens)

    def run(self, spec: AttentionSpec, query: Tensor, kv: Tensor, batch: Batch, group: int, sinks: Tensor | None) -> Tensor:
        if ("triton", group) not in batch.plans:
            self.plan(batch, group, spec, kv)
        plan: Plan = batch.plans["triton", group]
        covered = batch.rows[-1][0] + batch.rows[-1][1] if batch.rows else 0
        make = torch.empty if covered == len(query) else torch.zeros
        out = make(query.shape, dtype=query.dtype, device=query.device)
        _launch(spec, plan, query, kv, out, batch, batch.groups[group].tables, sinks)
        return out

    def fixed(self) -> "FixedSplits":
        return FixedSplits()


class FixedSplits:
    def need(self, lengths: Ints, window: int | None) -> int:
        return int(_split_range(lengths, window)[1].sum())

    def size(self, rows: int, room: int) -> int:
        return 3 * (room + rows)

    def numbers(self, lengths: Ints, window: int | None, room: int) -> Ints:
        splits, merges, _ = _splits(np.arange(len(lengths), dtype=np.int32), lengths, window)
        out = np.full((room + len(lengths), 3), -1, np.int32)
        out[: len(splits)] = splits
        out[room : room + len(merges)] = merges
        return out.ravel()

    def attach(self, batch: Batch, group: int, numbers: Tensor, room: int) -> None:
        items = numbers.view(-1, 3)
        batch.plans["triton", group] = Plan(items.new_empty(0, 2), items[:room], items[room:], parts=room)


def _launch(
    spec: AttentionSpec, plan: Plan, query: Tensor, kv: Tensor, out: Tensor, batch: Batch, tables: Tensor, sinks: Tensor | None
) -> None:
    from quire.ops.kernels.attention import merge_kernel, splits_kernel, tiles_kernel

    assert kv[0].is_contiguous() and query.stride(2) == 1 and query.stride(1) == spec.head_dim
    shape = geometry(spec.heads // spec.kv_heads, spec.head_dim, kv.dtype)
    numbers = (query.stride(0), out.stride(0), kv.stride(0), kv.stride(1), tables.stride(0), spec.scale)
    options = {
        "SHARE": spec.heads // spec.kv_heads, "HEAD_DIM": spec.head_dim, "DIM_BLOCK": shape.dim_block,
        "PAGE_SIZE": kv.shape[3], "WINDOW": spec.window or 0, "SOFT_CAP": spec.soft_cap or 0.0, "SINKS": sinks is not None,
    }  # fmt: skip
    biases = out if sinks is None else sinks
    if len(plan.tiles):
        tiles_kernel[(spec.kv_heads, len(plan.tiles))](
            query, kv, out, biases, tables, batch.row_starts, batch.kv_lengths, plan.tiles, *numbers, **options,
            BLOCK_M=shape.tile_m, BLOCK_N=shape.tile_n, num_warps=shape.tile_warps, num_stages=shape.tile_stages,
        )  # fmt: skip
    if not len(plan.splits):
        return
    parts = torch.empty(plan.parts, spec.heads, spec.head_dim, dtype=torch.float32, device=out.device)
    weights = torch.empty(plan.parts, spec.heads, dtype=torch.float32, device=out.device)
    splits_kernel[(spec.kv_heads, len(plan.splits))](
        query, kv, out, parts, weights, biases, tables, batch.row_starts, batch.kv_lengths, plan.splits, *numbers, **options,
        HEADS=spec.heads, SPLIT=SPLIT, BLOCK_M=shape.split_m, BLOCK_N=shape.split_n,
        num_warps=shape.split_warps, num_stages=shape.split_stages,
    )  # fmt: skip
    if len(plan.merges):
        merge_kernel[(spec.heads, len(plan.merges))](
            parts, weights, out, batch.row_starts, plan.merges, out.stride(0),
            HEADS=spec.heads, HEAD_DIM=spec.head_dim, DIM_BLOCK=shape.dim_block, BLOCK=MERGED_AT_ONCE, num_warps=1,
        )  # fmt: skip


@lru_cache
def geometry(share: int, head_dim: int, dtype: torch.dtype) -> Geometry:
    dim_block = max(16, _power_of_two(head_dim))
    heads = _power_of_two(share)
    if dtype == torch.float32:  # exact products take no tensor cores: small blocks, for registers' sake
        return Geometry(dim_block, max(32, heads), 32, 4, 1, max(16, heads), 32, 4, 1)
    if dim_block > 128:
        return Geometry(dim_block, max(128, heads), 64, 8, 2, max(16, heads), 64, 4, 2)
    if dim_block > 64:
        return Geometry(dim_block, max(256, heads), 64, 8, 3, max(16, heads), 128, 4, 2)
    return Geometry(dim_block, max(128, heads), 64, 4, 3, max(16, heads), 128, 4, 2)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def cut(batch: Batch, window: int | None, tokens: int) -> Plan:
    """`tokens` of one row go into a tile."""
    rows = np.array(batch.rows, np.int32).reshape(-1, 3)
    several = np.flatnonzero(rows[:, 1] > 1).astype(np.int32)
    single = np.flatnonzero(rows[:, 1] == 1).astype(np.int32)
    splits, merges, parts = _splits(single, rows[single, 2], window)
    arrays = (_tiles(several, rows[several, 1], rows[several, 2], tokens), splits, merges)
    packed = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
    if batch.row_starts.is_cuda:
        packed = packed.pin_memory().to(batch.row_starts.device, non_blocking=True)
    views = torch.split(packed, [array.size for array in arrays])
    tiles, splits_there, merges_there = (view.view(array.shape) for view, array in zip(views, arrays, strict=True))
    return Plan(tiles, splits_there, merges_there, parts)


def _tiles(row: Ints, count: Ints, length: Ints, tokens: int) -> Ints:
    """[tiles, 2]: those that see most come first, so that none of them is left over at the end."""
    each = -(-count // tokens)
    first = _ragged_arange(each) * tokens
    seen = np.repeat(length - count, each) + first
    return np.stack((np.repeat(row, each), first), axis=1)[np.argsort(-seen, kind="stable")]


def _splits(row: Ints, length: Ints, window: int | None) -> tuple[Ints, Ints, int]:
    """[splits, 3], [merges, 3], number of parts."""
    lowest, each = _split_range(length, window)
    parts = np.where(each > 1, each, 0)
    first = (np.cumsum(parts) - parts).astype(np.int32)
    within = _ragged_arange(each)
    part = np.where(np.repeat(parts, each) > 0, np.repeat(first, each) + within, -1)
    splits = np.stack((np.repeat(row, each), np.repeat(lowest, each) + within, part), axis=1)
    merges = np.stack((row, first, parts), axis=1)[parts > 0]
    return splits.astype(np.int32), merges.astype(np.int32), int(parts.sum())


def _split_range(length: Ints, window: int | None) -> tuple[Ints, Ints]:
    """The first split that a row of this key length sees, and how many."""
    lowest = np.zeros_like(length) if window is None else np.maximum(length - window, 0) // SPLIT
    return lowest, (length - 1) // SPLIT - lowest + 1


def _ragged_arange(lengths: Ints) -> Ints:
    """[3, 2] -> [0, 1, 2, 0, 1]."""
    ends = np.cumsum(lengths, dtype=np.int32)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int32) - np.repeat(ends - lengths, lengths)
