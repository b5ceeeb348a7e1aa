"""Attention in Triton over page tables, for CUDA devices.

`plan` cuts the batch on the host (`cuts.py`) and sends the cuts in one copy; `run` launches at most four kernels, whose grids
are numbers the host knows. A plan in memory that stays (`FixedSplits`) has lists of fixed length, filled up with -1:

    splits [ row 0 | row 0 | row 1 | -1 | -1 ]    merges [ row 0 | -1 ]    shared [ split 0 | -1 ]    members [ row 0 | -1 ]

Programs that find -1 leave at once.
"""

import importlib.util
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from quire.attn import cuts
from quire.attn.alike import NOTHING_ALIKE, Alike, FindAlike, Ints
from quire.attn.backend import AttentionSpec, Room
from quire.attn.batch import Batch
from quire.attn.cuts import Cuts, cut_rows, cut_tiles

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LARGEST_HEAD = 256
MOST_SHARING = 64
MERGED_AT_ONCE = 16
PARTS = 8192  # at a time: they bound the memory of a run, which every run takes, so that a rehearsal sees it


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


@dataclass(frozen=True)
class Plan:
    tiles: Tensor  # [tiles, 2] int32: row, first token within the row
    splits: Tensor  # [splits, 4] int32: row or -1, split, place among the parts or -1, key length
    merges: Tensor  # [merges, 3] int32: row or -1, first part, parts
    shared: Tensor  # [shared, 3] int32: split, first member, members or -1
    members: Tensor  # [members, 2] int32: row, its first part
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
        share = spec.heads // spec.kv_heads
        shape = geometry(share, spec.head_dim, kv.dtype)
        alike = batch.groups[group].alike(cuts.SPLIT) if spec.window is None else NOTHING_ALIKE
        batch.plans["triton", group] = cut(batch, spec.window, alike, shape.tile_m // share, shape.shared_m // share)

    def run(self, spec: AttentionSpec, query: Tensor, kv: Tensor, batch: Batch, group: int, sinks: Tensor | None) -> Tensor:
        if ("triton", group) not in batch.plans:
            self.plan(batch, group, spec, kv)
        plans: list[Plan] = batch.plans["triton", group]
        covered = batch.rows[-1][0] + batch.rows[-1][1] if batch.rows else 0
        make = torch.empty if covered == len(query) else torch.zeros
        out = make(query.shape, dtype=query.dtype, device=query.device)
        for plan in plans:
            _launch(spec, plan, query, kv, out, batch, batch.groups[group].tables, sinks)
        return out

    def fixed(self, spec: AttentionSpec, dtype: torch.dtype) -> "FixedSplits":
        share = spec.heads // spec.kv_heads
        return FixedSplits(geometry(share, spec.head_dim, dtype).shared_m // share)


class FixedSplits:
    def __init__(self, most_members: int) -> None:
        self._most_members = most_members

    def cut(self, lengths: Ints, window: int | None, find: FindAlike) -> tuple[Cuts, Room] | None:
        alike = find(cuts.SPLIT) if window is None else NOTHING_ALIKE
        made = cut_rows(np.arange(len(lengths), dtype=np.int32), lengths, window, alike, self._most_members)
        return None if made.parts > PARTS else (made, Room(len(made.splits), len(made.shared)))

    def size(self, rows: int, room: Room) -> int:
        return sum(_counts(rows, room))

    def numbers(self, cut: Cuts, rows: int, room: Room) -> Ints:
        out = np.full(self.size(rows, room), -1, np.int32)
        at = 0
        for array, count in zip((cut.splits, cut.merges, cut.shared, cut.members), _counts(rows, room), strict=True):
            out[at : at + array.size] = array.ravel()
            at += count
        return out

    def attach(self, batch: Batch, group: int, numbers: Tensor, rows: int, room: Room) -> None:
        splits, merges, shared, members = torch.split(numbers, _counts(rows, room))
        nothing = numbers.new_empty(0, 2)
        plan = Plan(nothing, splits.view(-1, 4), merges.view(-1, 3), shared.view(-1, 3), members.view(-1, 2), PARTS)
        batch.plans["triton", group] = [plan]


def _counts(rows: int, room: Room) -> list[int]:
    """Of the numbers of splits, merges, shared splits and members."""
    return [4 * room.splits, 3 * rows, 3 * room.shared, 2 * rows if room.shared else 0]


def _launch(
    spec: AttentionSpec, plan: Plan, query: Tensor, kv: Tensor, out: Tensor, batch: Batch, tables: Tensor, sinks: Tensor | None
) -> None:
    from quire.ops.kernels.attention import merge_kernel, shared_kernel, splits_kernel, tiles_kernel

    assert kv[0].is_contiguous() and query.stride(2) == 1 and query.stride(1) == spec.head_dim
    shape = geometry(spec.heads // spec.kv_heads, spec.head_dim, kv.dtype)
    strides = (kv.stride(0), kv.stride(1), tables.stride(0), spec.scale)
    options = {
        "SHARE": spec.heads // spec.kv_heads, "HEAD_DIM": spec.head_dim, "DIM_BLOCK": shape.dim_block,
        "PAGE_SIZE": kv.shape[3], "SOFT_CAP": spec.soft_cap or 0.0, "SINKS": sinks is not None,
    }  # fmt: skip
    in_splits = {"HEADS": spec.heads, "SPLIT": cuts.SPLIT, "BLOCK_N": shape.split_n}
    window, starts = spec.window or 0, batch.row_starts
    biases = out if sinks is None else sinks
    parts = torch.empty(plan.parts, spec.heads, spec.head_dim, dtype=torch.float32, device=out.device)
    weights = torch.empty(plan.parts, spec.heads, dtype=torch.float32, device=out.device)
    if len(plan.tiles):
        tiles_kernel[(spec.kv_heads, len(plan.tiles))](
            query, kv, out, biases, tables, starts, batch.kv_lengths, plan.tiles, query.stride(0), out.stride(0), *strides,
            **options, WINDOW=window, BLOCK_M=shape.tile_m, BLOCK_N=shape.tile_n,
            num_warps=shape.tile_warps, num_stages=shape.tile_stages,
        )  # fmt: skip
    if len(plan.shared):
        shared_kernel[(spec.kv_heads, len(plan.shared))](
            query, kv, parts, weights, biases, tables, starts, plan.shared, plan.members, query.stride(0), *strides,
            **options, **in_splits, BLOCK_M=shape.shared_m, num_warps=shape.shared_warps, num_stages=shape.shared_stages,
        )  # fmt: skip
    if len(plan.splits):
        splits_kernel[(spec.kv_heads, len(plan.splits))](
            query, kv, out, parts, weights, biases, tables, starts, plan.splits, query.stride(0), out.stride(0), *strides,
            **options, **in_splits, WINDOW=window, BLOCK_M=shape.split_m,
            num_warps=shape.split_warps, num_stages=shape.split_stages,
        )  # fmt: skip
    if len(plan.merges):
        merge_kernel[(spec.heads, len(plan.merges))](
            parts, weights, out, starts, plan.merges, out.stride(0),
            HEADS=spec.heads, HEAD_DIM=spec.head_dim, DIM_BLOCK=shape.dim_block, BLOCK=MERGED_AT_ONCE, num_warps=1,
        )  # fmt: skip


@lru_cache
def geometry(share: int, head_dim: int, dtype: torch.dtype) -> Geometry:
    dim_block = max(16, _power_of_two(head_dim))
    heads = _power_of_two(share)
    if dtype == torch.float32:  # exact products take no tensor cores: small blocks, for registers' sake
        return Geometry(dim_block, max(32, heads), 32, 4, 1, max(16, heads), 32, 4, 1, max(32, heads), 4, 1)
    if dim_block > 128:
        return Geometry(dim_block, max(128, heads), 64, 8, 2, max(16, heads), 64, 4, 2, max(64, heads), 4, 2)
    if dim_block > 64:
        return Geometry(dim_block, max(256, heads), 64, 8, 3, max(16, heads), 128, 4, 2, max(128, heads), 8, 2)
    return Geometry(dim_block, max(128, heads), 64, 4, 3, max(16, heads), 128, 4, 2, max(128, heads), 8, 2)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def cut(batch: Batch, window: int | None, alike: Alike, tokens: int, most_members: int) -> list[Plan]:
    """`tokens` of one row go into a tile, `most_members` rows into a shared split. Plans are to be run one after the other."""
    rows = np.fromiter(chain.from_iterable(batch.rows), np.int32, 3 * len(batch.rows)).reshape(-1, 3)
    several = np.flatnonzero(rows[:, 1] > 1).astype(np.int32)
    single = np.flatnonzero(rows[:, 1] == 1).astype(np.int32)
    tiles = cut_tiles(several, rows[several, 1], rows[several, 2], tokens) if len(several) else np.empty((0, 2), np.int32)
    made = cut_rows(single, rows[single, 2], window, alike, most_members)
    if made.parts <= PARTS:
        return [_send(tiles, made, batch.row_starts.device)]
    pieces = np.split(single, _borders(-(-rows[single, 2] // cuts.SPLIT)))
    plans = [_send(tiles, cut_rows(single[:0], single[:0], window, NOTHING_ALIKE, most_members), batch.row_starts.device)]
    for piece in pieces:
        chosen = np.zeros(len(rows), np.bool_)
        chosen[piece] = True
        made = cut_rows(piece, rows[piece, 2], window, alike.among(chosen), most_members)
        plans.append(_send(tiles[:0], made, batch.row_starts.device))
    return plans


def _borders(parts: Ints) -> list[int]:
    """Where to divide rows with so many parts, so that each piece has at most PARTS, or one row."""
    borders, ends = [], np.cumsum(parts)
    begin = 0
    while (reach := int(np.searchsorted(ends, (ends[begin - 1] if begin else 0) + PARTS, "right"))) < len(parts):
        begin = max(begin + 1, reach)
        borders.append(begin)
    return borders


def _send(tiles: Ints, made: Cuts, device: torch.device) -> Plan:
    arrays = (tiles, made.splits, made.merges, made.shared, made.members)
    packed = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    views = torch.split(packed, [array.size for array in arrays])
    there, splits, merges, shared, members = (view.view(array.shape) for view, array in zip(views, arrays, strict=True))
    return Plan(there, splits, merges, shared, members, max(PARTS, made.parts))
