"""Addition of LoRA adapters to a linear layer, for tokens of any mixture of adapters and any ranks: two launches per layer.

    sort     once per step: sort tokens by adapter and cut them into tiles of one adapter each
    shrink   multiply a tile's tokens by its adapter's A, a part of the inputs per program: partial sums, float32
    expand   add the partial sums in order, multiply by B, add to the layer's output

Addresses and ranks of adapters are read from a table on the device, so a recorded launch serves any adapters at replay.
Launches are as large as any mixture needs; a program without work ends at once. Tiles and tables are read before the previous
kernel has ended: `sort` does not let the next kernel start early, and tables are written between steps only.

A single token is faster if the launch that reads the layer's matrix also reads A.

    tiles   [ of group 0 ............ | of group 1 ...... | ... ]   group g has those from (tokens before it) // BLOCK + g on
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.arguments import ADAPTER_BLOCK, MOVED_COLUMNS, MOVED_ROWS, SCANNED_VALUES, AdapterTable, AdapterTiles, Moves
from quire.ops.kernels.activation import KINDS, gate_by
from quire.ops.kernels.launcher import cdiv, launched, let_next_start, overlapping, power_of_two, wait_for_previous
from quire.ops.kernels.linear import stream, stream_from
from quire.ops.order import order_is_fixed

LANES = 512  # tokens of a row written at once
BLOCK_K, LONG_BLOCK_K = 128, 256  # inputs read at once; more where registers allow
LONG_INPUTS, WIDE_OUTPUTS = 8192, 16384  # from which on there are twice as many parts, and `parts_of_wide`
MIN_BLOCK_ROWS = 64  # per program
MIN_BLOCK_RANKS, MAX_BLOCK_RANKS = 16, 64  # per program; tl.dot requires at least 16


class Program(NamedTuple):
    """Launch configuration, measured on an H200 for the layers of an 8B model and rank 16."""

    tokens: int  # per tile
    parts: int  # that the inputs are divided into
    parts_of_wide: int  # the same for layers with many outputs

    def splits(self, inputs: int, outputs: int, block: int) -> int:
        parts = (self.parts_of_wide if outputs >= WIDE_OUTPUTS else self.parts) * (2 if inputs >= LONG_INPUTS else 1)
        return min(parts, cdiv(inputs, block))


# for up to 16, 64 and 512 tokens, and for more
UP_TO_16, UP_TO_64, UP_TO_512, ABOVE_512 = Program(16, 16, 16), Program(16, 4, 4), Program(16, 4, 2), Program(64, 2, 2)
ORDERED_UP_TO_512 = UP_TO_64
ORDERED_ABOVE_512 = ORDERED_UP_TO_512._replace(tokens=64)  # with the same parts


def program_for(tokens: int) -> Program:
    """Return the launch configuration: few tiles are divided along the inputs; many tokens use tiles that read a matrix less
    often. In the fixed order (`order.py`) the number of parts does not depend on the tokens."""
    if order_is_fixed():
        return ORDERED_UP_TO_512 if tokens <= 512 else ORDERED_ABOVE_512
    return UP_TO_16 if tokens <= 16 else UP_TO_64 if tokens <= 64 else UP_TO_512 if tokens <= 512 else ABOVE_512


@launched
@triton.jit(do_not_specialize=["rows", "most"])
def _sort(
    groups,  # [R] int32 of each row, ascending from 0
    starts,  # [R + 1] int32 row starts among the tokens
    places,  # [R] int32 of each group
    order,  # [T] int32
    tiles,  # [N, 3] int32 place, first in order, count
    rows,
    most,  # groups
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Write the tokens of one row, and the tiles of the group with the row's index."""
    me = tl.program_id(0)
    r = tl.arange(0, ROWS)
    group = tl.load(groups + r, mask=r < rows, other=-1)
    counts = tl.load(starts + r + 1, mask=r < rows, other=0) - tl.load(starts + r, mask=r < rows, other=0)
    own = tl.load(groups + me)
    first = tl.load(starts + me)
    count = tl.load(starts + me + 1) - first
    earlier = (group < own) | ((group == own) & (r < me))
    at = tl.sum(tl.where(earlier & (r < rows), counts, 0), 0)
    for begin in tl.range(0, count, LANES):
        lane = begin + tl.arange(0, LANES)
        tl.store(order + at + lane, first + lane, mask=lane < count)
    if me < most:
        place = tl.load(places + me)
        before = tl.sum(tl.where((group < me) & (r < rows), counts, 0), 0)
        size = tl.sum(tl.where(group == me, counts, 0), 0)
        tile = before // BLOCK + me
        end = (before + size) // BLOCK + me + 1
        for begin in tl.range(tile, end, LANES):
            lane = begin + tl.arange(0, LANES)
            done = (lane - tile) * BLOCK
            left = tl.minimum(tl.maximum(size - done, 0), BLOCK)
            tl.store(tiles + lane * 3, place, mask=lane < end)
            tl.store(tiles + lane * 3 + 1, before + done, mask=lane < end)
            tl.store(tiles + lane * 3 + 2, left, mask=lane < end)


