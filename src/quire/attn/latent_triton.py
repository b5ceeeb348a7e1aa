"""Latent attention (MLA) in Triton, for CUDA devices: work items of a batch and the kernel launches of one layer.

prepare     write rows to their pages, project queries into the latent space
tiles       rows with several tokens
splits      rows with one token, and merges of rows with several splits
values      project what was found to values

expanded    rows with many tokens, over keys and values that are computed first

In the fixed order (ops/order.py) no row is expanded, and tiles and splits have the same bits (ops/kernels/latent.py).
"""

from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.attn.backend import AttentionBackend, AttentionSpec, Latents, Room
from quire.attn.batch import Batch
from quire.attn.triton import ANY_ORDER, FixedCuts, refuse_without_triton, room_counts
from quire.attn.work_split import NOTHING_SHARED, Cuts, FindSharedPrefix, Ints, cut_rows, cut_tiles
from quire.ops.adapters import add_tiled, tile
from quire.ops.arguments import AdapterTiles
from quire.ops.order import order_is_fixed
from quire.ops.qkv import add_to_near, add_to_values
from quire.types.plan import spans

TILE_TOKENS = 64  # queries times heads per tile
MAX_PROGRAM_HEADS = 64
FEW_TOKENS = 64  # up to which rows and queries are prepared in one launch
MAX_LANE_VALUES = 256  # of the rank, per program in the fixed order, which has two accumulators


@dataclass(frozen=True)
class Absorbed:
    tiles: Tensor  # [tiles, 3] int32: row or -1, first token within the row, 0
    splits: Tensor  # [splits, 4] int32: row or -1, split, index among the parts or -1, length
    merges: Tensor  # [merges, 3] int32: row or -1, first part, parts
    parts: int
    split: int  # rows per split
    starts: Tensor  # [R + 1] int32 row starts among the absorbed tokens
    index: Tensor | None = None  # [n] int64 indices of absorbed tokens among all; None: all are
    adapted: AdapterTiles | None = None  # tiles of absorbed tokens by adapter, if not all tokens are absorbed


@dataclass(frozen=True)
class Expanded:
    TILE: ClassVar[int] = 128  # tokens

    tiles: Tensor  # [tiles, 3] int32: row, first token within the row, index of its first key
    pages: Tensor  # [S] int64 pages of the cached rows, one sequence after the other
    offsets: Tensor  # [S] int64 within the page
    adapted: AdapterTiles | None = None  # tiles of the cached rows by adapter


def heads_at_once(heads: int) -> int:
    return min(MAX_PROGRAM_HEADS, max(16, _power_of_two(heads)))


def place_rows(latents: Latents, rows: Tensor, kv: Tensor, write: Tensor, positions: Tensor) -> None:
    """Write rows to their pages."""
    _prepare(latents, rows, rows.unsqueeze(1), rows, kv, write, positions, positions, heads=0, with_rows=True)


