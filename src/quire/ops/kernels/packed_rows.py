"""GEMM of 4- and 8-bit matrices (`bit_packing.py`) with one token, limited by memory bandwidth: `linear.py` and the few-slots
kernels of `experts.py` for quantized weights. A program reads some rows of a matrix completely and multiplies in float32.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.arguments import ClampedSwiglu, ExpertBiases
from quire.ops.kernels.activation import constants_of
from quire.ops.kernels.bit_packing import Packed, column_of, factor_of, no_offset, place_of, scale_of, unpack, zero_of
from quire.ops.kernels.launcher import cdiv, launched, let_next_start, overlapping, power_of_two, wait_for_previous
from quire.ops.kernels.linear import pair_rows, pair_values


class Program(NamedTuple):
    outputs: int
    words: int  # per iteration
    warps: int


@triton.jit
def _stream(
    x, matrix, scales, zeros, row, scale_row, inside, inner,
    WORDS: tl.constexpr, VALUE_STRIDE: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr,
    OFFSET: tl.constexpr, FORM: tl.constexpr, PADDED: tl.constexpr, ASM: tl.constexpr, LINES: tl.constexpr,
    TILE: tl.constexpr, SCALED: tl.constexpr, SPAN: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Return rows [R] of a matrix times x, pointers [R, 1] or [1, 1], as [R] float32. Waits for the previous kernel between the
    first load of the matrix and that of x.
    """
    # 8-bit floats convert to float16 in one instruction
    kind: tl.constexpr = tl.float16 if FORM == "float8" and ASM else x.dtype.element_ty
    PER: tl.constexpr = 4 if FORM == "int4" or FORM == "float4" else 2
    R: tl.constexpr = row.shape[0]
    SPANS: tl.constexpr = BLOCK_K // SPAN
    MIDDLE: tl.constexpr = 8.0 if FORM == "int4" else 0.0
    k = tl.arange(0, BLOCK_K)
    begins = tl.arange(0, SPANS) * SPAN
    places = matrix + place_of(row[:, None], k[None, :], WORDS, VALUE_STRIDE, TILE)
    word = tl.load(places, mask=inside[:, None] & (k < WORDS)[None, :], other=0)
    wait_for_previous(EARLY)
    constant = no_offset(row, FORM, kind, ASM)
    CLOSE: tl.constexpr = GROUP % (PER * VALUE_STRIDE) == 0  # one scale for all places of a word
    acc = tl.zeros((R, SPANS, SPAN // 8), tl.float32)
    for begin in tl.range(0, WORDS, BLOCK_K):
        following = begin + BLOCK_K
        coming = tl.load(places + following * TILE, mask=inside[:, None] & (k < WORDS - following)[None, :], other=0)
        at, first = begin + k, begin + begins
        real = inside[:, None] & (first < WORDS)[None, :]
        products = tl.zeros((R, BLOCK_K), tl.float32)
        if OFFSET:
            parts = tl.zeros((x.shape[0], BLOCK_K), tl.float32)
        for i in tl.static_range(PER):
            column = column_of(at, i, VALUE_STRIDE, FORM)
            inside_row = (at < WORDS) & (column < inner) if PADDED else at < WORDS
            part = tl.load(x + column[None, :], mask=inside_row[None, :], other=0.0).to(tl.float32)
            products += unpack(word, constant, i, FORM, 0, kind, ASM).to(tl.float32) * part
            if OFFSET:
                parts += part
            if i == PER - 1 or not CLOSE:
                sums = tl.sum(tl.reshape(products, (R, SPANS, SPAN // 8, 8)), 3)
                group = (column_of(first, i, VALUE_STRIDE, FORM) // GROUP)[None, :] if GROUP else (first * 0)[None, :]
                if OFFSET:
                    shift = MIDDLE - zero_of(scales, zeros, group, scale_row[:, None], real, SCALES, SCALED)
                    each = tl.sum(tl.reshape(parts, (x.shape[0], SPANS, SPAN // 8, 8)), 3)
                    sums += each * shift[:, :, None]
                    parts = tl.zeros((x.shape[0], BLOCK_K), tl.float32)
                if GROUP:
                    sums *= scale_of(scales, group, scale_row[:, None], real, SCALES, SCALED)[:, :, None]
                acc += sums
                products = tl.zeros((R, BLOCK_K), tl.float32)
        word = coming
    total = tl.sum(tl.sum(acc, 2), 1)
    if not GROUP:
        total *= scale_of(scales, 0, scale_row, inside, SCALES, SCALED)
    elif SCALED == "e4m3":
        total *= factor_of(scales, scale_row, inside, LINES, SCALES)
    return total


@launched
@triton.jit
def _row(
    x,  # [rows, inner]
    matrix,  # [outputs, WORDS]; gated: [2 * outputs, WORDS]
    scales,  # [LINES, SCALES]
    zeros,  # like scales
    bias,  # one value per row of the matrix
    out,  # [rows, outputs]
    outputs,
    inner,
    WORDS: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    HIGH: tl.constexpr,
    OFFSET: tl.constexpr,
    FORM: tl.constexpr,
    PADDED: tl.constexpr,
    ASM: tl.constexpr,
    LINES: tl.constexpr,
    TILE: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    KIND: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    rows = tl.num_programs(0) // tl.cdiv(outputs, BLOCK_N)
    x += tl.program_id(0) % rows * inner
    out += tl.program_id(0) % rows * outputs
    first = tl.program_id(0) // rows * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    if KIND == "":
        row, inside = n, n < outputs
    else:
        row, inside = pair_rows(first, outputs, BLOCK_N)
    value = _stream(
        x + tl.zeros((1, 1), tl.int32), matrix, scales, zeros, row, row // HIGH, inside, inner,
        WORDS, VALUE_STRIDE, GROUP, SCALES, OFFSET, FORM, PADDED, ASM, LINES, TILE, SCALED, SPAN, BLOCK_K, EARLY,
    )  # fmt: skip
    if BIAS:
        value += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
    if KIND != "":
        value = pair_values(value, BLOCK_N, KIND, 0.0, 0.0, out.dtype.element_ty)
    tl.store(out + n, value.to(out.dtype.element_ty), mask=n < outputs)


def linear(x: Tensor, matrix: Packed, bias: Tensor | None, activation: str, program: Program) -> Tensor:
    """Return x [rows, inputs] times the matrix [rows, outputs]; with an activation: gate rows first -> [rows, outputs / 2]. The
    matrix is read once per row of x.
    """
    x = x.contiguous()
    rows, inputs = x.shape
    outputs = matrix.outputs // 2 if activation else matrix.outputs
    out = x.new_empty(rows, outputs)
    gating = constants_of(activation)["KIND"]
    block = max(1, program.outputs // 2) if activation else program.outputs
    _row[(rows * cdiv(outputs, block),)](
        x, *matrix.tensors, matrix.words if bias is None else bias, out, outputs, inputs, **matrix.sizes, **matrix.constants(x),
        BIAS=bias is not None, KIND=gating, SPAN=matrix.value_stride, BLOCK_N=block, BLOCK_K=program.words,
        num_warps=program.warps, **overlapping(),
    )  # fmt: skip
    return out


@launched
@triton.jit
def _up(
    x,  # [T, inner]
    matrices,  # [E, 2 * outputs, WORDS] gate rows first
    scales,  # [E, LINES, SCALES]
    zeros,  # like scales
    experts,  # [T * TOP_K]
    biases,  # [E, 2 * outputs]
    out,  # [T * TOP_K, outputs]
    outputs,
    inner,
    WORDS: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    HIGH: tl.constexpr,
    OFFSET: tl.constexpr,
    FORM: tl.constexpr,
    PADDED: tl.constexpr,
    ASM: tl.constexpr,
    LINES: tl.constexpr,
    TILE: tl.constexpr,
    SCALED: tl.constexpr,
    TOP_K: tl.constexpr,
    BIAS: tl.constexpr,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_previous(EARLY)
    let_next_start(EARLY)
    slot = tl.program_id(0)
    first = tl.program_id(1) * BLOCK_N
    expert = tl.load(experts + slot)
    row, inside = pair_rows(first, outputs, BLOCK_N)
    both = _stream(
        x + slot // TOP_K * inner + tl.zeros((1, 1), tl.int32), matrices, scales, zeros,
        expert * (2 * outputs) + row, expert * (LINES * SCALES) + row // HIGH, inside, inner,
        WORDS, VALUE_STRIDE, GROUP, SCALES, OFFSET, FORM, PADDED, ASM, LINES, TILE, SCALED, SPAN, BLOCK_K, False,
    )  # fmt: skip
    if BIAS:
        both += tl.load(biases + expert * 2 * outputs + row, mask=inside, other=0.0).to(tl.float32)
    value = pair_values(both, BLOCK_N, KIND, ALPHA, LIMIT, out.dtype.element_ty)
    n = first + tl.arange(0, BLOCK_N)
    tl.store(out + slot * outputs + n, value.to(out.dtype.element_ty), mask=n < outputs)


@launched
@triton.jit
def _down(
    x,  # [T * TOP_K, inner]
    matrices,  # [E, outputs, WORDS]
    scales,  # [E, LINES, SCALES]
    zeros,  # like scales
    weights,  # [T * TOP_K] float32
    experts,  # [T * TOP_K]
    biases,  # [E, outputs]
    out,  # [T, outputs]
    outputs,
    inner,
    WORDS: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    HIGH: tl.constexpr,
    OFFSET: tl.constexpr,
    FORM: tl.constexpr,
    PADDED: tl.constexpr,
    ASM: tl.constexpr,
    LINES: tl.constexpr,
    TILE: tl.constexpr,
    SCALED: tl.constexpr,
    TOP_K: tl.constexpr,
    BIAS: tl.constexpr,
    TOP_BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    """May begin before `_up` has ended: until it waits, it only reads what earlier kernels wrote, bypassing L1."""
    let_next_start(EARLY)
    at = tl.arange(0, BLOCK_N * TOP_BLOCK)  # all slots of the first output, then of the second, ...
    output = tl.program_id(1) * BLOCK_N + at // TOP_BLOCK
    slot = tl.program_id(0) * TOP_K + at % TOP_BLOCK
    inside = (output < outputs) & (at % TOP_BLOCK < TOP_K)
    expert = tl.load(experts + slot, mask=inside, other=0, cache_modifier=".cg")
    weight = tl.load(weights + slot, mask=inside, other=0.0, cache_modifier=".cg")
    slot = tl.where(inside, slot, 0)
    each = _stream(
        x + (slot * inner)[:, None], matrices, scales, zeros, expert * outputs + output,
        expert * (LINES * SCALES) + output // HIGH, inside, inner,
        WORDS, VALUE_STRIDE, GROUP, SCALES, OFFSET, FORM, PADDED, ASM, LINES, TILE, SCALED, SPAN, BLOCK_K, EARLY,
    )  # fmt: skip
    if BIAS:
        each += tl.load(biases + expert * outputs + output, mask=inside, other=0.0).to(tl.float32)
    value = tl.sum(tl.reshape(each * weight, (BLOCK_N, TOP_BLOCK)), 1)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(out + tl.program_id(0) * outputs + n, value.to(out.dtype.element_ty), mask=n < outputs)


def experts_forward(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    up: Packed,
    down: Packed,
    activation: str | ClampedSwiglu,
    biases: ExpertBiases | None,
    programs: tuple[Program, Program],
) -> Tensor:
    """Run experts; every slot reads its expert's matrices separately."""
    tokens, top_k = experts.shape
    before, after = biases or (None, None)
    first, second = programs
    size, inner_size = down.outputs, up.outputs // 2
    inner = x.new_empty(tokens * top_k, inner_size)
    out = torch.empty_like(x)
    _up[(tokens * top_k, cdiv(inner_size, first.outputs))](
        x, *up.tensors, experts, weights if before is None else before, inner, inner_size, x.shape[1], **up.sizes,
        **up.constants(x), TOP_K=top_k, BIAS=before is not None, **constants_of(activation), SPAN=up.value_stride,
        BLOCK_N=first.outputs, BLOCK_K=first.words, num_warps=first.warps, **overlapping(),
    )  # fmt: skip
    _down[(tokens, cdiv(size, second.outputs))](
        inner, *down.tensors, weights, experts, weights if after is None else after, out, size, inner_size,
        **down.sizes, **down.constants(inner), TOP_K=top_k, BIAS=after is not None, TOP_BLOCK=power_of_two(top_k),
        SPAN=down.value_stride, BLOCK_N=second.outputs, BLOCK_K=second.words, num_warps=second.warps,
        **overlapping(),
    )  # fmt: skip
    return out
