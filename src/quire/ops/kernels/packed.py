"""GEMM with a 4- or 8-bit weight matrix (`bit_packing.py`): read once as stored, unpacked in registers, multiplied by tensor
cores. The same for experts, whose rows are sorted (`experts.py`).

A program multiplies BLOCK_N rows of the matrix by ROWS rows, in a share of the columns. Of a gated matrix half of its rows are
gates, and the others what they gate.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.arguments import ClampedSwiglu
from quire.ops.kernels.activation import constants_of
from quire.ops.kernels.bit_packing import (
    Packed,
    factor_of,
    no_offset,
    offset_by,
    place_of,
    scale_in,
    scale_of,
    unpack,
    zero_in,
    zero_of,
)
from quire.ops.kernels.launcher import ask_for, cdiv, launched, let_next_start, overlapping, power_of_two, wait_for_previous
from quire.ops.kernels.tiles import add_shares, find_tile, put_outputs, turns_of

AHEAD = 2  # blocks


@triton.jit
def behind(a, b):
    """[N, K] and [N, K] -> [N, 2 K], in the registers they are in."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (a.shape[0], 2 * a.shape[1]))


@triton.constexpr_function
def _times(kind):
    """Numbers $1 times $2 + $3, rounded once, but for what the smaller product is."""
    name = "bf16" if kind == tl.bfloat16 else "f16"
    return f"{{ .reg .b32 t; mul.rn.{name}x2 t, $1, $3; fma.rn.{name}x2 $0, $1, $2, t; }}"


@triton.jit
def scaled(value, scale, EXACT: tl.constexpr, ASM: tl.constexpr):
    """value [N, K] times scale [N] float32, of value's type. EXACT: scales have no more bits than that type."""
    kind: tl.constexpr = value.dtype
    if not ASM:
        value = (value.to(tl.float32) * scale[:, None]).to(kind)
    elif EXACT:
        value = value * scale.to(kind)[:, None]
    else:
        near = scale.to(kind)
        rest = (scale - near.to(tl.float32)).to(kind)
        all_three = [value, tl.broadcast_to(near[:, None], value.shape), tl.broadcast_to(rest[:, None], value.shape)]
        value = tl.inline_asm_elementwise(_times(kind), "=r,r,r,r", all_three, value.dtype, True, 2)
    return value