def run_absorbed(
    spec: AttentionSpec,
    latents: Latents,
    plan: Absorbed,
    query: Tensor,
    kv: Tensor,
    batch: Batch,
    group: int,
    rows: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Return attention's output [K, heads, values] over latents.

    query: [K, heads, nope + rotary] of the plan's tokens
    rows: latent rows and where to write them; None: they are written already
    """
    assert spec.latent is not None
    count, heads, rank = len(query), spec.heads, spec.latent
    near = query.new_empty(count, heads, spec.head_dim)
    positions = batch.positions if plan.index is None else batch.positions[plan.index]
    # In the fixed order one variant of the kernel writes all rows: its layout determines the order of a norm's sum.
    if rows is not None and count <= FEW_TOKENS and not order_is_fixed():
        _prepare(latents, rows[0], query, near, kv, rows[1], batch.positions, positions, heads=heads, with_rows=True)
    else:
        if rows is not None:
            place_rows(latents, rows[0], kv, rows[1], batch.positions)
        _prepare(latents, near, query, near, kv, positions, positions, positions, heads=heads, with_rows=False)
    lora = batch.tokens.lora
    tiles = plan.adapted if plan.index is not None or lora is None else lora.sorted
    changed = None if latents.table is None or tiles is None or not count else (tiles, latents.table)
    if changed is not None:
        add_to_near(near, query, latents.up, latents.nope, *changed)
    covered = plan.index is not None or (bool(batch.rows) and sum(batch.rows[-1][:2]) == count)
    found = (near.new_empty if covered else near.new_zeros)(count, heads, rank)
    _attend(spec, plan, near, kv, found, batch, batch.groups[group].tables)
    out = _values(latents, found)
    if changed is not None:
        add_to_values(out, found, latents.nope, *changed)
    return out


def _attend(spec: AttentionSpec, plan: Absorbed, near: Tensor, kv: Tensor, found: Tensor, batch: Batch, tables: Tensor) -> None:
    """Write what queries near [K, heads, rank + rotary] find in the latent space to found [K, heads, rank]."""
    from quire.ops.kernels.attention import merge_parts_kernel
    from quire.ops.kernels.latent import latent_splits_kernel, latent_tiles_kernel
    from quire.ops.kernels.launcher import cdiv, overlapping

    _, heads, rank = found.shape
    lanes, at_once, wide = lanes_of(rank), heads_at_once(heads), near.dtype == torch.float32
    columns, lines = rank // lanes, heads * lanes
    # Allocated even if unused: the memory profile must see what any step may allocate.
    memory = near.new_empty(plan.parts * lines * (columns + 2), dtype=torch.float32)
    parts, peaks, totals = torch.split(memory, [plan.parts * lines * columns, plan.parts * lines, plan.parts * lines])
    shape = {
        "HEADS": heads, "COLUMNS": columns, "COLUMN_BLOCK": _block(columns), "LANES": lanes, "END": spec.head_dim - rank,
        "END_BLOCK": _block(spec.head_dim - rank), "PAGE_SIZE": kv.shape[3], "BLOCK_N": 16 if wide else 32,
        "num_stages": 1 if wide else 2,
    }  # fmt: skip
    strides, programs = (kv.stride(0), tables.stride(0), spec.scale), cdiv(heads, at_once) * lanes
    if plan.tiles.shape[0]:
        latent_tiles_kernel[(programs, plan.tiles.shape[0])](
            near, kv, found, tables, plan.starts, batch.kv_lengths, plan.tiles, *strides, **shape,
            SPLIT=plan.split if order_is_fixed() else ANY_ORDER, BLOCK_H=at_once, BLOCK_M=max(TILE_TOKENS, at_once),
            num_warps=8, **overlapping(),
        )  # fmt: skip
    if plan.splits.shape[0]:
        latent_splits_kernel[(programs, plan.splits.shape[0])](
            near, kv, found, parts, peaks, totals, tables, plan.starts, plan.splits, *strides, **shape, SPLIT=plan.split,
            BLOCK_M=at_once, num_warps=4 if at_once == 16 else 8, **overlapping(),
        )  # fmt: skip
    if plan.merges.shape[0]:
        merge_parts_kernel[(lines, plan.merges.shape[0])](
            parts, peaks, totals, found, found, plan.starts, plan.merges, heads * rank, HEADS=lines, HEAD_DIM=columns,
            DIM_BLOCK=_block(columns), SINKS=False, num_warps=max(1, _block(columns) // MAX_LANE_VALUES), **overlapping(),
        )  # fmt: skip


def lanes_of(rank: int) -> int:
    """Return how many programs divide the values of a rank."""
    return 2 if order_is_fixed() and rank > MAX_LANE_VALUES and rank % 2 == 0 else 1


def run_expanded(
    spec: AttentionSpec, latents: Latents, plan: Expanded, query: Tensor, kv: Tensor, batch: Batch, out: Tensor
) -> None:
    """Write attention's output [K, heads, values] of the plan's rows to `out`, from query [K, heads, nope + rotary]."""
    from quire.ops.kernels.latent import expanded_kernel
    from quire.ops.kernels.launcher import overlapping

    assert spec.latent is not None
    held = kv[plan.pages, 0, 0, plan.offsets]
    made = F.linear(held[:, : spec.latent], latents.up.flatten(0, 1))
    if latents.table is not None and plan.adapted is not None:
        made = add_tiled(made, held[:, : spec.latent], plan.adapted, latents.table, None)
    rotation, wide = latents.rotation, query.dtype == torch.float32
    expanded_kernel[(spec.heads, plan.tiles.shape[0])](
        query, made, held, out, rotation.cos, rotation.sin, batch.row_starts, batch.kv_lengths, plan.tiles,
        query.stride(0), made.stride(0), spec.scale,
        HEADS=spec.heads, RANK=spec.latent, NOPE=latents.nope, NOPE_BLOCK=_block(latents.nope), VALUES=latents.values,
        VALUE_BLOCK=_block(latents.values), **_rotation_options(latents),
        BLOCK_M=Expanded.TILE, BLOCK_N=32 if wide else 64, num_warps=8,
        num_stages=1 if wide or max(latents.nope, latents.values) > 128 else 2, **overlapping(),
    )  # fmt: skip


def _prepare(
    latents: Latents,
    rows: Tensor,
    query: Tensor,
    near: Tensor,
    kv: Tensor,
    write: Tensor,
    row_positions: Tensor,
    positions: Tensor,
    *,
    heads: int,
    with_rows: bool,
) -> None:
    from quire.ops.kernels.latent import prepare_kernel
    from quire.ops.kernels.launcher import cdiv, overlapping

    assert query.stride(2) == 1 and (not heads or query.stride(1) == query.shape[2]) and kv.stride(3) == kv.shape[4]
    rank, rotation = len(latents.norm), latents.rotation
    tokens = max(len(query) if heads else 0, len(rows) if with_rows else 0)
    block_t, block_n = (16, 64) if with_rows or tokens <= FEW_TOKENS else (64, 128)
    if not tokens:
        return
    prepare_kernel[(heads + with_rows, cdiv(rank, block_n) if heads else 1, cdiv(tokens, block_t))](
        rows, query, near, kv, write, row_positions, positions, latents.norm, latents.up, rotation.cos, rotation.sin,
        len(rows), len(query), rows.stride(0), query.stride(0), latents.up.stride(0), kv.stride(0), latents.eps,
        HEADS=heads, ROWS=with_rows, NOPE=latents.nope, NOPE_BLOCK=_block(latents.nope), RANK=rank, RANK_BLOCK=_block(rank),
        **_rotation_options(latents), PAGE_SIZE=kv.shape[3], BLOCK_T=block_t, BLOCK_N=block_n, num_warps=4, **overlapping(),
    )  # fmt: skip


def _values(latents: Latents, found: Tensor) -> Tensor:
    from quire.ops.kernels.latent import values_kernel
    from quire.ops.kernels.launcher import cdiv, overlapping

    count, heads, rank = found.shape
    out = found.new_empty(count, heads, latents.values)
    few = count <= FEW_TOKENS
    block_t, block_n = (16, 16) if few else (64, min(128, _block(latents.values)))
    if count:
        values_kernel[(heads, cdiv(latents.values, block_n), cdiv(count, block_t))](
            found, latents.up, out, count, latents.up.stride(0), HEADS=heads, NOPE=latents.nope, VALUES=latents.values,
            RANK=rank, BLOCK_T=block_t, BLOCK_N=block_n, BLOCK_K=min(128 if few else 64, _block(rank)), num_warps=4,
            **overlapping(),
        )  # fmt: skip
    return out


def _rotation_options(latents: Latents) -> dict[str, Any]:
    half = latents.rotation.cos.shape[1]
    return {"HALF": half, "HALF_BLOCK": _block(half), "INTERLEAVED": latents.rotation.interleaved}


def _block(size: int) -> int:
    """Return the block size for tensor cores."""
    return max(16, _power_of_two(size))


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


Mask = npt.NDArray[np.bool_]
SPLIT = 128  # rows per split: few programs, since a row is read once for all heads
LONG_ROW_TOKENS = 256  # at least, for expansion; shorter rows run in CUDA graphs
MAX_EXPANDED_VALUES = 1 << 27  # of keys and values at a time
MAX_PART_VALUES = 1 << 25  # of all parts


class LatentTriton(AttentionBackend):
    def refuse(self, spec: AttentionSpec, device: torch.device, dtype: torch.dtype) -> list[str]:
        reasons = ["it requires a latent cache"] if spec.latent is None else []
        return reasons + refuse_without_triton(device, dtype)

    def run_latent(
        self,
        spec: AttentionSpec,
        latents: Latents,
        query: Tensor,
        rows: Tensor,
        kv: Tensor,
        batch: Batch,
        group: int,
        final: bool,
    ) -> Tensor:
        attending = batch.final if final else batch
        if ("latent", group) not in attending.plans:
            attending.plans["latent", group] = cut(attending, group, spec, latents, kv.shape[3])
        plan: LatentPlan = attending.plans["latent", group]
        write = batch.groups[group].write
        if plan.expanded is None and attending is batch:
            return run_absorbed(spec, latents, plan.absorbed, query, kv, attending, group, (rows, write)).flatten(1)
        place_rows(latents, rows, kv, write, batch.positions)
        if plan.expanded is None:
            return run_absorbed(spec, latents, plan.absorbed, query, kv, attending, group, None).flatten(1)
        out = query.new_zeros(len(query), spec.heads, latents.values)
        run_expanded(spec, latents, plan.expanded, query, kv, attending, out)
        index = plan.absorbed.index
        if index is None or len(index):
            few = query if index is None else query[index]
            found = run_absorbed(spec, latents, plan.absorbed, few, kv, attending, group, None)
            out.index_copy_(0, index, found) if index is not None else out.copy_(found)
        return out.flatten(1)

    def fixed(self, spec: AttentionSpec, dtype: torch.dtype) -> "FixedLatents":  # noqa: ARG002
        return FixedLatents(spec)


@dataclass(frozen=True)
class LatentPlan:
    absorbed: Absorbed
    expanded: Expanded | None = None


class FixedLatents(FixedCuts):
    """Fixed plans of latent attention. CUDA graphs do not expand rows."""

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(1, tile_tokens(spec))
        self._parts = most_parts(spec)

    def cut(
        self,
        counts: Ints,
        lengths: Ints,
        window: int | None,  # noqa: ARG002
        find: FindSharedPrefix,  # noqa: ARG002
    ) -> tuple[tuple[Cuts, Ints], Room] | None:
        if (counts >= LONG_ROW_TOKENS).any():
            return None
        single, tiles = _cut(counts, lengths, counts == 1, counts > 1, self._tile_tokens)
        return None if single.parts > self._parts else ((single, tiles), Room(len(single.splits), 0, len(tiles)))

    def attach(self, batch: Batch, group: int, numbers: Tensor, rows: int, room: Room) -> None:
        splits, merges, _, _, tiles = torch.split(numbers, room_counts(rows, room))
        batch.plans["latent", group] = LatentPlan(
            Absorbed(tiles.view(-1, 3), splits.view(-1, 4), merges.view(-1, 3), self._parts, SPLIT, batch.row_starts)
        )


def tile_tokens(spec: AttentionSpec) -> int:
    return max(1, TILE_TOKENS // heads_at_once(spec.heads))


def most_parts(spec: AttentionSpec) -> int:
    assert spec.latent is not None
    return max(256, MAX_PART_VALUES // (spec.heads * spec.latent))


def cut(batch: Batch, group: int, spec: AttentionSpec, latents: Latents, page_size: int) -> LatentPlan:
    rows = np.fromiter(chain.from_iterable(batch.rows), np.int32, 3 * len(batch.rows)).reshape(-1, 3)
    count, length = rows[:, 1], rows[:, 2]
    expands = not order_is_fixed()
    many = np.array([expands and n >= LONG_ROW_TOKENS and latents.worth_expanding(int(n)) for n in count.tolist()], np.bool_)
    many[
        np.flatnonzero(many)[np.cumsum(length[many].astype(np.int64)) * latents.up.shape[:2].numel() > MAX_EXPANDED_VALUES]
    ] = False
    single, tiles = _cut(count, length, (count == 1) & ~many, (count > 1) & ~many, tile_tokens(spec))
    device = batch.row_starts.device
    long = np.flatnonzero(many).astype(np.int32)
    if not len(long):
        sent = _send((tiles, single.splits, single.merges), device)
        return LatentPlan(Absorbed(sent[0], sent[1], sent[2], max(most_parts(spec), single.parts), SPLIT, batch.row_starts))
    few = np.where(many, 0, count)
    index = spans(rows[~many, 0].astype(np.int64), few[~many].astype(np.int64)).astype(np.int32)
    starts = np.concatenate(([0], np.cumsum(few))).astype(np.int32)
    place = (np.cumsum(length[long]) - length[long]).astype(np.int32)
    long_tiles = cut_tiles(long, count[long], length[long], Expanded.TILE, place)
    at = spans(np.zeros(len(long), np.int64), length[long].astype(np.int64)).astype(np.int32)
    owner = long.repeat(length[long])
    sent = _send((tiles, single.splits, single.merges, starts, index, long_tiles, at, owner), device)
    mine, seen = (None, None) if latents.table is None else _adapted(batch, index, rows[owner, 0])
    table = batch.groups[group].tables
    pages = table[sent[7].long(), (sent[6] // page_size).long()].long()
    return LatentPlan(
        Absorbed(sent[0], sent[1], sent[2], max(most_parts(spec), single.parts), SPLIT, sent[3], sent[4].long(), mine),
        Expanded(sent[5], pages, (sent[6] % page_size).long(), seen),
    )


def _adapted(batch: Batch, few: Ints, firsts: Ints) -> tuple[AdapterTiles | None, AdapterTiles | None]:
    """Return the tiles by adapter of these tokens, and of the cached rows that begin with tokens `firsts`."""
    lora = batch.tokens.lora
    if lora is None:
        return None, None
    slots, device = lora.slots, lora.device
    return tile(slots[few], device) if len(few) else None, tile(slots[firsts], device)


def _cut(count: Ints, length: Ints, alone: Mask, several: Mask, tokens: int) -> tuple[Cuts, Ints]:
    """Return the work of rows with one token and of rows with several, given as masks."""
    single, many = (np.flatnonzero(mask).astype(np.int32) for mask in (alone, several))
    tiles = cut_tiles(many, count[many], length[many], tokens, np.zeros_like(many))
    return cut_rows(single, length[single], None, NOTHING_SHARED, 1, SPLIT), tiles


def _send(arrays: tuple[Ints, ...], device: torch.device) -> list[Tensor]:
    """Copy the arrays to the device in one transfer."""
    packed = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    views = torch.split(packed, [array.size for array in arrays])
    return [view.view(array.shape) for view, array in zip(views, arrays, strict=True)]
