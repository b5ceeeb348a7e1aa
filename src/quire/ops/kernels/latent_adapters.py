"""LoRA on the projection of latents to keys and values, applied to queries and results per head: one launch each, after the
launch of the projection itself. Tiles and tables are those of `adapters.py`.

    queries   near  += (query * B of the head's keys) * A
    values    value += (found * A) * B of the head's values

With gains (DoRA) rows of the projection itself change: queries are projected again.
"""

import triton
import triton.language as tl
from torch import Tensor

from quire.ops.arguments import AdapterTable, AdapterTiles
from quire.ops.kernels.adapters import program_for, ranks_at_once
from quire.ops.kernels.launcher import cdiv, launched, let_next_start, overlapping, power_of_two, wait_for_previous

LEAST, MOST = 16, 128  # bounds of a block


@triton.jit
def _adapter_of(table, tiles, tile, stride):
    """Return the table entry, rank and gain of a tile's adapter, the tile's first index in the order, and its token count (0 if
    there is nothing to add)."""
    entry = table + tl.load(tiles + tile * 3) * stride
    first, count = tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
    rank, gain = tl.load(entry + 2).to(tl.int32), tl.load(entry + 3)
    return entry, rank, gain, first, tl.where((rank > 0) | (gain != 0), count, 0)