@launched
@triton.jit(do_not_specialize=["tokens"])
def _shrink(
    x,  # [T, inputs]
    order,  # [T] int32
    tiles,  # [N, 3] int32
    table,  # AdapterTable.entries
    out,  # [SPLITS, T, PARTS * RANKS] float32, in sorted order
    tokens,
    inputs,
    stride,  # between adapter slots in the table
    PARTS: tl.constexpr,
    RANKS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ALIGNED: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    tile, split = tl.program_id(0), tl.program_id(1)
    blocks: tl.constexpr = (RANKS + BLOCK_R - 1) // BLOCK_R
    part, first_rank = tl.program_id(2) // blocks, tl.program_id(2) % blocks * BLOCK_R
    entry = table + tl.load(tiles + tile * 3) * stride + part * 5
    first, count = tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
    rank = tl.load(entry + 2).to(tl.int32)
    if (count > 0) & (first_rank < rank):
        kind: tl.constexpr = x.dtype.element_ty
        down = tl.load(entry).to(tl.pointer_type(kind))  # [rank, inputs]
        lane, k = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
        ranks = first_rank + tl.arange(0, BLOCK_R)
        token = tl.load(order + first + lane, mask=lane < count, other=0).to(tl.int64)
        span = tl.cdiv(tl.cdiv(inputs, SPLITS), BLOCK_K) * BLOCK_K
        begin = split * span
        end = tl.minimum(begin + span, inputs)
        rows = down + ranks[None, :] * inputs + (begin + k)[:, None]
        if ALIGNED:
            rows = tl.multiple_of(rows, [16, 16])
        narrow = tl.load(rows, mask=(ranks < rank)[None, :] & (begin + k < end)[:, None], other=0.0)
        wait_for_previous(EARLY)
        acc = tl.zeros((BLOCK, BLOCK_R), tl.float32)
        for at in tl.range(begin, end, BLOCK_K):
            rows = down + ranks[None, :] * inputs + (at + BLOCK_K + k)[:, None]
            if ALIGNED:
                rows = tl.multiple_of(rows, [16, 16])
            coming = tl.load(rows, mask=(ranks < rank)[None, :] & (at + BLOCK_K + k < end)[:, None], other=0.0)
            some = x + token[:, None] * inputs + (at + k)[None, :]
            some = tl.load(some, mask=(lane < count)[:, None] & (at + k < end)[None, :], other=0.0)
            acc = tl.dot(some, narrow, acc, input_precision="ieee")
            narrow = coming
        to = out + ((split * tokens + first + lane) * (PARTS * RANKS) + part * RANKS)[:, None] + ranks[None, :]
        tl.store(to, acc, mask=(lane < count)[:, None] & (ranks < rank)[None, :])
    else:
        wait_for_previous(EARLY)


@triton.jit
def _wide(up, at, rank, column, inside, width, BLOCK_R: tl.constexpr, ALIGNED: tl.constexpr):
    """Return a block of B, [BLOCK_R, BLOCK_N]."""
    ranks = at + tl.arange(0, BLOCK_R)
    rows = up + ranks[:, None] * width + column[None, :]
    if ALIGNED:
        rows = tl.multiple_of(rows, [16, 16])
    return tl.load(rows, mask=(ranks < rank)[:, None] & inside[None, :], other=0.0)


@triton.jit
def _added(
    sums,  # [SPLITS, T, PARTS * RANKS] float32
    entry,
    part,
    column,  # [BLOCK_N] within the part
    inside,
    width,  # of the part
    lanes,  # [BLOCK] indices of the tile's tokens in the order
    real,
    tokens,
    PARTS: tl.constexpr,
    RANKS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALIGNED: tl.constexpr,
    KIND: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Return the addition [BLOCK, BLOCK_N] float32. Waits for the previous kernel before the first load of sums."""
    acc = tl.zeros((BLOCK, BLOCK_N), tl.float32)
    rank = tl.load(entry + 2).to(tl.int32)
    up = tl.load(entry + 1).to(tl.pointer_type(KIND))  # [rank, width]
    wide = _wide(up, 0, rank, column, inside, width, BLOCK_R, ALIGNED)
    wait_for_previous(EARLY)
    for at in tl.range(0, rank, BLOCK_R):
        ranks = at + tl.arange(0, BLOCK_R)
        some = real[:, None] & (ranks < rank)[None, :]
        shrunk = tl.zeros((BLOCK, BLOCK_R), tl.float32)
        for split in tl.static_range(SPLITS):
            lie = sums + ((split * tokens + lanes) * (PARTS * RANKS) + part * RANKS)[:, None] + ranks[None, :]
            shrunk += tl.load(lie, mask=some, other=0.0)
        acc = tl.dot(shrunk.to(KIND), wide, acc, input_precision="ieee")
        wide = _wide(up, at + BLOCK_R, rank, column, inside, width, BLOCK_R, ALIGNED)
    return acc


@triton.jit
def _changed(base, added, entry, own, output, column, inside, OWN: tl.constexpr, KIND: tl.constexpr):
    """Return gain * (base without the layer's bias + added) + own + bias, as far as the adapter has them."""
    value = base + added
    gain, bias = tl.load(entry + 3), tl.load(entry + 4)
    if gain != 0:
        length = tl.load(gain.to(tl.pointer_type(KIND)) + column, mask=inside, other=1.0).to(tl.float32)
        if OWN:
            mine = tl.load(own + output, mask=inside, other=0.0).to(tl.float32)
            value = (value - mine[None, :]) * length[None, :] + mine[None, :]
        else:
            value = value * length[None, :]
    if bias != 0:
        value += tl.load(bias.to(tl.pointer_type(KIND)) + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    return value


@launched
@triton.jit(do_not_specialize=["tokens"])
def _expand(
    sums,  # [SPLITS, T, PARTS * RANKS] float32
    order,  # [T] int32
    tiles,  # [N, 3] int32
    table,  # AdapterTable.entries
    blocks,  # [M, 4] int32 part; in units: first output, first of the part, width of the part
    own,  # [outputs]
    like,  # a tensor of the adapters' dtype
    out,  # [T, outputs]
    tokens,
    outputs,
    stride,  # between adapter slots in the table
    PARTS: tl.constexpr,
    RANKS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNIT: tl.constexpr,
    OWN: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    tile, block = tl.program_id(0), tl.program_id(1)
    part = tl.load(blocks + block * 4)
    entry = table + tl.load(tiles + tile * 3) * stride + part * 5
    first, count = tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
    something = (tl.load(entry + 2) > 0) | (tl.load(entry + 3) != 0) | (tl.load(entry + 4) != 0)
    if (count > 0) & something:
        kind: tl.constexpr = like.dtype.element_ty
        at, begin = tl.load(blocks + block * 4 + 1) * UNIT, tl.load(blocks + block * 4 + 2) * UNIT
        width = tl.load(blocks + block * 4 + 3) * UNIT
        lane = tl.arange(0, BLOCK)
        output = at + tl.arange(0, BLOCK_N)
        column = at - begin + tl.arange(0, BLOCK_N)
        inside = column < width
        token = tl.load(order + first + lane, mask=lane < count, other=0).to(tl.int64)
        added = _added(
            sums, entry, part, column, inside, width, first + lane, lane < count, tokens,
            PARTS, RANKS, SPLITS, BLOCK, BLOCK_R, BLOCK_N, UNIT > 1, kind, EARLY,
        )  # fmt: skip
        to = out + token[:, None] * outputs + output[None, :]
        mask = (lane < count)[:, None] & inside[None, :]
        base = tl.load(to, mask=mask, other=0.0).to(tl.float32)
        value = _changed(base, added, entry, own, output, column, inside, OWN, kind)
        tl.store(to, value.to(out.dtype.element_ty), mask=mask)
    else:
        wait_for_previous(EARLY)


@launched
@triton.jit(do_not_specialize=["tokens"])
def _expand_gated(
    sums,  # [SPLITS, T, PARTS * RANKS] float32
    order,  # [T] int32
    tiles,  # [N, 3] int32
    table,  # AdapterTable.entries
    own,  # [2 * size]
    base,  # [T, 2 * size] gate, up
    out,  # [T, size]
    tokens,
    size,
    stride,  # between adapter slots in the table
    PARTS: tl.constexpr,
    RANKS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALIGNED: tl.constexpr,
    OWN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Apply adapters and the gated activation to all tokens, also to those without an adapter."""
    let_next_start(EARLY)
    tile = tl.program_id(0)
    entry = table + tl.load(tiles + tile * 3) * stride
    up_entry = entry + (PARTS - 1) * 5
    first, count = tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
    if count > 0:
        kind: tl.constexpr = base.dtype.element_ty
        lane = tl.arange(0, BLOCK)
        gate_at = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = gate_at < size
        shift = size * (2 - PARTS)  # of ups within their part
        width = size * (3 - PARTS)
        up_at = gate_at + shift
        real = lane < count
        token = tl.load(order + first + lane, mask=real, other=0).to(tl.int64)
        gates = _added(
            sums, entry, 0, gate_at, inside, width, first + lane, real, tokens,
            PARTS, RANKS, SPLITS, BLOCK, BLOCK_R, BLOCK_N, ALIGNED, kind, EARLY,
        )  # fmt: skip
        ups = _added(
            sums, up_entry, PARTS - 1, up_at, inside, width, first + lane, real, tokens,
            PARTS, RANKS, SPLITS, BLOCK, BLOCK_R, BLOCK_N, ALIGNED, kind, False,
        )  # fmt: skip
        mask = real[:, None] & inside[None, :]
        lie = base + token[:, None] * 2 * size + gate_at[None, :]
        gate = tl.load(lie, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(lie + size, mask=mask, other=0.0).to(tl.float32)
        gate = _changed(gate, gates, entry, own, gate_at, gate_at, inside, OWN, kind)
        up = _changed(up, ups, up_entry, own, gate_at + size, up_at, inside, OWN, kind)
        value = gate_by(gate, up, ACTIVATION, 0.0, 0.0, kind)
        tl.store(out + token[:, None] * size + gate_at[None, :], value.to(kind), mask=mask)
    else:
        wait_for_previous(EARLY)


@launched
@triton.jit
def _linear_and_shrink(
    x,  # [INNER], of one token
    matrix,  # [outputs, INNER]
    bias,  # [outputs]
    tiles,  # [1, 3] int32
    table,  # AdapterTable.entries
    out,  # [outputs]
    sums,  # [PARTS * RANKS] float32
    outputs,
    stride,  # between adapter slots in the table
    INNER: tl.constexpr,
    BIAS: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ALIGNED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Multiply one token by the layer's matrix and by the adapter's A in one launch; see `linear.py`."""
    let_next_start(EARLY)
    own = tl.cdiv(outputs, BLOCK_N)
    if tl.program_id(0) < own:
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        value = stream(x, matrix, n, n < outputs, INNER, BLOCK_K, EARLY)
        if BIAS:
            value += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)
        tl.store(out + n, value.to(out.dtype.element_ty), mask=n < outputs)
    else:
        blocks: tl.constexpr = (RANKS + BLOCK_N - 1) // BLOCK_N
        part = (tl.program_id(0) - own) // blocks
        ranks = (tl.program_id(0) - own) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
        entry = table + tl.load(tiles) * stride + part * 5
        inside = ranks < tl.load(entry + 2).to(tl.int32)
        down = tl.load(entry).to(tl.pointer_type(x.dtype.element_ty))
        places = down + ranks[:, None] * INNER + tl.arange(0, BLOCK_K)[None, :]
        if ALIGNED:
            places = tl.multiple_of(places, [16, 16])
        value = stream_from(x, places, inside, INNER, BLOCK_K, EARLY)
        tl.store(sums + part * RANKS + ranks, value, mask=inside)


def sort(groups: Tensor, starts: Tensor, places: Tensor, tokens: int, most: int) -> AdapterTiles:
    rows, block = len(groups), program_for(tokens).tokens
    order = torch.empty(tokens, dtype=torch.int32, device=groups.device)
    tiles = torch.empty(tokens // block + most, 3, dtype=torch.int32, device=groups.device)
    _sort[(rows,)](
        groups,
        starts,
        places,
        order,
        tiles,
        rows,
        most,
        BLOCK=block,
        ROWS=max(power_of_two(rows), MIN_BLOCK_ROWS),
        LANES=LANES,
        num_warps=4,
    )
    return AdapterTiles(order, tiles)


def _shrunk(x: Tensor, outputs: int, rows: AdapterTiles, table: AdapterTable) -> tuple[Tensor, dict[str, int]]:
    tokens, inputs = x.shape
    program = program_for(tokens)
    block_r = ranks_at_once(table)
    long = tokens > UP_TO_16.tokens and block_r <= 32 and x.dtype.itemsize == 2 and not order_is_fixed()
    block_k = LONG_BLOCK_K if long else BLOCK_K
    splits = program.splits(inputs, outputs, block_k)
    sums = torch.empty(splits, tokens, table.parts * table.ranks, dtype=torch.float32, device=x.device)
    shape = {
        "PARTS": table.parts, "RANKS": table.ranks, "SPLITS": splits, "BLOCK": program.tokens, "BLOCK_R": block_r
    }  # fmt: skip
    _shrink[(len(rows.tiles), splits, table.parts * cdiv(table.ranks, block_r))](
        x, rows.order, rows.tiles, table.entries, sums, tokens, inputs, table.stride, **shape, BLOCK_K=block_k,
        ALIGNED=inputs % 16 == 0, num_warps=4, num_stages=3, **overlapping(),
    )  # fmt: skip
    return sums, shape


def one_row(x: Tensor, weight: Tensor, bias: Tensor | None, rows: AdapterTiles, table: AdapterTable, activation: str) -> Tensor:
    """Return the output of an unquantized layer for one token x [1, inputs], with its adapter applied."""
    x = x.contiguous()
    outputs, inner = weight.shape
    out = x.new_empty(1, outputs)
    sums = torch.empty(1, 1, table.parts * table.ranks, dtype=torch.float32, device=x.device)
    matrix_rows, warps = (2, 8) if inner >= 2048 else (4, 4)  # as in `linear.py`
    _linear_and_shrink[(cdiv(outputs, matrix_rows) + table.parts * cdiv(table.ranks, matrix_rows),)](
        x, weight, weight if bias is None else bias, rows.tiles, table.entries, out, sums, outputs, table.stride, INNER=inner,
        BIAS=bias is not None, RANKS=table.ranks, BLOCK_N=matrix_rows, BLOCK_K=256 * warps, ALIGNED=inner % 16 == 0,
        num_warps=warps, **overlapping(),
    )  # fmt: skip
    shape = {
        "PARTS": table.parts, "RANKS": table.ranks, "SPLITS": 1, "BLOCK": UP_TO_16.tokens, "BLOCK_R": ranks_at_once(table)
    }  # fmt: skip
    return _expand_sums(out, x, sums, shape, rows, table, bias, activation)


def add(out: Tensor, x: Tensor, rows: AdapterTiles, table: AdapterTable, own: Tensor | None, activation: str = "") -> Tensor:
    """Apply adapters; with an activation the first half of the outputs is a gate."""
    x, out = x.contiguous(), out.contiguous()
    sums, shape = _shrunk(x, out.shape[1], rows, table)
    return _expand_sums(out, x, sums, shape, rows, table, own, activation)


def ranks_at_once(table: AdapterTable) -> int:
    return min(max(power_of_two(table.ranks), MIN_BLOCK_RANKS), MAX_BLOCK_RANKS)


def _expand_sums(
    out: Tensor,
    x: Tensor,
    sums: Tensor,
    shape: dict[str, int],
    rows: AdapterTiles,
    table: AdapterTable,
    own: Tensor | None,
    activation: str,
) -> Tensor:
    if activation:
        return _gate_sums(out, sums, shape, rows, table, own, activation)
    _expand[(len(rows.tiles), len(table.blocks))](
        sums, rows.order, rows.tiles, table.entries, table.blocks, out if own is None else own, x, out,
        len(x), out.shape[1], table.stride, **shape, BLOCK_N=ADAPTER_BLOCK, UNIT=table.unit, OWN=own is not None, num_warps=4,
        **overlapping(),
    )  # fmt: skip
    return out


def _gate_sums(
    base: Tensor,
    sums: Tensor,
    shape: dict[str, int],
    rows: AdapterTiles,
    table: AdapterTable,
    own: Tensor | None,
    activation: str,
) -> Tensor:
    size = base.shape[1] // 2
    out = base.new_empty(len(base), size)
    _expand_gated[(len(rows.tiles), cdiv(size, ADAPTER_BLOCK))](
        sums, rows.order, rows.tiles, table.entries, base if own is None else own, base, out, len(base), size, table.stride,
        **shape,
        BLOCK_N=ADAPTER_BLOCK, ALIGNED=size % 16 == 0, OWN=own is not None, ACTIVATION=KINDS[activation], num_warps=4,
        **overlapping(),
    )  # fmt: skip
    return out


@launched
@triton.jit
def _find_largest(
    raw,
    looked,  # [n, 3] int64 span, first value, count
    out,  # [S] int32, bits of non-negative float32 values, which are ordered as the values are
    SPAN: tl.constexpr,
):
    entry = looked + tl.program_id(0) * 3
    span, first, count = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    lane = tl.arange(0, SPAN)
    numbers = tl.abs(tl.load(raw + first + lane, mask=lane < count, other=0.0).to(tl.float32))
    numbers = tl.where(numbers == numbers, numbers, float("inf"))
    tl.atomic_max(out + span, tl.max(numbers, 0).to(tl.int32, bitcast=True))


@launched
@triton.jit
def _pack(
    raw,
    flat,
    table,  # [C, 6] int64 to, rows, columns, first, down, across
    moved,  # [n, 3] int64 copy, first row, first column
    scales,  # [C] float32
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    entry = moved + tl.program_id(0) * 3
    copy = tl.load(entry)
    row = tl.load(entry + 1) + tl.arange(0, ROWS)[:, None]
    column = tl.load(entry + 2) + tl.arange(0, COLUMNS)[None, :]
    own = table + copy * 6
    to, rows, columns = tl.load(own), tl.load(own + 1), tl.load(own + 2)
    first, down, across = tl.load(own + 3), tl.load(own + 4), tl.load(own + 5)
    inside = (row < rows) & (column < columns)
    numbers = tl.load(raw + first + row * down + column * across, mask=inside, other=0.0).to(tl.float32) * tl.load(
        scales + copy
    )
    tl.store(flat + to + row * columns + column, numbers.to(flat.dtype.element_ty), mask=inside)


def find_largest(raw: Tensor, moves: Moves) -> Tensor:
    found = torch.zeros(len(moves.spans), dtype=torch.int32, device=raw.device)
    _find_largest[(len(moves.looked),)](raw, moves.looked, found, SPAN=SCANNED_VALUES, num_warps=8)
    return found.view(torch.float32)


def pack(raw: Tensor, flat: Tensor, moves: Moves, scales: Tensor) -> None:
    _pack[(len(moves.moved),)](raw, flat, moves.table, moves.moved, scales, ROWS=MOVED_ROWS, COLUMNS=MOVED_COLUMNS, num_warps=8)
