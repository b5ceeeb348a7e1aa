"""GEMM with a 4- or 8-bit weight matrix (`bit_packing.py`): read once as stored, unpacked in registers, multiplied by tensor
cores. The same for experts, whose rows are sorted (`experts.py`).

A program multiplies BLOCK_N rows of the matrix by ROWS rows of x, in a share of the columns. Half of the rows of a gated matrix
are gates, the others what they gate.
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
from quire.ops.kernels.launcher import cdiv, launched, let_next_start, overlapping, power_of_two, prefetch, wait_for_previous
from quire.ops.kernels.tiles import add_shares, find_tile, put_outputs, turns_of

AHEAD = 2  # blocks


@triton.jit
def concatenate(a, b):
    """Return [N, 2 K] of [N, K] and [N, K], without moving values between registers."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (a.shape[0], 2 * a.shape[1]))


@triton.constexpr_function
def _times(kind):
    """Return assembly for $1 * $2 + $1 * $3, where $3 is the small rest of a scale."""
    name = "bf16" if kind == tl.bfloat16 else "f16"
    return f"{{ .reg .b32 t; mul.rn.{name}x2 t, $1, $3; fma.rn.{name}x2 $0, $1, $2, t; }}"


@triton.jit
def scaled(value, scale, EXACT: tl.constexpr, ASM: tl.constexpr):
    """Return value [N, K] times scale [N] float32, in value's dtype. EXACT: the dtype represents scales exactly."""
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
    VALUE_STRIDE: tl.constexpr, GROUP: tl.constexpr, SCALES, OFFSET: tl.constexpr,
    FORM: tl.constexpr, SCALED: tl.constexpr, FOLD: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Return the values at a place of words [N, K] of block `at`; multiplied by their scales if a block has several, or with
    FOLD."""
    BLOCK: tl.constexpr = VALUE_STRIDE * (4 if FORM == "int4" or FORM == "float4" else 2)
    ONE: tl.constexpr = GROUP % BLOCK == 0
    FOURS: tl.constexpr = SCALED == "e8m0" or SCALED == "e4m3"
    EXACT: tl.constexpr = FOURS or SCALED == ("bf16" if tl.bfloat16 == KIND else "fp16")  # noqa: SIM300
    group = (at * BLOCK + PLACE * VALUE_STRIDE) // GROUP if GROUP else 0
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
    VALUE_STRIDE: tl.constexpr, GROUP: tl.constexpr, SCALES, OFFSET: tl.constexpr,
    FORM: tl.constexpr, SCALED: tl.constexpr, FOLD: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Return the values at a place and at the next one."""
    a = _at_place(
        word, four, scale, offset, scales, zeros, at, row, PLACE,
        VALUE_STRIDE, GROUP, SCALES, OFFSET, FORM, SCALED, FOLD, KIND, ASM,
    )  # fmt: skip
    b = _at_place(
        word, four, scale, offset, scales, zeros, at, row, PLACE + 1,
        VALUE_STRIDE, GROUP, SCALES, OFFSET, FORM, SCALED, FOLD, KIND, ASM,
    )  # fmt: skip
    return concatenate(a, b)