@launched
@triton.jit(do_not_specialize_on_alignment=["query"])
def _near(
    query,  # [K, HEADS, NOPE + TURNING]
    matrix,  # [HEADS, NOPE + VALUES, RANK]
    order,  # [K] int32
    tiles,  # [N, 3] int32
    table,  # AdapterTable.entries
    near,  # [K, HEADS, RANK + TURNING]
    query_stride,
    matrix_stride,
    stride,  # between adapter slots in the table
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    NOPE_BLOCK: tl.constexpr,
    VALUES: tl.constexpr,
    TURNING: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    tile, head = tl.program_id(0), tl.program_id(1)
    entry, rank, gain, first, count = _adapter_of(table, tiles, tile, stride)
    wait_for_previous(EARLY)
    if count > 0:
        kind: tl.constexpr = near.dtype.element_ty
        down, up = tl.load(entry).to(tl.pointer_type(kind)), tl.load(entry + 1).to(tl.pointer_type(kind))
        lane, k = tl.arange(0, BLOCK), tl.arange(0, NOPE_BLOCK)
        n = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
        real, output = lane < count, head * (NOPE + VALUES) + k
        token = tl.load(order + first + lane, mask=real, other=0).to(tl.int64)
        source = query + token * query_stride + head * (NOPE + TURNING)
        x = tl.load(source[:, None] + k[None, :], mask=real[:, None] & (k < NOPE)[None, :], other=0.0)
        target = near + ((token * HEADS + head) * (RANK + TURNING))[:, None] + n[None, :]
        mask = real[:, None] & (n < RANK)[None, :]
        if gain != 0:
            length = tl.load(gain.to(tl.pointer_type(kind)) + output, mask=k < NOPE, other=0.0)
            x = (x.to(tl.float32) * length.to(tl.float32)[None, :]).to(kind)
            where = matrix + head.to(tl.int64) * matrix_stride + k[:, None] * RANK + n[None, :]
            own = tl.load(where, mask=(k < NOPE)[:, None] & (n < RANK)[None, :], other=0.0)
            value = tl.dot(x, own, input_precision="ieee")
        else:
            value = tl.load(target, mask=mask, other=0.0).to(tl.float32)
        for at in tl.range(0, rank, BLOCK_R):
            ranks = at + tl.arange(0, BLOCK_R)
            inside = ranks < rank
            wide = up + ranks[None, :] * (HEADS * (NOPE + VALUES)) + output[:, None]
            wide = tl.load(wide, mask=inside[None, :] & (k < NOPE)[:, None], other=0.0)
            narrow = tl.load(down + ranks[:, None] * RANK + n[None, :], mask=inside[:, None] & (n < RANK)[None, :], other=0.0)
            value = tl.dot(tl.dot(x, wide, input_precision="ieee").to(kind), narrow, value, input_precision="ieee")
        tl.store(target, value.to(kind), mask=mask)


@launched
@triton.jit
def _value(
    found,  # [K, HEADS, RANK]
    order,  # [K] int32
    tiles,  # [N, 3] int32
    table,  # AdapterTable.entries
    out,  # [K, HEADS, VALUES]
    stride,  # between adapter slots in the table
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    VALUES: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    tile, head = tl.program_id(0), tl.program_id(1)
    entry, rank, gain, first, count = _adapter_of(table, tiles, tile, stride)
    wait_for_previous(EARLY)
    if count > 0:
        kind: tl.constexpr = out.dtype.element_ty
        down, up = tl.load(entry).to(tl.pointer_type(kind)), tl.load(entry + 1).to(tl.pointer_type(kind))
        lane, k = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
        n = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
        real, output = lane < count, head * (NOPE + VALUES) + NOPE + n
        token = tl.load(order + first + lane, mask=real, other=0).to(tl.int64)
        source = found + ((token * HEADS + head) * RANK)[:, None] + k[None, :]
        target = out + ((token * HEADS + head) * VALUES)[:, None] + n[None, :]
        mask = real[:, None] & (n < VALUES)[None, :]
        value = tl.load(target, mask=mask, other=0.0).to(tl.float32)
        for at in tl.range(0, rank, BLOCK_R):
            ranks = at + tl.arange(0, BLOCK_R)
            inside = ranks < rank
            shrunk = tl.zeros((BLOCK, BLOCK_R), tl.float32)
            for begin in tl.range(0, RANK, BLOCK_K):
                left = k < RANK - begin
                x = tl.load(source + begin, mask=real[:, None] & left[None, :], other=0.0)
                narrow = down + ranks[None, :] * RANK + (begin + k)[:, None]
                narrow = tl.load(narrow, mask=inside[None, :] & left[:, None], other=0.0)
                shrunk = tl.dot(x, narrow, shrunk, input_precision="ieee")
            wide = up + ranks[:, None] * (HEADS * (NOPE + VALUES)) + output[None, :]
            wide = tl.load(wide, mask=inside[:, None] & (n < VALUES)[None, :], other=0.0)
            value = tl.dot(shrunk.to(kind), wide, value, input_precision="ieee")
        if gain != 0:
            length = tl.load(gain.to(tl.pointer_type(kind)) + output, mask=n < VALUES, other=0.0)
            value = value * length.to(tl.float32)[None, :]
        tl.store(target, value.to(kind), mask=mask)


def add_to_near(near: Tensor, query: Tensor, matrix: Tensor, nope: int, rows: AdapterTiles, table: AdapterTable) -> None:
    """Apply adapters to projected queries near [K, heads, rank + rotary], in place.

    query: [K, heads, nope + rotary]
    matrix: [heads, nope + values, rank]
    """
    (count, heads, wide), rank, large = query.shape, matrix.shape[2], near.dtype.itemsize > 2
    block_n = _block(rank) // (2 if large and rank >= MOST else 1)
    _near[(len(rows.tiles), heads, cdiv(rank, block_n))](
        query, matrix, rows.order, rows.tiles, table.entries, near, query.stride(0), matrix.stride(0), table.stride,
        HEADS=heads, NOPE=nope, NOPE_BLOCK=max(LEAST, power_of_two(nope)), VALUES=matrix.shape[1] - nope, TURNING=wide - nope,
        RANK=rank, BLOCK=program_for(count).tokens, BLOCK_R=ranks_at_once(table), BLOCK_N=block_n, num_warps=4,
        num_stages=1 if large else 3, **overlapping(),
    )  # fmt: skip


def add_to_values(out: Tensor, found: Tensor, nope: int, rows: AdapterTiles, table: AdapterTable) -> None:
    """Apply adapters to out [K, heads, values], in place; found [K, heads, rank]."""
    (count, heads, values), rank, block_n = out.shape, found.shape[2], _block(out.shape[2])
    _value[(len(rows.tiles), heads, cdiv(values, block_n))](
        found, rows.order, rows.tiles, table.entries, out, table.stride, HEADS=heads, NOPE=nope, VALUES=values, RANK=rank,
        BLOCK=program_for(count).tokens, BLOCK_R=ranks_at_once(table), BLOCK_N=block_n, BLOCK_K=_block(rank), num_warps=4,
        **overlapping(),
    )  # fmt: skip


def _block(size: int) -> int:
    return min(MOST, max(LEAST, power_of_two(size)))
