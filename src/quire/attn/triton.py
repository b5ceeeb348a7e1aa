"""Attention in Triton, for CUDA devices: work items of a batch and the kernel launches of one layer.

tiles        rows with several tokens, over the pages
long tiles   the same for long rows, over a contiguous copy of their keys and values, some heads at a time
shared       splits that several one-token rows have in common
splits       the other splits of one-token rows
merges       rows with several splits

In the fixed order (ops/order.py) a token's output does not depend on which of these computes it: all kernels use the same
blocks of keys and merge splits (ops/kernels/attention.py). Otherwise each has the sizes that are fastest.
"""

import importlib.util
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.attn import work_split
from quire.attn.backend import NO_LATENTS, AttentionBackend, AttentionSpec, Room, slopes_of
from quire.attn.batch import Batch
from quire.attn.work_split import (
    MIN_SHARING_ROWS,
    NOTHING_SHARED,
    Cuts,
    FindSharedPrefix,
    Ints,
    SharedPrefix,
    cut_copies,
    cut_rows,
    cut_tiles,
    first_key,
)
from quire.ops.kv import MANTISSA_BITS, is_contiguous_by_page, kv_scales
from quire.ops.order import order_is_fixed

ANY_ORDER = -1  # instead of the keys after which a tile merges: it never does, and weights are summed in any order


@dataclass(frozen=True)
class Geometry:
    """Block sizes of one kind of layer."""

    dim_block: int
    tile_m: int  # queries times query heads per KV head
    tile_n: int  # keys
    tile_warps: int
    tile_stages: int
    split_m: int
    split_n: int
    split_warps: int
    split_stages: int
    shared_m: int  # rows times query heads per KV head; its key block is that of a split
    shared_warps: int
    shared_stages: int
    long_m: int = 128
    long_n: int = 128
    long_warps: int = 8
    long_stages: int = 3
    fixed_order: bool = False  # the same keys per block in all kernels, and tiles merge splits

    @property
    def blocks(self) -> tuple[int, int, int]:
        """Return the keys per block of tiles, splits and long tiles."""
        split = min(self.split_n, work_split.SPLIT)
        return (split, split, split) if self.fixed_order else (self.tile_n, split, self.long_n)

    @property
    def merged(self) -> int:
        """Return the keys after which a tile merges what it has; ANY_ORDER: never."""
        return work_split.SPLIT if self.fixed_order else ANY_ORDER


@dataclass(frozen=True)
class Plan:
    tiles: Tensor  # [tiles, 3] int32: row or -1, first token within the row, 0
    copies: Tensor  # [copies, 3] int32: row, first key, index in the copy
    long_tiles: Tensor  # [long tiles, 3] int32: row, first token within the row, index of the row's key 0
    splits: Tensor  # [splits, 4] int32: row or -1, split, index among the parts or -1, key length
    merges: Tensor  # [merges, 3] int32: row or -1, first part, parts
    shared: Tensor  # [shared, 3] int32: split, first member, members or -1
    members: Tensor  # [members, 2] int32: row, its first part
    parts: int
    keys: int  # in the copy
    copied: int  # keys times heads that memory is allocated for


def geometry(share: int, head_dim: int, dtype: torch.dtype) -> Geometry:
    return _geometry(share, head_dim, dtype, order_is_fixed())


@lru_cache
def _geometry(share: int, head_dim: int, dtype: torch.dtype, fixed_order: bool) -> Geometry:
    dim_block = max(16, _power_of_two(head_dim))
    heads = _power_of_two(share)
    if dtype == torch.float32:  # exact products do not use tensor cores: small blocks need fewer registers
        shape = Geometry(dim_block, max(32, heads), 32, 4, 1, max(16, heads), 32, 4, 1, max(32, heads), 4, 1)
        return replace(shape, fixed_order=fixed_order)
    if dim_block > 128:
        shape = Geometry(dim_block, max(128, heads), 64, 8, 2, max(16, heads), 64, 4, 2, max(64, heads), 4, 2)
        return replace(shape, fixed_order=True, tile_m=max(64, heads)) if fixed_order else shape
    if fixed_order:  # a tile has two accumulators, so there are fewer keys per block
        return Geometry(
            dim_block, max(128, heads), 64, 8, 3, max(16, heads), 64, 4, 5, max(128, heads), 8, 3, fixed_order=True
        )  # fmt: skip
    warps = 8 if dim_block > 64 else 4
    return Geometry(dim_block, max(128, heads), 64, warps, 3, max(16, heads), 128, 4, 2, max(128, heads), 8, 2)