@triton.jit
def _add(
    acc, rows, exists, inner, matrix, scales, zeros, n, row, begin, end,
    WORDS, VALUE_STRIDE: tl.constexpr, GROUP: tl.constexpr, SCALES,
    OFFSET: tl.constexpr, FORM: tl.constexpr, TILE: tl.constexpr, SCALED: tl.constexpr,
    FOLD: tl.constexpr, PADDED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Return acc [N, R] plus the products of blocks begin ... end of matrix rows n, whose scales have rows `row`, with rows [R,
    1], pointers. One tl.dot per block: its values are unpacked while tensor cores run the previous one.
    """
    kind: tl.constexpr = rows.dtype.element_ty
    FOUR_BITS: tl.constexpr = FORM == "int4" or FORM == "float4"
    BLOCK: tl.constexpr = VALUE_STRIDE * (4 if FOUR_BITS else 2)
    ONE: tl.constexpr = GROUP % BLOCK == 0  # one scale per block
    k = tl.arange(0, BLOCK)
    words = matrix + place_of(n[:, None], tl.arange(0, VALUE_STRIDE)[None, :], WORDS, VALUE_STRIDE, TILE)
    columns = rows + k[None, :]
    four, scale, offset = row, tl.zeros(row.shape, tl.float32), no_offset(row, FORM, kind, ASM)
    if OFFSET and not GROUP:
        offset = offset_by(zero_of(scales, zeros, 0, row, True, SCALES, SCALED), FORM, OFFSET, kind, ASM)
    for at in tl.range(begin, end):
        word = tl.load(words + at * (TILE * VALUE_STRIDE))
        real = exists & (k < inner - at * BLOCK)[None, :] if PADDED else exists
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
            VALUE_STRIDE, GROUP, SCALES, OFFSET, FORM, SCALED, FOLD, kind, ASM,
        )  # fmt: skip
        if FOUR_BITS:
            upper = _halves(
                word, four, scale, offset, scales, zeros, at, row, 2,
                VALUE_STRIDE, GROUP, SCALES, OFFSET, FORM, SCALED, FOLD, kind, ASM,
            )  # fmt: skip
            value = concatenate(value, upper)
        if ONE and GROUP and not FOLD:
            acc += tl.dot(value, tl.trans(part), input_precision="ieee") * scale[:, None]
        elif not FOLD:  # times 1: if sums ran on in tensor cores, each block would wait for the one before
            acc += tl.dot(value, tl.trans(part), input_precision="ieee") * tl.where(n >= 0, 1.0, 0.0)[:, None]
        else:
            acc = tl.dot(value, tl.trans(part), acc, input_precision="ieee")
    return acc


@launched
@triton.jit(do_not_specialize=["rows"])
def _packed(
    x,  # [rows, inner]
    matrix,  # [outputs, WORDS] int16; gated: [2 * outputs, WORDS]; one per expert
    scales,  # [LINES, SCALES]
    zeros,  # like scales
    bias,  # one value per row of the matrix
    out,  # [rows, outputs]; experts: [slots, outputs]
    order,  # experts: [slots] slots sorted by expert
    ends,  # experts: [EXPERTS]
    sums,  # float32 partial sums of each program's tile
    turns,  # [tiles] zeros: counters of finished shares
    rows,
    outputs,
    inner,
    WORDS,  # per row of the matrix
    SCALES,  # per line of scales
    LINES,
    VALUE_STRIDE: tl.constexpr,  # columns between two values of a word
    GROUP: tl.constexpr,  # columns per scale; 0: all
    HIGH: tl.constexpr,  # rows per scale
    OFFSET: tl.constexpr,
    FORM: tl.constexpr,
    PADDED: tl.constexpr,  # whether there are more columns than in x
    ASM: tl.constexpr,
    TILE: tl.constexpr,  # rows of the matrix whose blocks are contiguous
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    KIND: tl.constexpr,  # activation of a gated matrix; "": not gated
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    EXPERTS: tl.constexpr,  # 0: no experts
    EXPERT_BLOCK: tl.constexpr,
    SHARING: tl.constexpr,  # slots that read the same row of x
    FOLD: tl.constexpr,  # whether a block's scale is multiplied into its values, rounded, and sums run on in tensor cores
    SHARES: tl.constexpr,
    AHEAD: tl.constexpr,  # blocks that are prefetched before x is ready
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
        exists = at < stop
        target = tl.load(order + at, mask=exists, other=0)
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
        exists = target < rows
        source = target
        begins = tile // row_tiles * OUTPUTS
    at = tl.arange(0, BLOCK_N)
    read = tl.minimum(begins + at % OUTPUTS, outputs - 1) + at // OUTPUTS * outputs
    each = (WORDS // VALUE_STRIDE + SHARES - 1) // SHARES
    begin = tl.program_id(1) * each
    end = tl.minimum(begin + each, WORDS // VALUE_STRIDE)
    if EARLY and not EXPERTS:
        prefetch(matrix + place_of(read, 0, WORDS, VALUE_STRIDE, TILE)[:, None], begin, end, TILE * VALUE_STRIDE, AHEAD)
        wait_for_previous(EARLY)
    acc = _add(
        tl.zeros((BLOCK_N, ROWS), tl.float32), x + source[:, None] * inner, exists[:, None], inner, matrix, scales, zeros, read,
        read // HIGH, begin, end, WORDS, VALUE_STRIDE, GROUP, SCALES, OFFSET, FORM, TILE, SCALED, FOLD, PADDED, ASM,
    )  # fmt: skip
    if SHARES > 1:
        acc, last = add_shares(acc, sums, turns, tile, SHARES)
        if not last:
            return
    if not GROUP:
        acc *= scale_of(scales, 0, read // HIGH, True, SCALES, SCALED)[:, None]
    elif SCALED == "e4m3":
        acc *= factor_of(scales, read // HIGH, True, LINES, SCALES)[:, None]
    put_outputs(acc, bias, out, read, begins, target, exists, outputs, BIAS, KIND, ALPHA, LIMIT)


class PackedConfig(NamedTuple):
    """Launch configuration: rows of x and of the matrix per program, and shares of the columns."""

    rows: int
    high: int
    shares: int
    warps: int
    stages: int
    fold: bool = False


class Slots(NamedTuple):
    """Slots sorted by expert (`experts.sort_slots`), and how many of them read the same row of x."""

    order: Tensor
    ends: Tensor
    sharing: int


def product(
    x: Tensor,
    matrix: Packed,
    bias: Tensor | None,
    activation: str | ClampedSwiglu,
    config: PackedConfig,
    slots: Slots | None = None,
) -> Tensor:
    """Return x [rows, inputs] times the matrix [rows, outputs], or [slots, outputs] for slots; with an activation the matrix
    has gate rows, then up rows -> [rows, outputs / 2].
    """
    x = x.contiguous()
    rows, inputs = x.shape
    words = matrix.words
    outputs = matrix.outputs // 2 if activation else matrix.outputs
    blocks = cdiv(outputs, config.high // 2 if activation else config.high)
    experts = 0 if slots is None else len(words)
    if slots is None:
        out, tiles = x.new_empty(rows, outputs), cdiv(rows, config.rows) * blocks
    else:
        count = len(slots.order)
        out, tiles = x.new_empty(count, outputs), min(count, count // config.rows + experts) * blocks
    size = tiles * config.shares * config.rows * config.high if config.shares > 1 else 1
    each = cdiv(words.shape[-1] // matrix.value_stride, config.shares)
    order, ends, sharing = slots or (words, words, 1)
    _packed[(tiles, config.shares)](
        x, *matrix.tensors, words if bias is None else bias, out, order, ends, x.new_empty(size, dtype=torch.float32),
        turns_of(x.device), rows, outputs, inputs, *matrix.sizes.values(), **matrix.constants(x),
        BIAS=bias is not None, **constants_of(activation),
        EXPERTS=experts, EXPERT_BLOCK=power_of_two(experts), SHARING=sharing, FOLD=config.fold, SHARES=config.shares,
        AHEAD=power_of_two(min(each, AHEAD)), ROWS=config.rows, BLOCK_N=config.high,
        num_warps=config.warps, num_stages=config.stages, **overlapping(),
    )  # fmt: skip
    return out
