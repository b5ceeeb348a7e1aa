"""A matrix of 4- or 8-bit numbers times rows: read once as it is stored, unpacked in registers, multiplied by matrix units.

Words of 16 bits hold numbers that lie P columns apart, so that two neighbouring words, one register, unpack by a shift
and a mask to two neighbouring numbers of the activation's type, which is how matrix units take them:

    4 bits   word j = columns j, j + P, j + 2 P, j + 3 P, from the lowest bits on, for j < P; then the next 4 P columns
    8 bits   word j = columns j, j + P

A program makes BLOCK_N outputs of ROWS rows from a share of the columns. Where shares are several, the program that ends last
adds them, in their order: the sum does not depend on who that is.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import JITFunction

from quire.ops.kernels.activation import KINDS, activate
from quire.ops.kernels.launcher import launched
from quire.ops.kernels.math import cdiv
from quire.ops.kernels.overlap import let_next_start, overlapping, wait_for_previous

# a number so large that the last bits of a mantissa count in ones, how the type is called, 1, -1: each twice in a register
LARGE = {
    "bf16": ("0x43004300", "bf16x2", "0x3F803F80", "0xBF80BF80"),
    "fp16": ("0x64006400", "f16x2", "0x3C003C00", "0xBC00BC00"),
}
# of smaller floats, how far to the left their exponent and mantissa are here, and what their exponents are off by, as a factor
EIGHT_BITS = {"bf16": (4, "0x7B807B80"), "fp16": (7, "0x5C005C00")}
FOUR_BITS = {"bf16": (6, "0x7E807E80"), "fp16": (9, "0x74007400")}


@triton.constexpr_function
def _assembly(form, i, name, offset):
    """Two words in a register, $1, to two numbers, $0. With an offset: $2 is what is added to both."""
    large, kind, one, minus = LARGE[name]
    lines = [".reg .b32 t, s, u, c;", f"mov.b32 c, {large};"]
    if form == "int4":
        lines += [f"shr.b32 t, $1, {4 * i};", "lop3.b32 t, t, 0x000F000F, c, 0xEA;"]
    elif form == "float4":
        shift, far = FOUR_BITS[name]
        lines += [f"shr.b32 u, $1, {4 * i};", "and.b32 t, u, 0x00070007;", f"shl.b32 t, t, {shift};", "shl.b32 s, u, 12;"]
        lines += ["mov.b32 u, 0x80008000;", "lop3.b32 t, s, u, t, 0xEA;", f"mov.b32 c, {far};", f"fma.rn.{kind} t, t, c, u;"]
    elif form == "int8" and name == "bf16":  # the lower seven bits, and less 128 where the sign is set
        lines += [f"shr.b32 u, $1, {8 * i};", "lop3.b32 t, u, 0x007F007F, c, 0xEA;", "lop3.b32 s, u, 0x00800080, c, 0xEA;"]
        lines += [f"mov.b32 u, {minus};", f"fma.rn.{kind} t, s, u, t;"]
    elif form == "int8":
        lines += [f"shr.b32 u, $1, {8 * i};", "xor.b32 u, u, 0x00800080;", "lop3.b32 t, u, 0x00FF00FF, c, 0xEA;"]
        lines += [f"mov.b32 u, {one};", "mov.b32 s, 0xE480E480;", f"fma.rn.{kind} t, t, u, s;"]  # less 1024 + 128
    else:
        shift, far = EIGHT_BITS[name][0] - 8 * i, EIGHT_BITS[name][1]
        lines += [f"and.b32 t, $1, {0x007F007F << 8 * i:#x};", f"sh{'l' if shift > 0 else 'r'}.b32 t, t, {abs(shift)};"]
        lines += [f"shl.b32 s, $1, {8 - 8 * i};", "mov.b32 u, 0x80008000;", "lop3.b32 t, s, u, t, 0xEA;"]
        lines += [f"mov.b32 c, {far};", f"fma.rn.{kind} t, t, c, u;"]
    if form == "int4" or offset:
        lines += [f"mov.b32 u, {one};", f"fma.rn.{kind} t, t, u, $2;"]
    return "{ " + " ".join(lines) + " mov.b32 $0, t; }"


@triton.jit
def _unpack(word, offset, PLACE: tl.constexpr, FORM: tl.constexpr, OFFSET: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr):
    """The numbers at a place of words [N, K] int16, plus the offset [N, 1]."""
    if ASM:
        name: tl.constexpr = "bf16" if tl.bfloat16 == KIND else "fp16"
        if FORM == "int4" or OFFSET:
            added = tl.broadcast_to(offset, word.shape)
            return tl.inline_asm_elementwise(
                _assembly(FORM, PLACE, name, OFFSET), "=r,r,r", [word, added], offset.dtype, True, 2
            )
        else:  # noqa: RET505
            return tl.inline_asm_elementwise(_assembly(FORM, PLACE, name, OFFSET), "=r,r", [word], offset.dtype, True, 2)
    else:
        if FORM == "int4":
            value = ((word >> (4 * PLACE)) & 15).to(tl.float32)
        elif FORM == "float4":
            bits = (word >> (4 * PLACE)) & 15
            value = (((bits & 7) << 9) | ((bits & 8) << 12)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
        else:
            byte = (word >> (8 * PLACE)) & 255
            if FORM == "int8":
                value = byte.to(tl.float32) - tl.where(byte > 127, 256.0, 0.0)
            else:
                small = (((byte & 127) << 7) | ((byte & 128) << 8)).to(tl.int16).to(tl.float16, bitcast=True)
                value = small.to(tl.float32) * 256.0  # the exponents' difference
        if FORM == "int4" or OFFSET:
            value += offset.to(tl.float32)
        return value.to(KIND)


@triton.jit
def _offset(zeros, place, FORM: tl.constexpr, OFFSET: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr):
    """[N, 1]: what is added to the stored numbers, and to the large number that unpacking leaves 4 bits with."""
    zero = tl.load(zeros + place).to(tl.float32) if OFFSET else tl.full(place.shape, 8.0 if FORM == "int4" else 0.0, tl.float32)
    if FORM == "int4" and ASM:
        zero += 128.0 if tl.bfloat16 == KIND else 1024.0
    return (-zero).to(KIND)[:, None]


@triton.jit
def _add(
    acc, x, matrix, scales, zeros, n, r, scale_row, begin, end, rows, inner,
    WORDS: tl.constexpr, APART: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, OFFSET: tl.constexpr,
    FORM: tl.constexpr, FOLD: tl.constexpr, PADDED: tl.constexpr, BLOCK_K: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """acc [N, R] and the products of words from begin to end."""
    kind: tl.constexpr = x.dtype.element_ty
    PER: tl.constexpr = 4 if FORM == "int4" or FORM == "float4" else 2
    k = tl.arange(0, BLOCK_K)
    row = matrix + n.to(tl.int64)[:, None] * WORDS + k[None, :]
    columns = x + r[:, None] * inner + k[None, :]
    there = (r < rows)[:, None]
    constant = _offset(zeros, n * 0, FORM, False, kind, ASM)
    for at in tl.range(begin, end, BLOCK_K):
        word = tl.load(row + at)
        for i in tl.static_range(PER):
            column = at // APART * (PER * APART) + i * APART + at % APART
            real = there & (k < inner - column)[None, :] if PADDED else there
            part = tl.load(columns + column, mask=real, other=0.0)
            place = scale_row * GROUPS + column // GROUP
            offset = _offset(zeros, place, FORM, True, kind, ASM) if OFFSET else constant
            value = _unpack(word, offset, i, FORM, OFFSET, kind, ASM)
            if FOLD:
                value *= tl.load(scales + place).to(kind)[:, None]
                acc = tl.dot(value, tl.trans(part), acc, input_precision="ieee")
            elif GROUPS == 1:
                acc = tl.dot(value, tl.trans(part), acc, input_precision="ieee")
            else:
                scale = tl.load(scales + place).to(tl.float32)
                acc += tl.dot(value, tl.trans(part), input_precision="ieee") * scale[:, None]
    return acc


@launched
@triton.jit(do_not_specialize=["rows"])
def _packed(
    x,  # [rows, inner]
    matrix,  # [outputs, WORDS] int16; gated: [2 * outputs, WORDS]
    scales,  # [outputs / HIGH, GROUPS]; gated: twice as many rows
    zeros,  # as scales
    bias,  # as many as the matrix has rows
    out,  # [rows, outputs]
    sums,  # float32: of each share of each program's tile
    turns,  # [tiles] zeros: how many shares are there
    rows,
    outputs,
    inner,
    WORDS: tl.constexpr,
    APART: tl.constexpr,  # columns that lie in one word
    GROUP: tl.constexpr,  # columns of a scale
    GROUPS: tl.constexpr,
    HIGH: tl.constexpr,  # rows of a scale
    OFFSET: tl.constexpr,
    BIAS: tl.constexpr,
    KIND: tl.constexpr,  # an activation: the matrix is gated. "": it is plain
    FORM: tl.constexpr,
    FOLD: tl.constexpr,  # scales go into the numbers, rounded, and not into the sums
    PADDED: tl.constexpr,  # there are more columns than x has
    SHARES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ASM: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    GATED: tl.constexpr = KIND != ""
    tile = tl.program_id(0)
    row_tiles = tl.cdiv(rows, ROWS)
    n = tile // row_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tile % row_tiles * ROWS + tl.arange(0, ROWS)
    share = tl.program_id(1)
    each: tl.constexpr = (WORDS // BLOCK_K + SHARES - 1) // SHARES * BLOCK_K
    begin = share * each
    end = tl.minimum(begin + each, WORDS)
    read = tl.minimum(n, outputs - 1)
    wait_for_previous(EARLY)
    acc = _add(
        tl.zeros((BLOCK_N, ROWS), tl.float32), x, matrix, scales, zeros, read, r, read // HIGH, begin, end, rows, inner,
        WORDS, APART, GROUP, GROUPS, OFFSET, FORM, FOLD, PADDED, BLOCK_K, ASM,
    )  # fmt: skip
    if GATED:
        lower = read + outputs
        up = _add(
            tl.zeros((BLOCK_N, ROWS), tl.float32), x, matrix, scales, zeros, lower, r, lower // HIGH, begin, end, rows, inner,
            WORDS, APART, GROUP, GROUPS, OFFSET, FORM, FOLD, PADDED, BLOCK_K, ASM,
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
    if GROUPS == 1 and not FOLD:
        acc *= tl.load(scales + read // HIGH).to(tl.float32)[:, None]
        if GATED:
            up *= tl.load(scales + (read + outputs) // HIGH).to(tl.float32)[:, None]
    kind: tl.constexpr = out.dtype.element_ty
    if BIAS:
        acc += tl.load(bias + read).to(tl.float32)[:, None]
        if GATED:
            up += tl.load(bias + read + outputs).to(tl.float32)[:, None]
    if GATED:
        acc = activate(acc.to(kind).to(tl.float32), KIND).to(kind).to(tl.float32) * up.to(kind).to(tl.float32)
    place = out + r.to(tl.int64)[None, :] * outputs + n[:, None]
    tl.store(place, acc.to(kind), mask=(n < outputs)[:, None] & (r < rows)[None, :])


class Packed(NamedTuple):
    form: str  # "int4", "int8", "float8", "float4"
    words: Tensor  # [outputs, W] int16
    scales: Tensor  # [outputs / high, groups]
    zeros: Tensor | None  # as scales
    apart: int
    group: int  # columns of a scale; `apart` is a multiple of it, or it is of all columns

    @property
    def columns(self) -> int:
        """There may be more than inputs: scales are 0 there."""
        return NUMBERS[self.form] * self.words.shape[1]


class Way(NamedTuple):
    """How the work is divided: rows, outputs and words of a block, shares of the columns."""

    rows: int
    outputs: int
    words: int
    shares: int
    warps: int
    stages: int
    fold: bool = False


NUMBERS = {"int4": 4, "float4": 4, "int8": 2, "float8": 2}  # in a word


@cache
def _turns(device: torch.device) -> Tensor:
    """Zeros; every launch leaves them so."""
    return torch.zeros(1 << 16, dtype=torch.int32, device=device)


def product(x: Tensor, matrix: Packed, bias: Tensor | None, activation: str, way: Way) -> Tensor:
    """x [rows, inputs] -> [rows, outputs]; with an activation: of gate rows above up rows [rows, outputs / 2]."""
    x = x.contiguous()
    rows, inputs = x.shape
    words, scales = matrix.words, matrix.scales
    outputs = len(words) // 2 if activation else len(words)
    out = x.new_empty(rows, outputs)
    tiles = cdiv(rows, way.rows) * cdiv(outputs, way.outputs)
    size = tiles * way.shares * (2 if activation else 1) * way.rows * way.outputs if way.shares > 1 else 1
    _packed[(tiles, way.shares)](
        x, words, scales, scales if matrix.zeros is None else matrix.zeros, words if bias is None else bias, out,
        x.new_empty(size, dtype=torch.float32), _turns(x.device), rows, outputs, inputs,
        WORDS=words.shape[1], APART=matrix.apart, GROUP=matrix.group, GROUPS=scales.shape[1], HIGH=len(words) // len(scales),
        OFFSET=matrix.zeros is not None, BIAS=bias is not None, KIND=KINDS[activation] if activation else "", FORM=matrix.form,
        FOLD=way.fold, PADDED=matrix.columns > inputs, SHARES=way.shares, ROWS=way.rows, BLOCK_N=way.outputs,
        BLOCK_K=way.words, ASM=assembles(x), num_warps=way.warps, num_stages=way.stages, **overlapping(),
    )  # fmt: skip
    return out


def assembles(x: Tensor) -> bool:
    """Whether numbers are unpacked in assembly, two at a time."""
    return x.dtype != torch.float32 and isinstance(_unpack, JITFunction)


@launched
@triton.jit
def _dequantize(
    matrix,  # [outputs, WORDS] int16
    scales,  # [outputs / HIGH, GROUPS]
    zeros,  # as scales
    out,  # [outputs, inner]
    inner,
    WORDS: tl.constexpr,
    APART: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    HIGH: tl.constexpr,
    OFFSET: tl.constexpr,
    FORM: tl.constexpr,
    BLOCK: tl.constexpr,
    ASM: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    kind: tl.constexpr = out.dtype.element_ty
    PER: tl.constexpr = 4 if FORM == "int4" or FORM == "float4" else 2
    n = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(matrix + n.to(tl.int64) * WORDS + at, mask=at < WORDS, other=0)[None, :]
    for i in tl.static_range(PER):
        column = at // APART * (PER * APART) + i * APART + at % APART
        place = n // HIGH * GROUPS + column // GROUP
        inside = (at < WORDS) & (column < inner)
        scale = tl.load(scales + place, mask=inside, other=0.0).to(tl.float32)
        zero = tl.full((1,), 8.0 if FORM == "int4" else 0.0, tl.float32)
        if OFFSET:
            zero = tl.load(zeros + place, mask=inside, other=0).to(tl.float32)
        shift = (128.0 if kind == tl.bfloat16 else 1024.0) if FORM == "int4" and ASM else 0.0
        number = _unpack(word, (-zero - shift).to(kind)[None, :], i, FORM, OFFSET, kind, ASM)
        tl.store(
            out + n.to(tl.int64) * inner + column, (number.to(tl.float32) * scale[None, :]).to(kind).reshape(BLOCK), mask=inside
        )


def dequantize(matrix: Packed, like: Tensor) -> Tensor:
    """[outputs, inputs] of the type and the inputs of `like` [..., inputs]."""
    words, scales = matrix.words, matrix.scales
    out = like.new_empty(len(words), like.shape[-1])
    block = 1024
    _dequantize[(len(words), cdiv(words.shape[1], block))](
        words, scales, scales if matrix.zeros is None else matrix.zeros, out, out.shape[1],
        WORDS=words.shape[1], APART=matrix.apart, GROUP=matrix.group, GROUPS=scales.shape[1], HIGH=len(words) // len(scales),
        OFFSET=matrix.zeros is not None, FORM=matrix.form, BLOCK=block, ASM=assembles(like), num_warps=4, **overlapping(),
    )  # fmt: skip
    return out