@lru_cache
def narrowed(shape: Geometry, dtype: torch.dtype) -> Geometry:
    """Return the same for an 8-bit cache: halves of a head are matrices too, and unpacking is faster in many small programs."""
    shape = replace(shape, dim_block=max(32, shape.dim_block))
    large = dtype == torch.float32 or shape.dim_block > 128
    return shape if large else replace(shape, split_n=64, split_warps=2, split_stages=3)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def reads_in_blocks(spec: AttentionSpec, query: Tensor, kv: Tensor) -> bool:
    """Return whether the copy engine (TMA) can fetch blocks of contiguous keys, which makes a copy in the queries' dtype worth
    it. In the fixed order an fp8 KV cache is not copied: its scales would be applied before the dot product.
    """
    if order_is_fixed() and kv.dtype in MANTISSA_BITS:
        return False
    if query.device.type != "cuda" or torch.cuda.get_device_capability(query.device) != (9, 0):
        return False
    return spec.head_dim in (64, 128) and query.dtype != torch.float32


@dataclass
class Launch:
    spec: AttentionSpec
    plan: Plan
    query: Tensor  # [T, heads, head_dim]
    kv: Tensor  # [pages, 2, kv_heads, page_size, head_dim], or of 8 bits with scales
    out: Tensor  # [T, heads, head_dim]
    batch: Batch
    tables: Tensor  # [R, max_pages] int32
    sinks: Tensor | None  # [heads]

    def __post_init__(self) -> None:
        """Prepare arguments that several kernels share."""
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
            "SOFT_CAP": spec.soft_cap or 0.0, "SLOPES": slopes is not None,
        }  # fmt: skip

    def run(self) -> None:
        assert is_contiguous_by_page(self.kv) and self.query.stride()[1:] == (self.spec.head_dim, 1)
        # Allocated even if unused: the memory profile must see what any step may allocate.
        memory = self.out.new_empty(self._words(), dtype=torch.float32)
        plan = self.plan
        if plan.tiles.shape[0]:
            self._tiles()
        if plan.keys:
            self._long_tiles(memory)
        if plan.splits.shape[0] or plan.merges.shape[0]:
            self._splits(memory)

    def _words(self) -> int:
        """Return the size of the scratch memory in words of 4 bytes."""
        spec, plan = self.spec, self.plan
        parts = plan.parts * spec.heads * (spec.head_dim + 2)
        return max(parts, 2 * plan.copied * spec.head_dim * self.query.element_size() // 4)

    def _tiles(self) -> None:
        from quire.ops.kernels.attention import tiles_kernel
        from quire.ops.kernels.launcher import overlapping

        batch, shape = self.batch, self._shape
        tiles_kernel[(self.spec.kv_heads, self.plan.tiles.shape[0])](
            self.query, *self._cache, self.out, self._biases, self.tables, batch.row_starts, batch.kv_lengths, self.plan.tiles,
            self._query_stride, self._out_stride, *self._page_strides, self.spec.scale, **self._options, BITS=self._bits,
            SINKS=self.sinks is not None, DIM_BLOCK=shape.dim_block, PAGE_SIZE=self.kv.shape[3], WINDOW=self.spec.window or 0,
            SPLIT=shape.merged, BLOCK_M=shape.tile_m, BLOCK_N=shape.blocks[0],
            num_warps=shape.tile_warps, num_stages=shape.tile_stages, **overlapping(),
        )  # fmt: skip

    def _long_tiles(self, memory: Tensor) -> None:
        from triton.tools.tensor_descriptor import TensorDescriptor

        from quire.ops.kernels.attention import copy_kernel, long_tiles_kernel
        from quire.ops.kernels.launcher import overlapping

        plan, spec, batch, shape = self.plan, self.spec, self.batch, self._shape
        size = shape.blocks[2]
        copy, block = memory.view(self.query.dtype), [size, spec.head_dim]
        at_once = min(spec.kv_heads, plan.copied // plan.keys)
        for first in range(0, spec.kv_heads, at_once):
            heads = min(at_once, spec.kv_heads - first)
            lane = heads * plan.keys
            copy_kernel[(heads, plan.copies.shape[0])](
                *self._cache, copy, self.tables, batch.row_starts, batch.kv_lengths, plan.copies, *self._page_strides, first,
                plan.keys, BITS=self._bits, HEAD_DIM=spec.head_dim, PAGE_SIZE=self.kv.shape[3], WINDOW=spec.window or 0,
                BLOCK=size, num_warps=4, **overlapping(),
            )  # fmt: skip
            keys, values = (
                TensorDescriptor(base, [lane, spec.head_dim], [spec.head_dim, 1], block)
                for base in (copy, copy[lane * spec.head_dim :])
            )
            long_tiles_kernel[(heads, plan.long_tiles.shape[0])](
                self.query, self.out, self._biases, batch.row_starts, batch.kv_lengths, plan.long_tiles,
                self._query_stride, self._out_stride, first, plan.keys, spec.scale, keys, values, **self._options,
                SINKS=self.sinks is not None, WINDOW=spec.window or 0, SPLIT=shape.merged,
                BLOCK_M=shape.long_m, BLOCK_N=size, num_warps=shape.long_warps, num_stages=shape.long_stages,
                **overlapping(),
            )  # fmt: skip

    def _splits(self, memory: Tensor) -> None:
        from quire.ops.kernels.attention import merge_parts_kernel, shared_kernel, splits_kernel
        from quire.ops.kernels.launcher import overlapping

        plan, spec, shape, starts = self.plan, self.spec, self._shape, self.batch.row_starts
        size = plan.parts * spec.heads
        parts, peaks, totals = torch.split(memory[: size * (spec.head_dim + 2)], [size * spec.head_dim, size, size])
        sinks = {"SINKS": self.sinks is not None}
        options = {
            **self._options, "BITS": self._bits, "DIM_BLOCK": shape.dim_block, "PAGE_SIZE": self.kv.shape[3],
            "HEADS": spec.heads, "SPLIT": work_split.SPLIT, "BLOCK_N": shape.blocks[1],
        }  # fmt: skip
        if plan.shared.shape[0]:
            shared_kernel[(spec.kv_heads, plan.shared.shape[0])](
                self.query, *self._cache, parts, peaks, totals, self._biases, self.tables, starts, plan.shared, plan.members,
                self._query_stride, *self._page_strides, spec.scale, **options,
                BLOCK_M=shape.shared_m, num_warps=shape.shared_warps, num_stages=shape.shared_stages, **overlapping(),
            )  # fmt: skip
        if plan.splits.shape[0]:
            splits_kernel[(spec.kv_heads, plan.splits.shape[0])](
                self.query, *self._cache, self.out, parts, peaks, totals, self._biases, self.tables, starts, plan.splits,
                self._query_stride, self._out_stride, *self._page_strides, spec.scale, **options, **sinks,
                WINDOW=spec.window or 0, BLOCK_M=shape.split_m, num_warps=shape.split_warps, num_stages=shape.split_stages,
                **overlapping(),
            )  # fmt: skip
        if plan.merges.shape[0]:
            merge_parts_kernel[(spec.heads, plan.merges.shape[0])](
                parts, peaks, totals, self.out, self._biases, starts, plan.merges, self._out_stride,
                HEADS=spec.heads, HEAD_DIM=spec.head_dim, DIM_BLOCK=shape.dim_block, **sinks, num_warps=1, **overlapping(),
            )  # fmt: skip


DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256
MAX_QUERY_HEADS_PER_KV_HEAD = 64
MAX_PARTS = 8192  # per plan
MAX_COPIED_KEYS = 1 << 18  # keys times heads that are copied at a time
LONG_ROW_TOKENS = 512  # whose keys are worth copying
DEEP_ROW_KEYS = 4096  # seen by a row with several tokens: worth copying if tiles over pages would be long and ...
FEW_TILES = 32  # ... leave most of the device idle


def refuse_without_triton(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Return why the kernels cannot run on this device or in this dtype."""
    reasons = []
    if device.type != "cuda":
        reasons.append(f"it requires a CUDA device; got {device.type}")
    elif importlib.util.find_spec("triton") is None:
        reasons.append("the package triton is not installed")
    elif torch.cuda.get_device_capability(device) < (8, 0):
        reasons.append("it requires compute capability 8.0 or newer")
    if dtype not in DTYPES:
        reasons.append(f"{str(dtype).removeprefix('torch.')} is not supported")
    return reasons


class TritonAttention(AttentionBackend):
    def refuse(self, spec: AttentionSpec, device: torch.device, dtype: torch.dtype) -> list[str]:
        reasons = refuse_without_triton(device, dtype)
        if spec.latent is not None:
            reasons.append(NO_LATENTS)
        elif spec.head_dim > MAX_HEAD_DIM:
            reasons.append(f"head_dim must be at most {MAX_HEAD_DIM}; got {spec.head_dim}")
        if spec.heads // spec.kv_heads > MAX_QUERY_HEADS_PER_KV_HEAD:
            share = spec.heads // spec.kv_heads
            reasons.append(f"query heads per KV head must be at most {MAX_QUERY_HEADS_PER_KV_HEAD}; got {share}")
        return reasons

    def plan(self, batch: Batch, group: int, spec: AttentionSpec, query: Tensor, kv: Tensor) -> None:
        share = spec.heads // spec.kv_heads
        shape = geometry(share, spec.head_dim, query.dtype)
        alike = batch.groups[group].alike(work_split.SPLIT) if spec.window is None else NOTHING_SHARED
        batch.plans["triton", group] = cut(batch, spec.window, alike, shape, share, reads_in_blocks(spec, query, kv))

    def run(self, spec: AttentionSpec, query: Tensor, kv: Tensor, batch: Batch, group: int, sinks: Tensor | None) -> Tensor:
        if ("triton", group) not in batch.plans:
            self.plan(batch, group, spec, query, kv)
        plans: list[Plan] = batch.plans["triton", group]
        covered = batch.rows[-1][0] + batch.rows[-1][1] if batch.rows else 0
        make = torch.empty_like if covered == query.shape[0] else torch.zeros_like
        out = make(query, memory_format=torch.contiguous_format)
        for plan in plans:
            Launch(spec, plan, query, kv, out, batch, batch.groups[group].tables, sinks).run()
        return out

    def fixed(self, spec: AttentionSpec, dtype: torch.dtype) -> "FixedCuts":
        share = spec.heads // spec.kv_heads
        shape = geometry(share, spec.head_dim, dtype)
        return FixedCuts(shape.shared_m // share, shape.tile_m // share)


class FixedCuts:
    """Fixed plans. Long rows are not copied: their tiles read the pages. If a copy would be worth much, there is no plan."""

    def __init__(self, most_members: int, tile_tokens: int) -> None:
        self._most_members, self._tile_tokens = most_members, tile_tokens

    def cut(
        self, counts: Ints, lengths: Ints, window: int | None, find: FindSharedPrefix
    ) -> tuple[tuple[Cuts, Ints], Room] | None:
        (single, several), tiles, seen = _by_length(counts.tobytes()), NOTHING, lengths
        if len(several):
            seen, count, length = lengths[single], counts[several], lengths[several]
            if ((count >= LONG_ROW_TOKENS) & (length - first_key(count, length, window) >= DEEP_ROW_KEYS)).any():
                return None
            tiles = cut_tiles(several, count, length, self._tile_tokens, np.zeros_like(several))
        alike = find(work_split.SPLIT) if window is None and len(single) >= MIN_SHARING_ROWS else NOTHING_SHARED
        made = cut_rows(single, seen, window, alike, self._most_members)
        return None if made.parts > MAX_PARTS else ((made, tiles), Room(len(made.splits), len(made.shared), len(tiles)))

    def size(self, rows: int, room: Room) -> int:
        return sum(room_counts(rows, room))

    def numbers(self, cut: tuple[Cuts, Ints], rows: int, room: Room) -> Ints:
        made, tiles = cut
        out = _lists(made if made.layout is None else made.layout.made, rows, room).copy()
        out[3 : 4 * len(made.splits) : 4] = made.splits[:, 3]
        if len(tiles):
            out[len(out) - 3 * room.tiles :][: tiles.size] = tiles.reshape(-1)
        return out

    def renew(self, cut: tuple[Cuts, Ints], lengths: Ints, numbers: Ints) -> bool:
        made, tiles = cut
        grown = None if len(tiles) or made.layout is None else made.layout.lengths(lengths)
        if grown is None:
            return False
        numbers[3 : 4 * len(grown) : 4] = grown
        return True

    def attach(self, batch: Batch, group: int, numbers: Tensor, rows: int, room: Room) -> None:
        splits, merges, shared, members, tiles = torch.split(numbers, room_counts(rows, room))
        nothing = numbers.new_empty(0, 3)
        batch.plans["triton", group] = [
            Plan(
                tiles=tiles.view(-1, 3), copies=nothing, long_tiles=nothing, splits=splits.view(-1, 4),
                merges=merges.view(-1, 3), shared=shared.view(-1, 3), members=members.view(-1, 2),
                parts=MAX_PARTS, keys=0, copied=0,
            )
        ]  # fmt: skip


@lru_cache(maxsize=16)  # most steps repeat the previous one
def _lists(made: Cuts, rows: int, room: Room) -> Ints:
    """Return the plan's integers without tiles and key lengths."""
    at, counts = 0, room_counts(rows, room)
    out = np.full(sum(counts), -1, np.int32)
    for array, count in zip((made.splits, made.merges, made.shared, made.members), counts, strict=False):
        out[at : at + array.size] = array.reshape(-1)
        at += count
    if not room.tiles and made.rows < rows:  # padding rows attend to themselves
        padding = out[: 4 * room.splits].reshape(-1, 4)[len(made.splits) :][: rows - made.rows]
        padding[:, 0], padding[:, 1], padding[:, 3] = np.arange(made.rows, rows), 0, 1
    return out


@lru_cache(maxsize=16)
def _by_length(counts: bytes) -> tuple[Ints, Ints]:
    """Return the rows with one token, and those with several."""
    alone = np.frombuffer(counts, np.int32) == 1
    return np.flatnonzero(alone).astype(np.int32), np.flatnonzero(~alone).astype(np.int32)


def room_counts(rows: int, room: Room) -> list[int]:
    """Return how many integers splits, merges, shared splits, members and tiles take."""
    return [4 * room.splits, 3 * rows, 3 * room.shared, 2 * rows if room.shared else 0, 3 * room.tiles]


def cut(batch: Batch, window: int | None, alike: SharedPrefix, shape: Geometry, share: int, in_blocks: bool) -> list[Plan]:
    """Return plans to be run one after the other. in_blocks: copy the keys of long rows to contiguous memory."""
    rows = np.fromiter(chain.from_iterable(batch.rows), np.int32, 3 * len(batch.rows)).reshape(-1, 3)
    single = np.flatnonzero(rows[:, 1] == 1).astype(np.int32)
    prompts = NO_PROMPTS if len(single) == len(rows) else _cut_prompts(rows, window, shape, share, in_blocks)
    device, members = batch.row_starts.device, shape.shared_m // share
    made = cut_rows(single, rows[single, 2], window, alike, members)
    if made.parts <= MAX_PARTS:
        return [_send(prompts, made, device)]
    plans: list[Plan] = []
    for chosen_rows in np.split(single, _borders(-(-rows[single, 2] // work_split.SPLIT))):
        chosen = np.zeros(len(rows), np.bool_)
        chosen[chosen_rows] = True
        made = cut_rows(chosen_rows, rows[chosen_rows, 2], window, alike.among(chosen), members)
        plans.append(_send(NO_PROMPTS if plans else prompts, made, device))
    return plans


@dataclass(frozen=True)
class Prompts:
    """The launch plan for rows of several tokens."""

    tiles: Ints  # [tiles, 3]
    copies: Ints  # [copies, 3]
    long_tiles: Ints  # [long tiles, 3]
    keys: int


NOTHING = np.empty((0, 3), np.int32)
NO_PROMPTS = Prompts(NOTHING, NOTHING, NOTHING, keys=0)


def _cut_prompts(rows: Ints, window: int | None, shape: Geometry, share: int, in_blocks: bool) -> Prompts:
    count, length = rows[:, 1], rows[:, 2]
    first = first_key(count, length, window)
    far = _copied(count, length - first, shape.tile_m // share) if in_blocks else np.zeros(len(rows), np.bool_)
    long, several = (np.flatnonzero(mask).astype(np.int32) for mask in (far, (count > 1) & ~far))
    tiles = cut_tiles(several, count[several], length[several], shape.tile_m // share, np.zeros_like(several))
    copies, place, keys = cut_copies(long, first[long], length[long], shape.blocks[2])
    long_tiles = cut_tiles(long, count[long], length[long], shape.long_m // share, place)
    return Prompts(tiles, copies, long_tiles, keys)


def _copied(count: Ints, seen: Ints, tile: int) -> npt.NDArray[np.bool_]:
    """Return [R] bool: rows whose keys are copied, those with the most tokens first, until MAX_COPIED_KEYS; seen [R]: their
    keys."""
    deep = (count > 1) & (count < LONG_ROW_TOKENS) & (seen >= DEEP_ROW_KEYS)
    if (-(-count[deep] // tile)).sum() > FEW_TILES:
        deep[:] = False
    worthy = np.flatnonzero((count >= LONG_ROW_TOKENS) | deep)
    worthy = worthy[np.argsort(-count[worthy], kind="stable")]
    before = np.cumsum(seen[worthy]) - seen[worthy]
    chosen = np.zeros(len(count), np.bool_)
    chosen[worthy[before < MAX_COPIED_KEYS]] = True
    return chosen


def _borders(parts: Ints) -> list[int]:
    """Return where to divide rows with so many parts, so that each chunk has at most MAX_PARTS, or one row."""
    borders, ends = [], np.cumsum(parts)
    begin = 0
    while (reach := int(np.searchsorted(ends, (ends[begin - 1] if begin else 0) + MAX_PARTS, "right"))) < len(parts):
        begin = max(begin + 1, reach)
        borders.append(begin)
    return borders


def _send(prompts: Prompts, made: Cuts, device: torch.device) -> Plan:
    arrays = (
        prompts.tiles, prompts.copies, prompts.long_tiles, made.splits, made.merges, made.shared, made.members
    )  # fmt: skip
    packed = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    views = torch.split(packed, [array.size for array in arrays])
    tiles, copies, long_tiles, *rest = (view.view(array.shape) for view, array in zip(views, arrays, strict=True))
    splits, merges, shared, members = rest
    parts, copied = max(MAX_PARTS, made.parts), max(MAX_COPIED_KEYS, prompts.keys)
    return Plan(tiles, copies, long_tiles, splits, merges, shared, members, parts, prompts.keys, copied)
