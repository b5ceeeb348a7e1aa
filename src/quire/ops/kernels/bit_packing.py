"""4- and 8-bit weight matrices in GPU memory, and their unpacking.

Words of 16 bits hold values that are P columns apart in the matrix, so that two neighbouring words, one register, unpack by a
shift and a mask to two neighbouring values of the activation's dtype, as tensor cores need them:

    4 bits   word j = columns j, j + P, j + 2 P, j + 3 P, from the lowest bits on, for j < P; then the next 4 P columns
    8 bits   word j = columns j, j + P

P such words are a block of a row. Blocks of TILE neighbouring rows are contiguous, so that the program of their outputs reads
contiguous memory; their next blocks follow.

Scales are plain, or packed in words of 32 bits, which can be prefetched asynchronously:

    "fp16", "bf16"   a scale, and the zero point above it, in float16
    "e8m0"           four scales of a block, powers of two
    "e4m3"           four scales of a block, 8-bit floats; the last line has a factor for each row, float32
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import JITFunction

from quire.ops.kernels.launcher import cdiv, launched, let_next_start, overlapping, wait_for_previous

# a value whose last mantissa bits count ones, the dtype name, 1, -1, and minus that value: each twice in a register
LARGE = {
    "bf16": ("0x43004300", "bf16x2", "0x3F803F80", "0xBF80BF80", "0xC300C300"),
    "fp16": ("0x64006400", "f16x2", "0x3C003C00", "0xBC00BC00", "0xE400E400"),
}
# zero points: none, integers, or any values, which are subtracted together with the large number
NO_ZEROS, WHOLE_ZEROS, ANY_ZEROS = 0, 1, 2
E4M3_BELOW = tl.constexpr(2.0**120)  # difference of exponent bias to float32
# of smaller floats: how far left their exponent and mantissa are moved, and the difference of exponent biases, as a factor
EIGHT_BITS = {"bf16": (4, "0x7B807B80"), "fp16": (7, "0x5C005C00")}
FOUR_BITS = {"bf16": (6, "0x7E807E80"), "fp16": (9, "0x74007400")}


@triton.constexpr_function
def _assembly(form, i, name, offset):
    """Return assembly that turns two words in a register, $1, into two values, $0. With an offset, $2 is added to both."""
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
    elif form == "int8" and name == "bf16":  # the lower seven bits, minus 128 where the sign is set
        lines += [f"shr.b32 u, $1, {8 * i};", "lop3.b32 t, u, 0x007F007F, c, 0xEA;", "lop3.b32 s, u, 0x00800080, c, 0xEA;"]
        lines += [f"mov.b32 u, {minus};", f"fma.rn.{kind} t, s, u, t;"]
    elif form == "int8":
        lines += [f"shr.b32 u, $1, {8 * i};", "xor.b32 u, u, 0x00800080;", "lop3.b32 t, u, 0x00FF00FF, c, 0xEA;"]
        lines += [f"mov.b32 u, {one};", "mov.b32 s, 0xE480E480;", f"fma.rn.{kind} t, t, u, s;"]  # minus 1024 + 128
    elif name == "fp16":  # hardware conversion
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
    """Return the values at a place of words [N, K] int16, plus the offset [N, 1]."""
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
                value = small.to(tl.float32) * 256.0  # the difference of exponent biases
        if FORM == "int4" or OFFSET:
            value += offset.to(tl.float32)
        return value.to(KIND)


@triton.jit
def scale_of(scales, group, row, real, SCALES, SCALED: tl.constexpr):
    """Return scales in float32, for groups and rows that broadcast; "e4m3" without the row's factor."""
    if SCALED == "":
        value = tl.load(scales + group * SCALES + row, mask=real, other=0.0).to(tl.float32)
    elif SCALED == "fp16" or SCALED == "bf16":
        value = scale_in(tl.load(scales + group * SCALES + row, mask=real, other=0), SCALED)
    else:
        value = scale_in(tl.load(scales + group // 4 * SCALES + row, mask=real, other=0) >> (group % 4 * 8), SCALED)
    return value


@triton.jit
def factor_of(scales, row, real, LINES, SCALES):
    """Return the factor of all "e4m3" scales of a row."""
    return tl.load(scales + (LINES - 1) * SCALES + row, mask=real, other=0).to(tl.float32, bitcast=True)


@triton.jit
def scale_in(word, SCALED: tl.constexpr):
    """Return the scale in the lowest bits of words."""
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
    """Return zero points in float32."""
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
    """Return [N, 1]: what is added to the stored integers, including the large number that unpacking leaves in 4-bit values."""
    if FORM == "int4" and ASM and OFFSET < 2:
        zero += 128.0 if tl.bfloat16 == KIND else 1024.0
    return (-zero).to(KIND)[:, None]


@triton.jit
def no_offset(row, FORM: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr):
    """Return `offset_by` without zero points."""
    return offset_by(tl.full(row.shape, 8.0 if FORM == "int4" else 0.0, tl.float32), FORM, 0, KIND, ASM)


WORDS_PER_PROGRAM = 1024  # of the dequantizing kernel
VALUES_PER_WORD = {"int4": 4, "float4": 4, "int8": 2, "float8": 2}


class Packed(NamedTuple):
    """A packed matrix, or one per expert: then every tensor has a leading dimension."""

    form: str  # "int4", "int8", "float8", "float4"
    words: Tensor  # [outputs, W] int16
    scales: Tensor  # [groups, outputs / high]: scales of neighbouring outputs are contiguous
    zeros: Tensor | None  # like scales; None: packed in `scales`, or there are none
    value_stride: int  # columns between two values of a word; divides `group`
    group: int  # columns per scale
    tile: int = 1  # rows whose blocks are contiguous
    scaled: str = ""  # packing of scales
    offset: int = NO_ZEROS

    @property
    def columns(self) -> int:
        """Return the number of columns. There may be more than inputs; their scales are 0."""
        return VALUES_PER_WORD[self.form] * self.words.shape[-1]

    @property
    def blocks(self) -> int:
        return self.words.shape[-1] // self.value_stride

    @property
    def outputs(self) -> int:
        return self.words.shape[-2]

    @property
    def groups(self) -> int:
        lines = self.scales.shape[-2]
        return {"e8m0": 4 * lines, "e4m3": 4 * (lines - 1)}.get(self.scaled, lines)

    def constants(self, x: Tensor) -> dict[str, Any]:
        """Return the constants of a kernel that multiplies x by the matrix."""
        return {
            "VALUE_STRIDE": self.value_stride, "GROUP": self.group if self.groups > 1 else 0,
            "HIGH": self.outputs // self.scales.shape[-1],
            "OFFSET": self.offset, "FORM": self.form, "PADDED": self.columns > x.shape[-1], "ASM": assembles(x),
            "TILE": self.tile, "SCALED": self.scaled,
        }  # fmt: skip

    @property
    def sizes(self) -> dict[str, int]:
        """Return the size arguments of kernels."""
        return {"WORDS": self.words.shape[-1], "SCALES": self.scales.shape[-1], "LINES": self.scales.shape[-2]}

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.words, self.scales, self.scales if self.zeros is None else self.zeros


def assembles(x: Tensor) -> bool:
    """Return whether values are unpacked in assembly, two at a time."""
    return x.dtype != torch.float32 and isinstance(unpack, JITFunction)


@triton.jit
def column_of(at, place: tl.constexpr, VALUE_STRIDE: tl.constexpr, FORM: tl.constexpr):
    """Return the columns of the values at a place of words `at`."""
    PER: tl.constexpr = 4 if FORM == "int4" or FORM == "float4" else 2
    return at // VALUE_STRIDE * (PER * VALUE_STRIDE) + place * VALUE_STRIDE + at % VALUE_STRIDE


@triton.jit
def place_of(row, at, WORDS, VALUE_STRIDE: tl.constexpr, TILE: tl.constexpr):
    """Return the offsets of words `at` of rows from the first word of the matrix."""
    return (
        (row // TILE).to(tl.int64) * (WORDS * TILE)
        + at // VALUE_STRIDE * (TILE * VALUE_STRIDE)
        + row % TILE * VALUE_STRIDE
        + at % VALUE_STRIDE
    )


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
    VALUE_STRIDE: tl.constexpr,
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
    j = tl.arange(0, VALUE_STRIDE)
    block = tl.program_id(1)
    word = tl.load(
        matrix + place_of(n[:, None], block * VALUE_STRIDE + j[None, :], WORDS, VALUE_STRIDE, TILE), mask=real[:, None], other=0
    )
    offset = no_offset(row, FORM, kind, ASM)
    for i in tl.static_range(PER):
        first = (block * PER + i) * VALUE_STRIDE
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
    """Return the matrix [..., outputs, inputs] in the dtype and with the inputs of `like` [..., inputs]."""
    words = matrix.words
    out = like.new_empty(*words.shape[:-1], like.shape[-1])
    rows, high = words.numel() // words.shape[-1], WORDS_PER_PROGRAM // matrix.value_stride
    _dequantize[(cdiv(rows, high), words.shape[-1] // matrix.value_stride)](
        *matrix.tensors, out, rows, matrix.outputs, out.shape[-1], *matrix.sizes.values(), **matrix.constants(like),
        ROWS=high, **overlapping(),
    )  # fmt: skip
    return out
