"""Matrices of 4- and 8-bit numbers as they lie in a GPU's memory, and how they are unpacked.

Words of 16 bits hold numbers that lie P columns apart, so that two neighbouring words, one register, unpack by a shift and a
mask to two neighbouring numbers of the activation's type, which is how matrix units take them:

    4 bits   word j = columns j, j + P, j + 2 P, j + 3 P, from the lowest bits on, for j < P; then the next 4 P columns
    8 bits   word j = columns j, j + P

Such P words are a block of a row; blocks of TILE neighbouring rows lie behind each other, so that who makes their outputs reads
memory in one piece, and then come their next blocks.

Scales lie as they are, or in words of 32 bits, which the copies into a program's memory can be asked for ahead:

    "fp16", "bf16"   a scale, and the zero point above it, in float16
    "e8m0"           four scales of a block, powers of two
    "e4m3"           four scales of a block, floats of 8 bits; the last line has a factor for each row, float32
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import JITFunction

from quire.ops.kernels.launcher import cdiv, launched, let_next_start, overlapping, wait_for_previous

# a number so large that the last bits of a mantissa count in ones, how the type is called, 1, -1, and less that number: each
# twice in a register
LARGE = {
    "bf16": ("0x43004300", "bf16x2", "0x3F803F80", "0xBF80BF80", "0xC300C300"),
    "fp16": ("0x64006400", "f16x2", "0x3C003C00", "0xBC00BC00", "0xE400E400"),
}
# zero points: there are none, whole numbers, or any numbers, which are taken off when the large one is
NO_ZEROS, WHOLE_ZEROS, ANY_ZEROS = 0, 1, 2
E4M3_BELOW = tl.constexpr(2.0**120)  # what float32's exponents are off by
# of smaller floats, how far to the left their exponent and mantissa are here, and what their exponents are off by, as a factor
EIGHT_BITS = {"bf16": (4, "0x7B807B80"), "fp16": (7, "0x5C005C00")}
FOUR_BITS = {"bf16": (6, "0x7E807E80"), "fp16": (9, "0x74007400")}


@triton.constexpr_function
def _assembly(form, i, name, offset):
    """Two words in a register, $1, to two numbers, $0. With an offset: $2 is what is added to both."""
    large, kind, one, minus, less = LARGE[name]
    lines = [".reg .b32 t, s, u, c;", f"mov.b32 c, {large};"]
    if form == "int4":
        lines += [f"shr.b32 t, $1, {4 * i};", "lop3.b32 t, t, 0x000F000F, c, 0xEA;"]
    elif form == "float4":
        place, far = FOUR_BITS[name]
        lines += [
            f"sh{'l' if place > 4 * i else 'r'}.b32 t, $1, {abs(place - 4 * i)};",
            f"and.b32 t, t, {0x00070007 << place:#x};",
        ]
        lines += [f"shl.b32 s, $1, {12 - 4 * i};", "mov.b32 u, 0x80008000;", "lop3.b32 t, s, u, t, 0xEA;"]
        lines += [f"mov.b32 c, {far};", f"fma.rn.{kind} t, t, c, u;"]
    elif form == "int8" and name == "bf16":  # the lower seven bits, and less 128 where the sign is set
        lines += [f"shr.b32 u, $1, {8 * i};", "lop3.b32 t, u, 0x007F007F, c, 0xEA;", "lop3.b32 s, u, 0x00800080, c, 0xEA;"]
        lines += [f"mov.b32 u, {minus};", f"fma.rn.{kind} t, s, u, t;"]
    elif form == "int8":
        lines += [f"shr.b32 u, $1, {8 * i};", "xor.b32 u, u, 0x00800080;", "lop3.b32 t, u, 0x00FF00FF, c, 0xEA;"]
        lines += [f"mov.b32 u, {one};", "mov.b32 s, 0xE480E480;", f"fma.rn.{kind} t, t, u, s;"]  # less 1024 + 128
    elif name == "fp16":  # as the hardware has it
        lines = [".reg .b32 t; .reg .b16 l, h;", f"prmt.b32 t, $1, 0, {'0x20' if i == 0 else '0x31'};", "mov.b32 {l, h}, t;"]
        lines += ["cvt.rn.f16x2.e4m3x2 t, l;", ".reg .b32 u, s;"]
    else:
        shift, far = EIGHT_BITS[name][0] - 8 * i, EIGHT_BITS[name][1]
        lines += [f"and.b32 t, $1, {0x007F007F << 8 * i:#x};", f"sh{'l' if shift > 0 else 'r'}.b32 t, t, {abs(shift)};"]
        lines += [f"shl.b32 s, $1, {8 - 8 * i};", "mov.b32 u, 0x80008000;", "lop3.b32 t, s, u, t, 0xEA;"]
        lines += [f"mov.b32 c, {far};", f"fma.rn.{kind} t, t, c, u;"]
    if form == "int4" and offset == ANY_ZEROS:
        lines += [f"mov.b32 u, {one};", f"mov.b32 s, {less};", f"fma.rn.{kind} t, t, u, s;"]
    if form == "int4" or offset:
        lines += [f"mov.b32 u, {one};", f"fma.rn.{kind} t, t, u, $2;"]
    return "{ " + " ".join(lines) + " mov.b32 $0, t; }"


@triton.jit
def unpack(word, offset, PLACE: tl.constexpr, FORM: tl.constexpr, OFFSET: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr):
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
def scale_of(scales, group, row, real, SCALES, SCALED: tl.constexpr):
    """float32, of groups and rows that broadcast, where they are real; of "e4m3" without the row's factor."""
    if SCALED == "":
        value = tl.load(scales + group * SCALES + row, mask=real, other=0.0).to(tl.float32)
    elif SCALED == "fp16" or SCALED == "bf16":
        value = scale_in(tl.load(scales + group * SCALES + row, mask=real, other=0), SCALED)
    else:
        value = scale_in(tl.load(scales + group // 4 * SCALES + row, mask=real, other=0) >> (group % 4 * 8), SCALED)
    return value


@triton.jit
def factor_of(scales, row, real, LINES, SCALES):
    """What all "e4m3" scales of a row are multiplied by."""
    return tl.load(scales + (LINES - 1) * SCALES + row, mask=real, other=0).to(tl.float32, bitcast=True)


@triton.jit
def scale_in(word, SCALED: tl.constexpr):
    """The scale in the lowest bits of words."""
    if SCALED == "fp16":
        value = word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif SCALED == "bf16":
        value = (word << 16).to(tl.float32, bitcast=True)
    elif SCALED == "e8m0":
        value = ((word & 255) << 23).to(tl.float32, bitcast=True)
    else:
        value = ((word & 127) << 20).to(tl.float32, bitcast=True) * E4M3_BELOW
    return value


@triton.jit
def zero_of(scales, zeros, group, row, real, SCALES, SCALED: tl.constexpr):
    """float32."""
    if SCALED == "":
        zero = tl.load(zeros + group * SCALES + row, mask=real, other=0).to(tl.float32)
    else:
        zero = zero_in(tl.load(scales + group * SCALES + row, mask=real, other=0))
    return zero


@triton.jit
def zero_in(word):
    return (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def offset_by(zero, FORM: tl.constexpr, OFFSET: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr):
    """[N, 1]: what is added to the stored numbers, and to the large number that unpacking leaves 4 bits with."""
    if FORM == "int4" and ASM and OFFSET < 2:
        zero += 128.0 if tl.bfloat16 == KIND else 1024.0
    return (-zero).to(KIND)[:, None]


@triton.jit
def no_offset(row, FORM: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr):
    """`offset_by`, where there are no zero points."""
    return offset_by(tl.full(row.shape, 8.0 if FORM == "int4" else 0.0, tl.float32), FORM, 0, KIND, ASM)


AT_ONCE = 1024  # words that a program dequantizes
NUMBERS = {"int4": 4, "float4": 4, "int8": 2, "float8": 2}  # in a word


class Packed(NamedTuple):
    """A matrix, or one of each expert: then everything has one more dimension, the first."""

    form: str  # "int4", "int8", "float8", "float4"
    words: Tensor  # [outputs, W] int16
    scales: Tensor  # [groups, outputs / high]: who makes neighbouring outputs reads neighbouring scales
    zeros: Tensor | None  # as scales, where those lie as they are
    apart: int  # divides `group`
    group: int  # columns of a scale
    tile: int = 1  # rows whose blocks lie together
    scaled: str = ""  # how scales lie
    offset: int = NO_ZEROS

    @property
    def columns(self) -> int:
        """There may be more than inputs: scales are 0 there."""
        return NUMBERS[self.form] * self.words.shape[-1]

    @property
    def blocks(self) -> int:
        return self.words.shape[-1] // self.apart

    @property
    def outputs(self) -> int:
        return self.words.shape[-2]

    @property
    def groups(self) -> int:
        lines = self.scales.shape[-2]
        return {"e8m0": 4 * lines, "e4m3": 4 * (lines - 1)}.get(self.scaled, lines)

    def constants(self, x: Tensor) -> dict[str, Any]:
        """What a kernel that multiplies x by it is compiled for."""
        return {
            "APART": self.apart, "GROUP": self.group if self.groups > 1 else 0, "HIGH": self.outputs // self.scales.shape[-1],
            "OFFSET": self.offset, "FORM": self.form, "PADDED": self.columns > x.shape[-1], "ASM": assembles(x),
            "TILE": self.tile, "SCALED": self.scaled,
        }  # fmt: skip

    @property
    def sizes(self) -> dict[str, int]:
        """What it is told."""
        return {"WORDS": self.words.shape[-1], "SCALES": self.scales.shape[-1], "LINES": self.scales.shape[-2]}

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.words, self.scales, self.scales if self.zeros is None else self.zeros


def assembles(x: Tensor) -> bool:
    """Whether numbers are unpacked in assembly, two at a time."""
    return x.dtype != torch.float32 and isinstance(unpack, JITFunction)


@triton.jit
def column_of(at, place: tl.constexpr, APART: tl.constexpr, FORM: tl.constexpr):
    """Of the numbers at a place of words `at`."""
    PER: tl.constexpr = 4 if FORM == "int4" or FORM == "float4" else 2
    return at // APART * (PER * APART) + place * APART + at % APART


@triton.jit
def place_of(row, at, WORDS, APART: tl.constexpr, TILE: tl.constexpr):
    """Of words `at` of rows, from the matrix's first on."""
    return (row // TILE).to(tl.int64) * (WORDS * TILE) + at // APART * (TILE * APART) + row % TILE * APART + at % APART


@launched
@triton.jit
def _dequantize(
    matrix,  # [E * outputs, WORDS] int16
    scales,  # [E, LINES, SCALES]
    zeros,  # as scales
    out,  # [E * outputs, inner]
    rows,  # E * outputs
    outputs,
    inner,
    WORDS,
    SCALES,
    LINES,
    APART: tl.constexpr,
    GROUP: tl.constexpr,
    HIGH: tl.constexpr,
    OFFSET: tl.constexpr,
    FORM: tl.constexpr,
    PADDED: tl.constexpr,
    ASM: tl.constexpr,
    TILE: tl.constexpr,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    kind: tl.constexpr = out.dtype.element_ty
    PER: tl.constexpr = 4 if FORM == "int4" or FORM == "float4" else 2
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    real = n < rows
    row = n // outputs * (LINES * SCALES) + n % outputs // HIGH
    j = tl.arange(0, APART)
    block = tl.program_id(1)
    word = tl.load(matrix + place_of(n[:, None], block * APART + j[None, :], WORDS, APART, TILE), mask=real[:, None], other=0)
    offset = no_offset(row, FORM, kind, ASM)
    for i in tl.static_range(PER):
        first = (block * PER + i) * APART
        group = first // GROUP if GROUP else 0
        scale = scale_of(scales, group, row, real, SCALES, SCALED)
        if SCALED == "e4m3":
            scale *= factor_of(scales, row, real, LINES, SCALES)
        if OFFSET:
            offset = offset_by(zero_of(scales, zeros, group, row, real, SCALES, SCALED), FORM, OFFSET, kind, ASM)
        number = unpack(word, offset, i, FORM, OFFSET, kind, ASM).to(tl.float32) * scale[:, None]
        inside = real[:, None] & (first + j < inner)[None, :] if PADDED else real[:, None]
        tl.store(out + n[:, None] * inner + (first + j)[None, :], number.to(kind), mask=inside)


def dequantize(matrix: Packed, like: Tensor) -> Tensor:
    """[..., outputs, inputs] of the type and the inputs of `like` [..., inputs]."""
    words = matrix.words
    out = like.new_empty(*words.shape[:-1], like.shape[-1])
    rows, high = words.numel() // words.shape[-1], AT_ONCE // matrix.apart
    _dequantize[(cdiv(rows, high), words.shape[-1] // matrix.apart)](
        *matrix.tensors, out, rows, matrix.outputs, out.shape[-1], *matrix.sizes.values(), **matrix.constants(like),
        ROWS=high, **overlapping(),
    )  # fmt: skip
    return out
