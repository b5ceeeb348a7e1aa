"""A matrix of 4- or 8-bit numbers (`words.py`) times rows: read once as it is stored, unpacked in registers, multiplied by
matrix units. The same for experts, whose rows are sorted (`moe_many.py`).

A program makes BLOCK_N outputs of ROWS rows from a share of the columns. Where shares are several, the program that ends last
adds them, in their order: the sum does not depend on who that is.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.arguments import ClampedSwiglu
from quire.ops.kernels.activation import constants_of, gate_by
from quire.ops.kernels.launcher import launched
from quire.ops.kernels.math import cdiv, power_of_two
from quire.ops.kernels.overlap import let_next_start, overlapping, wait_for_previous
from quire.ops.kernels.shares import turns_of
from quire.ops.kernels.tiles import find_tile
from quire.ops.kernels.words import Packed, column_of, offset_of, unpack


@triton.jit
def _ask_for(matrix, n, begin, end, WORDS: tl.constexpr, MOST: tl.constexpr):
    """Words begin ... end of rows n are brought near, and not waited for."""
    LINE: tl.constexpr = 64  # words that come together
    at = tl.minimum(begin + tl.arange(0, MOST) * LINE, end - 1)
    places = matrix + n.to(tl.int64)[:, None] * WORDS + at[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [places.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _block_column(at, place: tl.constexpr, WORDS: tl.constexpr, APART: tl.constexpr, BLOCK_K: tl.constexpr, FORM: tl.constexpr):
    """`column_of` a block's first word, put so that Triton sees what it is a multiple of, and copies more than one number."""
    PER: tl.constexpr = 4 if FORM == "int4" or FORM == "float4" else 2
    if APART == BLOCK_K:
        column = at * PER + place * APART
    elif APART == WORDS:
        column = at + place * APART
    else:
        column = column_of(at, place, APART, FORM)
    return column