@triton.jit
def _at_place(
    word, four, scale, offset, scales, zeros, at, row, PLACE: tl.constexpr,
    APART: tl.constexpr, GROUP: tl.constexpr, SCALES, OFFSET: tl.constexpr,
    FORM: tl.constexpr, SCALED: tl.constexpr, FOLD: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The numbers at a place of words [N, K] of block `at`; times their scales, where it has several or they are to FOLD."""
    BLOCK: tl.constexpr = APART * (4 if FORM == "int4" or FORM == "float4" else 2)
    ONE: tl.constexpr = GROUP % BLOCK == 0
    FOURS: tl.constexpr = SCALED == "e8m0" or SCALED == "e4m3"
    EXACT: tl.constexpr = FOURS or SCALED == ("bf16" if tl.bfloat16 == KIND else "fp16")  # noqa: SIM300
    group = (at * BLOCK + PLACE * APART) // GROUP if GROUP else 0
    if OFFSET and not ONE:
        offset = offset_by(zero_of(scales, zeros, group, row, True, SCALES, SCALED), FORM, OFFSET, KIND, ASM)
    value = unpack(word, offset, PLACE, FORM, OFFSET, KIND, ASM)
    if not ONE:
        if FOURS:  # noqa: SIM108
            scale = scale_in(four >> (8 * PLACE), SCALED)
        else:
            scale = scale_of(scales, group, row, True, SCALES, SCALED)
        value = scaled(value, scale, EXACT, ASM)
    elif FOLD and GROUP:
        value = scaled(value, scale, EXACT, ASM)
    return value


@triton.jit
def _halves(
    word, four, scale, offset, scales, zeros, at, row, PLACE: tl.constexpr,
    APART: tl.constexpr, GROUP: tl.constexpr, SCALES, OFFSET: tl.constexpr,
    FORM: tl.constexpr, SCALED: tl.constexpr, FOLD: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The numbers at a place, and at the next one."""
    a = _at_place(
        word, four, scale, offset, scales, zeros, at, row, PLACE,
        APART, GROUP, SCALES, OFFSET, FORM, SCALED, FOLD, KIND, ASM,
    )  # fmt: skip
    b = _at_place(
        word, four, scale, offset, scales, zeros, at, row, PLACE + 1,
        APART, GROUP, SCALES, OFFSET, FORM, SCALED, FOLD, KIND, ASM,
    )  # fmt: skip
    return behind(a, b)


@triton.jit
def _add(
    acc, rows, there, inner, matrix, scales, zeros, n, row, begin, end,
    WORDS, APART: tl.constexpr, GROUP: tl.constexpr, SCALES,
    OFFSET: tl.constexpr, FORM: tl.constexpr, TILE: tl.constexpr, SCALED: tl.constexpr,
    FOLD: tl.constexpr, PADDED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """acc [N, R] and the products of blocks begin ... end of matrix rows n, whose scales have rows `row`, with rows [R, 1],
    pointers. One product a block: its numbers are unpacked while matrix units are busy with those before."""
    kind: tl.constexpr = rows.dtype.element_ty
    FOUR_BITS: tl.constexpr = FORM == "int4" or FORM == "float4"
    BLOCK: tl.constexpr = APART * (4 if FOUR_BITS else 2)
    ONE: tl.constexpr = GROUP % BLOCK == 0  # scale for a block
    k = tl.arange(0, BLOCK)
    words = matrix + place_of(n[:, None], tl.arange(0, APART)[None, :], WORDS, APART, TILE)
    columns = rows + k[None, :]
    four, scale, offset = row, tl.zeros(row.shape, tl.float32), no_offset(row, FORM, kind, ASM)
    if OFFSET and not GROUP:
        offset = offset_by(zero_of(scales, zeros, 0, row, True, SCALES, SCALED), FORM, OFFSET, kind, ASM)
    for at in tl.range(begin, end):
        word = tl.load(words + at * (TILE * APART))
        real = there & (k < inner - at * BLOCK)[None, :] if PADDED else there
        part = tl.load(columns + at * BLOCK, mask=real, other=0.0)
        if SCALED == "e8m0" or SCALED == "e4m3":
            four = tl.load(scales + at * SCALES + row)
        elif ONE and GROUP:
            place = at * BLOCK // GROUP * SCALES + row
            pair = tl.load(scales + place)
            scale = pair.to(tl.float32) if SCALED == "" else scale_in(pair, SCALED)
            if OFFSET:
                zero = tl.load(zeros + place).to(tl.float32) if SCALED == "" else zero_in(pair)
                offset = offset_by(zero, FORM, OFFSET, kind, ASM)
        value = _halves(
            word, four, scale, offset, scales, zeros, at, row, 0,
            APART, GROUP, SCALES, OFFSET, FORM, SCALED, FOLD, kind, ASM,
        )  # fmt: skip
        if FOUR_BITS:
            upper = _halves(
                word, four, scale, offset, scales, zeros, at, row, 2,
                APART, GROUP, SCALES, OFFSET, FORM, SCALED, FOLD, kind, ASM,
            )  # fmt: skip
            value = behind(value, upper)
        if ONE and GROUP and not FOLD:
            acc += tl.dot(value, tl.trans(part), input_precision="ieee") * scale[:, None]
        elif not FOLD:  # times 1, for if sums ran on in matrix units, each block would wait for the one before
            acc += tl.dot(value, tl.trans(part), input_precision="ieee") * tl.where(n >= 0, 1.0, 0.0)[:, None]
        else:
            acc = tl.dot(value, tl.trans(part), acc, input_precision="ieee")
    return acc


@launched
@triton.jit(do_not_specialize=["rows"])
def _packed(
    x,  # [rows, inner]
    matrix,  # [outputs, WORDS] int16; gated: [2 * outputs, WORDS]; with experts one of each
    scales,  # [LINES, SCALES]
    zeros,  # as scales
    bias,  # as many as the matrix has rows
    out,  # [rows, outputs]; experts: [slots, outputs]
    order,  # experts: [slots] slots sorted by expert
    ends,  # experts: [EXPERTS]
    sums,  # float32: of each share of each program's tile
    turns,  # [tiles] zeros: how many shares are there
    rows,
    outputs,
    inner,
    WORDS,  # of a row of the matrix
    SCALES,  # of a line of them
    LINES,
    APART: tl.constexpr,  # columns that lie in one word
    GROUP: tl.constexpr,  # columns of a scale; 0: all
    HIGH: tl.constexpr,  # rows of a scale
    OFFSET: tl.constexpr,
    FORM: tl.constexpr,
    PADDED: tl.constexpr,  # there are more columns than x has
    ASM: tl.constexpr,
    TILE: tl.constexpr,  # rows of the matrix that lie together
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    KIND: tl.constexpr,  # an activation: the matrix is gated. "": it is plain
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    EXPERTS: tl.constexpr,  # 0: there are none
    EXPERT_BLOCK: tl.constexpr,
    SHARING: tl.constexpr,  # slots that read the same row of x
    FOLD: tl.constexpr,  # a block's scale goes into its numbers, rounded, and sums run on in matrix units
    SHARES: tl.constexpr,
    AHEAD: tl.constexpr,  # blocks that are asked for before x is there
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    GATED: tl.constexpr = KIND != ""
    OUTPUTS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    tile = tl.program_id(0)
    if EXPERTS:
        wait_for_previous(EARLY)
        blocks = tl.cdiv(outputs, OUTPUTS)
        expert, first, stop = find_tile(ends, tile // blocks, EXPERTS, EXPERT_BLOCK, ROWS)
        if expert >= EXPERTS:
            return
        at = first + tl.arange(0, ROWS)
        there = at < stop
        target = tl.load(order + at, mask=there, other=0)
        source = target // SHARING
        begins = tile % blocks * OUTPUTS
        high = outputs * 2 if GATED else outputs
        matrix += expert.to(tl.int64) * high * WORDS
        scales += expert.to(tl.int64) * (LINES * SCALES)
        zeros += expert.to(tl.int64) * (LINES * SCALES)
        bias += expert.to(tl.int64) * high
    else:
        row_tiles = tl.cdiv(rows, ROWS)
        target = (tile % row_tiles * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        there = target < rows
        source = target
        begins = tile // row_tiles * OUTPUTS
    at = tl.arange(0, BLOCK_N)
    read = tl.minimum(begins + at % OUTPUTS, outputs - 1) + at // OUTPUTS * outputs
    each = (WORDS // APART + SHARES - 1) // SHARES
    begin = tl.program_id(1) * each
    end = tl.minimum(begin + each, WORDS // APART)
    if EARLY and not EXPERTS:
        ask_for(matrix + place_of(read, 0, WORDS, APART, TILE)[:, None], begin, end, TILE * APART, AHEAD)
        wait_for_previous(EARLY)
    acc = _add(
        tl.zeros((BLOCK_N, ROWS), tl.float32), x + source[:, None] * inner, there[:, None], inner, matrix, scales, zeros, read,
        read // HIGH, begin, end, WORDS, APART, GROUP, SCALES, OFFSET, FORM, TILE, SCALED, FOLD, PADDED, ASM,
    )  # fmt: skip
    if SHARES > 1:
        acc, last = add_shares(acc, sums, turns, tile, SHARES)
        if not last:
            return
    if not GROUP:
        acc *= scale_of(scales, 0, read // HIGH, True, SCALES, SCALED)[:, None]
    elif SCALED == "e4m3":
        acc *= factor_of(scales, read // HIGH, True, LINES, SCALES)[:, None]
    put_outputs(acc, bias, out, read, begins, target, there, outputs, BIAS, KIND, ALPHA, LIMIT)


class Way(NamedTuple):
    """How the work is divided: rows, and rows of the matrix, of a program, and shares of the columns."""

    rows: int
    high: int
    shares: int
    warps: int
    stages: int
    fold: bool = False


class Slots(NamedTuple):
    """Whose rows are whose: slots sorted by expert (`experts.sort_slots`), and how many of them read the same row of x."""

    order: Tensor
    ends: Tensor
    sharing: int


def product(
    x: Tensor, matrix: Packed, bias: Tensor | None, activation: str | ClampedSwiglu, way: Way, slots: Slots | None = None
) -> Tensor:
    """x [rows, inputs] -> [rows, outputs], or of each slot [slots, outputs]; with an activation: of gate rows above up rows
    [rows, outputs / 2]."""
    x = x.contiguous()
    rows, inputs = x.shape
    words = matrix.words
    outputs = matrix.outputs // 2 if activation else matrix.outputs
    blocks = cdiv(outputs, way.high // 2 if activation else way.high)
    experts = 0 if slots is None else len(words)
    if slots is None:
        out, tiles = x.new_empty(rows, outputs), cdiv(rows, way.rows) * blocks
    else:
        count = len(slots.order)
        out, tiles = x.new_empty(count, outputs), min(count, count // way.rows + experts) * blocks
    size = tiles * way.shares * way.rows * way.high if way.shares > 1 else 1
    each = cdiv(words.shape[-1] // matrix.apart, way.shares)
    order, ends, sharing = slots or (words, words, 1)
    _packed[(tiles, way.shares)](
        x, *matrix.tensors, words if bias is None else bias, out, order, ends, x.new_empty(size, dtype=torch.float32),
        turns_of(x.device), rows, outputs, inputs, *matrix.sizes.values(), **matrix.constants(x),
        BIAS=bias is not None, **constants_of(activation),
        EXPERTS=experts, EXPERT_BLOCK=power_of_two(experts), SHARING=sharing, FOLD=way.fold, SHARES=way.shares,
        AHEAD=power_of_two(min(each, AHEAD)), ROWS=way.rows, BLOCK_N=way.high,
        num_warps=way.warps, num_stages=way.stages, **overlapping(),
    )  # fmt: skip
    return out