@triton.jit
def _add(
    acc, rows, there, inner, matrix, scales, zeros, n, scale_row, begin, end,
    WORDS: tl.constexpr, APART: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, SCALES: tl.constexpr,
    OFFSET: tl.constexpr, FORM: tl.constexpr, FOLD: tl.constexpr, PADDED: tl.constexpr, BLOCK_K: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """acc [N, R] and the products of words from begin to end of matrix rows n with rows [R, 1], pointers."""
    kind: tl.constexpr = rows.dtype.element_ty
    PER: tl.constexpr = 4 if FORM == "int4" or FORM == "float4" else 2
    CLOSE: tl.constexpr = GROUPS > 1 and GROUP % (PER * APART) == 0  # one scale for all places of a block of words
    k = tl.arange(0, BLOCK_K)
    row = matrix + n.to(tl.int64)[:, None] * WORDS + k[None, :]
    columns = rows + k[None, :]
    offset = offset_of(zeros, scale_row * 0, FORM, 0, kind, ASM)
    if CLOSE:  # asked for a block ahead
        place = begin * PER // GROUP * SCALES + scale_row
        scale = tl.load(scales + place)
        if OFFSET:
            offset = offset_of(zeros, place, FORM, OFFSET, kind, ASM)
    for at in tl.range(begin, end, BLOCK_K):
        word = tl.load(row + at)
        if CLOSE:
            whole = tl.zeros(acc.shape, tl.float32)
            place = tl.minimum(at + BLOCK_K, end - BLOCK_K) * PER // GROUP * SCALES + scale_row
            next_scale = tl.load(scales + place)
            if OFFSET:
                next_offset = offset_of(zeros, place, FORM, OFFSET, kind, ASM)
        for i in tl.static_range(PER):
            column = _block_column(at, i, WORDS, APART, BLOCK_K, FORM)
            real = there & (k < inner - column)[None, :] if PADDED else there
            part = tl.load(columns + column, mask=real, other=0.0)
            if OFFSET and not CLOSE:
                offset = offset_of(zeros, column // GROUP * SCALES + scale_row, FORM, OFFSET, kind, ASM)
            value = unpack(word, offset, i, FORM, OFFSET, kind, ASM)
            if CLOSE:
                whole = tl.dot(value, tl.trans(part), whole, input_precision="ieee")
            elif GROUPS == 1:
                acc = tl.dot(value, tl.trans(part), acc, input_precision="ieee")
            else:
                scale = tl.load(scales + column // GROUP * SCALES + scale_row)
                if FOLD:
                    acc = tl.dot(value * scale.to(kind)[:, None], tl.trans(part), acc, input_precision="ieee")
                else:
                    acc += tl.dot(value, tl.trans(part), input_precision="ieee") * scale.to(tl.float32)[:, None]
        if CLOSE:
            acc += whole * scale.to(tl.float32)[:, None]
            scale = next_scale
            if OFFSET:
                offset = next_offset
    return acc


@launched
@triton.jit(do_not_specialize=["rows"])
def _packed(
    x,  # [rows, inner]
    matrix,  # [outputs, WORDS] int16; gated: [2 * outputs, WORDS]; with experts one of each
    scales,  # [GROUPS, SCALES]
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
    WORDS: tl.constexpr,
    APART: tl.constexpr,  # columns that lie in one word
    GROUP: tl.constexpr,  # columns of a scale
    GROUPS: tl.constexpr,
    SCALES: tl.constexpr,
    HIGH: tl.constexpr,  # rows of a scale
    OFFSET: tl.constexpr,
    FORM: tl.constexpr,
    PADDED: tl.constexpr,  # there are more columns than x has
    ASM: tl.constexpr,
    BIAS: tl.constexpr,
    KIND: tl.constexpr,  # an activation: the matrix is gated. "": it is plain
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    EXPERTS: tl.constexpr,  # 0: there are none
    EXPERT_BLOCK: tl.constexpr,
    SHARING: tl.constexpr,  # slots that read the same row of x
    FOLD: tl.constexpr,  # scales of less than a block of words go into the numbers, rounded, and not into the sums
    SHARES: tl.constexpr,
    AHEAD: tl.constexpr,  # lines of a row that are asked for before x is there
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    GATED: tl.constexpr = KIND != ""
    share = tl.program_id(1)
    if EXPERTS:
        wait_for_previous(EARLY)
        blocks = tl.cdiv(outputs, BLOCK_N)
        tile = tl.program_id(0)
        expert, first, stop = find_tile(ends, tile // blocks, EXPERTS, EXPERT_BLOCK, ROWS)
        if expert >= EXPERTS:
            return
        at = first + tl.arange(0, ROWS)
        there = at < stop
        target = tl.load(order + at, mask=there, other=0)
        source = target // SHARING
        n = tile % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
        high = outputs * 2 if GATED else outputs
        matrix += expert.to(tl.int64) * high * WORDS
        scales += expert.to(tl.int64) * (GROUPS * SCALES)
        zeros += expert.to(tl.int64) * (GROUPS * SCALES)
        bias += expert.to(tl.int64) * high
    else:
        tile = tl.program_id(0)
        row_tiles = tl.cdiv(rows, ROWS)
        n = tile // row_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
        target = (tile % row_tiles * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        there = target < rows
        source = target
    each: tl.constexpr = (WORDS // BLOCK_K + SHARES - 1) // SHARES * BLOCK_K
    begin = share * each
    end = tl.minimum(begin + each, WORDS)
    read = tl.minimum(n, outputs - 1)
    if EARLY and not EXPERTS:
        if AHEAD:
            _ask_for(matrix, read, begin, end, WORDS, AHEAD)
            if GATED:
                _ask_for(matrix, read + outputs, begin, end, WORDS, AHEAD)
        wait_for_previous(EARLY)
    pointers = x + source[:, None] * inner
    acc = _add(
        tl.zeros((BLOCK_N, ROWS), tl.float32), pointers, there[:, None], inner, matrix, scales, zeros, read, read // HIGH,
        begin, end, WORDS, APART, GROUP, GROUPS, SCALES, OFFSET, FORM, FOLD, PADDED, BLOCK_K, ASM,
    )  # fmt: skip
    if GATED:
        lower = read + outputs
        up = _add(
            tl.zeros((BLOCK_N, ROWS), tl.float32), pointers, there[:, None], inner, matrix, scales, zeros, lower, lower // HIGH,
            begin, end, WORDS, APART, GROUP, GROUPS, SCALES, OFFSET, FORM, FOLD, PADDED, BLOCK_K, ASM,
        )  # fmt: skip
    if SHARES > 1:
        SIZE: tl.constexpr = BLOCK_N * ROWS
        PARTS: tl.constexpr = 2 if GATED else 1
        at = tl.arange(0, BLOCK_N)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        sums += tile.to(tl.int64) * (SHARES * PARTS * SIZE)
        tl.store(sums + share * (PARTS * SIZE) + at, acc)
        if GATED:
            tl.store(sums + share * (PARTS * SIZE) + SIZE + at, up)
        tl.debug_barrier()
        if tl.atomic_add(turns + tile, 1, sem="acq_rel") < SHARES - 1:
            return
        tl.store(turns + tile, 0)
        acc = tl.load(sums + at, cache_modifier=".cg")
        if GATED:
            up = tl.load(sums + SIZE + at, cache_modifier=".cg")
        for other in tl.static_range(1, SHARES):
            acc += tl.load(sums + other * (PARTS * SIZE) + at, cache_modifier=".cg")
            if GATED:
                up += tl.load(sums + other * (PARTS * SIZE) + SIZE + at, cache_modifier=".cg")
    if GROUPS == 1:
        acc *= tl.load(scales + read // HIGH).to(tl.float32)[:, None]
        if GATED:
            up *= tl.load(scales + (read + outputs) // HIGH).to(tl.float32)[:, None]
    kind: tl.constexpr = out.dtype.element_ty
    if BIAS:
        acc += tl.load(bias + read).to(tl.float32)[:, None]
        if GATED:
            up += tl.load(bias + read + outputs).to(tl.float32)[:, None]
    if GATED:
        acc = gate_by(acc, up, KIND, ALPHA, LIMIT, kind)
    tl.store(out + target[None, :] * outputs + n[:, None], acc.to(kind), mask=(n < outputs)[:, None] & there[None, :])


class Way(NamedTuple):
    """How the work is divided: rows, outputs and words of a block, shares of the columns."""

    rows: int
    outputs: int
    words: int
    shares: int
    warps: int
    stages: int
    fold: bool = False
    ahead: bool = True


class Slots(NamedTuple):
    """Whose rows are whose: slots sorted by expert (`moe_many.sort_slots`), and how many of them read the same row of x."""

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
    blocks, experts = cdiv(outputs, way.outputs), 0 if slots is None else len(words)
    if slots is None:
        out, tiles = x.new_empty(rows, outputs), cdiv(rows, way.rows) * blocks
    else:
        count = len(slots.order)
        out, tiles = x.new_empty(count, outputs), min(count, count // way.rows + experts) * blocks
    size = tiles * way.shares * (2 if activation else 1) * way.rows * way.outputs if way.shares > 1 else 1
    each = cdiv(cdiv(words.shape[-1], way.words), way.shares) * way.words
    order, ends, sharing = slots or (words, words, 1)
    _packed[(tiles, way.shares)](
        x, *matrix.tensors, words if bias is None else bias, out, order, ends, x.new_empty(size, dtype=torch.float32),
        turns_of(x.device), rows, outputs, inputs, **matrix.constants(x), BIAS=bias is not None, **constants_of(activation),
        EXPERTS=experts, EXPERT_BLOCK=power_of_two(experts), SHARING=sharing, FOLD=way.fold, SHARES=way.shares,
        AHEAD=power_of_two(cdiv(each, 64)) if way.ahead else 0, ROWS=way.rows, BLOCK_N=way.outputs, BLOCK_K=way.words,
        num_warps=way.warps, num_stages=way.stages, **overlapping(),
    )  # fmt: skip
    return out
