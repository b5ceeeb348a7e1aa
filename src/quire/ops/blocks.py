"""GGUF's block types: dequantized to floating point, or converted to integers with scales.

A tensor is a sequence of blocks; a block has one or two half-precision scales and some bits per element. Common types are
dequantized here with torch, a cache-sized chunk at a time; rare ones by the `gguf` package. Values are bit-identical to those
of ggml's reference: the order of multiplications is the same.

Functions take blocks [G, block bytes, N]. For columns of a matrix the blocks are transposed, so that the same byte of N blocks
is contiguous and every operation runs along N; for rows N is 1.
"""

import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from quire.files.gguf import FLOAT4_TYPES, GGML_TYPES, INTEGER_TYPES, READABLE_TYPES
from quire.ops.quantized_layouts import Float4, PackedInts, pack_nibbles
from quire.types.errors import ModelError

HALVES = ("Q4_0", "Q4_1", "Q5_0", "Q8_0")  # types with half-precision scales and offsets, one per group of 32
PAGE_CLUSTER_BYTES = 1 << 16  # the system maps neighbours of a file's page with it
CHUNK_ELEMENTS = 1 << 19  # dequantized at once: fits into a CPU cache

Dequantize = Callable[[Tensor, Tensor], None]  # blocks [G, block bytes, N] uint8, out [G, block elements, N] float32

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix [N, columns] in a mapped file, in blocks; blocks of floats have one element."""

    type: int  # GGML type
    columns: int
    rows: Tensor  # [N, row bytes] uint8
    order: Tensor | None = None  # [N]: row i of the matrix is row order[i] of the file; None: the same order
    file: mmap.mmap | None = field(default=None, repr=False)
    offset: int = 0  # of the rows in the file
    name: str = ""  # in the model

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, start: int, stop: int) -> Tensor:
        """Return rows of the matrix, [stop - start, row bytes]."""
        return self.rows[start:stop] if self.order is None else self.rows.index_select(0, self.order[start:stop])

    def cut(self, rows: range, columns: range) -> "QuantizedMatrix | None":
        """Return some rows as a view; with fewer columns, which must be whole blocks, a copy. None: the rows are not
        contiguous."""
        if len(rows) == len(self) and len(columns) == self.columns:
            return self
        order = None if self.order is None else self.order[rows.start : rows.stop] - rows.start
        if order is not None and (order.min() < 0 or order.max() >= len(rows)):
            return None
        _, elements, nbytes = GGML_TYPES[self.type]
        offset, some = self.offset + rows.start * self.rows.shape[1], self.rows[rows.start : rows.stop]
        if len(columns) == self.columns:
            return QuantizedMatrix(self.type, self.columns, some, order, self.file, offset, self.name)
        blocks = some[:, columns.start // elements * nbytes : columns.stop // elements * nbytes].contiguous()
        return QuantizedMatrix(self.type, len(columns), blocks, order, name=self.name)

    def forget(self) -> None:
        """Release the pages that were read from this process; the page cache still has them."""
        if self.file is not None and hasattr(mmap, "MADV_DONTNEED"):
            size = PAGE_CLUSTER_BYTES
            start, end = self.offset // size * size, -(-(self.offset + self.rows.nbytes) // size) * size
            self.file.madvise(mmap.MADV_DONTNEED, start, min(end, len(self.file)) - start)


@dataclass(frozen=True)
class IntegerMatrix:
    """A matrix [N, columns] of 4- or 8-bit integers in memory, with groups of a multiple of 32."""

    form: PackedInts

    @property
    def columns(self) -> int:
        return self.form.inputs

    def __len__(self) -> int:
        return self.form.outputs

    def forget(self) -> None:
        """Do nothing: there is no file."""

    def rows(self, start: int, stop: int) -> PackedInts:
        form = self.form
        zeros = None if form.zeros is None else form.zeros[start:stop]
        return replace(form, numbers=form.numbers[start:stop], scale=form.scale[start:stop], zeros=zeros)

    def to_integers(self, start: int, stop: int) -> "Integers":
        some = self.rows(start, stop)
        scale = some.scale.float().repeat_interleave(some.group // GROUP, -1)
        offset = None
        if some.zeros is not None:
            zeros = some.zeros.float().repeat_interleave(some.group // GROUP, -1)
            offset = scale * (2 ** (some.bits - 1) - zeros)
        return Integers(some.bits, some.unpacked(), scale, offset)


BlockMatrix = QuantizedMatrix | IntegerMatrix


def has_half_factors(stored: BlockMatrix) -> bool:
    """Return whether scales and offsets are half-precision, one per group of 32."""
    if isinstance(stored, QuantizedMatrix):
        return GGML_TYPES[stored.type][0] in HALVES
    scale = stored.form.scale.float()
    return stored.form.zeros is None and torch.equal(scale.half().float(), scale)


def cut(parts: Sequence[BlockMatrix], start: int, stop: int) -> Iterator[tuple[BlockMatrix, int, int, int]]:
    """Yield the parts that hold outputs start ... stop: part, its first row and end row, and the output of its first row."""
    first = 0
    for part in parts:
        low, high = max(start, first), min(stop, first + len(part))
        if low < high:
            yield part, low - first, high - first, low
        first += len(part)


def dequantize(raw: Tensor, type_: int, shape: tuple[int, ...]) -> Tensor:
    """Return raw [nbytes] uint8 from a file as a tensor of `shape`: float32, or the file's own float type."""
    name, elements, nbytes = GGML_TYPES[type_]
    if name not in READABLE_TYPES:
        raise ModelError(f"GGUF tensors of type {name} are not supported; supported: {', '.join(READABLE_TYPES)}")
    if name in _PLAIN:
        return raw.view(_PLAIN[name]).view(shape).clone()
    fill = DEQUANTIZE.get(name)
    if fill is None:
        return _by_package(raw, type_, shape)
    blocks = raw.view(-1, nbytes)
    out = torch.empty(blocks.shape[0], elements)
    step = CHUNK_ELEMENTS // elements
    for start in range(0, blocks.shape[0], step):
        fill(blocks[start : start + step, :, None], out[start : start + step, :, None])
    return out.view(shape)


def dequantize_columns(stored: BlockMatrix, start: int, stop: int, out: Tensor) -> None:
    """Write rows start ... stop of a matrix as columns to out [columns, stop - start], of any float type."""
    if isinstance(stored, IntegerMatrix):
        out.copy_(stored.rows(start, stop).dequantize().t())
        return
    name, elements, nbytes = GGML_TYPES[stored.type]
    fill = DEQUANTIZE.get(name)
    step = max(1, CHUNK_ELEMENTS // stored.columns)
    for first in range(start, stop, step):
        rows = stored.read(first, min(first + step, stop))
        target = out[:, first - start : first - start + len(rows)]
        if fill is None:
            wide = _by_package(rows.flatten(), stored.type, (len(rows), stored.columns)).t()
        else:
            blocks = rows.view(len(rows), -1, nbytes).permute(1, 2, 0).contiguous()
            wide = torch.empty(blocks.shape[0], elements, len(rows))
            fill(blocks, wide)
        target.copy_(wide.view(stored.columns, len(rows)))


NIBBLE_ROW = 20  # bytes of 32 elements with scale and offset


def fill_nibble_rows(stored: BlockMatrix, start: int, stop: int, out: Tensor) -> None:
    """Write rows start ... stop of a 4-bit matrix in blocks of 32 to out [groups, 20] uint8:

    [ element 0, 16 | 1, 17 | ... | 15, 31 | scale | offset ]   low nibble first; scale and offset in half precision
    """
    assert isinstance(stored, QuantizedMatrix)
    name, _, nbytes = GGML_TYPES[stored.type]
    _NIBBLE_ROWS[name](stored.read(start, stop).view(-1, nbytes), out)


def has_nibble_rows(stored: BlockMatrix) -> bool:
    return isinstance(stored, QuantizedMatrix) and GGML_TYPES[stored.type][0] in _NIBBLE_ROWS


def _nibble_rows_q4_0(blocks: Tensor, out: Tensor) -> None:
    words, halves = out.view(torch.int16), blocks.view(torch.int16)  # [groups, 10], [groups, 9]
    words[:, :8], words[:, 8] = halves[:, 1:], halves[:, 0]
    torch.mul(halves[:, 0].view(torch.float16), -8, out=words.view(torch.float16)[:, 9])


def _nibble_rows_q4_1(blocks: Tensor, out: Tensor) -> None:
    """Shift all words by one: a block begins with the word that a row ends with. Then set the last word of each row."""
    words, source = out.view(torch.int32), blocks.view(torch.int32)  # [groups, 5]
    words.view(-1)[:-1] = source.view(-1)[1:]
    words[:, 4] = source[:, 0]


_NIBBLE_ROWS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "Q4_0": _nibble_rows_q4_0,
    "Q4_1": _nibble_rows_q4_1,
}


def _by_package(raw: Tensor, type_: int, shape: tuple[int, ...]) -> Tensor:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize as by_package

    rows = raw.numpy().reshape(prod(shape[:-1]), -1)
    return torch.from_numpy(by_package(rows, GGMLQuantizationType(type_))).view(shape)


def _split(x: Tensor, outer: int, inner: int) -> Tensor:
    """Return x [G, outer * inner, N] as [G, outer, inner, N]."""
    return x.view(len(x), outer, inner, -1)


def half_at(blocks: Tensor, start: int, count: int = 1) -> Tensor:
    """Return `count` half-precision values from byte `start` of each block as [G, count, N] float32."""
    low, high = blocks[:, start : start + 2 * count : 2], blocks[:, start + 1 : start + 2 * count : 2]
    return (low.to(torch.int16) | high.to(torch.int16) << 8).view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Return packed [G, n, N] as [G, 2n, N]: all low nibbles, then all high nibbles."""
    return slices(packed, 4).flatten(1, 2)


def slices(packed: Tensor, bits: int) -> Tensor:
    """Return packed [..., n, N] as [..., 8 / bits, n, N]: the lowest `bits` of every byte, the next, ..."""
    down = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device).view(-1, 1, 1)
    return (packed.unsqueeze(-3) >> down).bitwise_and_((1 << bits) - 1)


def _bits(packed: Tensor) -> Tensor:
    """Return the bits of packed [G, n, N] as [G, 8n, N], lowest first."""
    return slices(packed, 1).transpose(1, 2).flatten(1, 2)


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks[:, 2:].view(torch.int8)).mul_(half_at(blocks, 0))


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(_nibbles(blocks[:, 2:])).sub_(8).mul_(half_at(blocks, 0))


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    out.copy_(_nibbles(blocks[:, 4:])).mul_(half_at(blocks, 0)).add_(half_at(blocks, 2))


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(_nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4).sub_(16).mul_(half_at(blocks, 0))


def _q5_1(blocks: Tensor, out: Tensor) -> None:
    out.copy_(_nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4).mul_(half_at(blocks, 0)).add_(half_at(blocks, 2))


def scales_and_minima(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the 8 scales and 8 minima of 6 bits that K blocks store in 12 bytes, each [G, 8, N]."""
    a, b, c = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat((a & 63, (c & 15) | (a >> 6 << 4)), dim=1)
    minima = torch.cat((b & 63, (c >> 4) | (b >> 6 << 4)), dim=1)
    return scales, minima


def _scale_k(blocks: Tensor, out: Tensor) -> None:
    """Apply scales and minima per 32 elements to out [G, 256, N], which holds integers."""
    both = half_at(blocks, 0, 2)
    scales, minima = scales_and_minima(blocks[:, 4:16])
    groups = _split(out, 8, 32)
    groups.mul_((both[:, :1] * scales).unsqueeze(2)).sub_((both[:, 1:] * minima).unsqueeze(2))


def nibble_groups(packed: Tensor) -> Tensor:
    """Return packed [G, 128, N] as [G, 256, N]: 32 bytes hold the low nibbles of one group and the high nibbles of the next."""
    return slices(_split(packed, 4, 32), 4).flatten(1, 3)


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    out.copy_(nibble_groups(blocks[:, 16:]))
    _scale_k(blocks, out)


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    out.copy_(nibble_groups(blocks[:, 48:]) | slices(blocks[:, 16:48], 1).flatten(1, 2) << 4)
    _scale_k(blocks, out)


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    low = slices(_split(blocks[:, :128], 2, 64), 4).flatten(1, 3)
    high = slices(_split(blocks[:, 128:192], 2, 32), 2).flatten(1, 3)
    out.copy_(low | high << 4).sub_(32)
    scales = blocks[:, 192:208].view(torch.int8) * half_at(blocks, 208)
    _split(out, 16, 16).mul_(scales.unsqueeze(2))


DEQUANTIZE: dict[str, Dequantize] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


GROUP = 32  # elements that share a scale


@dataclass(frozen=True)
class Integers:
    """A matrix [N, K] of 4- or 8-bit integers: value = scale * (number - 2 ** (bits - 1)) + offset, by groups of 32."""

    bits: int
    numbers: Tensor  # [N, K] uint8
    scale: Tensor  # [N, K / 32] float32
    offset: Tensor | None  # [N, K / 32] float32

    def widened(self) -> "Integers":
        """Return the same values with 8-bit integers."""
        return self if self.bits == 8 else Integers(8, self.numbers + 120, self.scale, self.offset)


def to_integers(stored: BlockMatrix, start: int = 0, stop: int | None = None) -> Integers:
    """Return rows as integers. Types with a scale per 32 elements keep their values exactly; others are rounded to 8 bits."""
    if isinstance(stored, IntegerMatrix):
        return stored.to_integers(start, len(stored) if stop is None else stop)
    name, _, nbytes = GGML_TYPES[stored.type]
    rows = stored.read(start, len(stored) if stop is None else stop)
    convert = TO_INTEGERS.get(name)
    if convert is None:
        return _rounded(dequantize(rows.flatten(), stored.type, (len(rows), stored.columns)))
    bits, *parts = convert(rows.reshape(-1, nbytes).t().contiguous()[None])
    numbers, scale, offset = (None if part is None else part[0].t().reshape(len(rows), -1) for part in parts)
    assert numbers is not None and scale is not None
    return Integers(bits, numbers, scale, offset)


def _rounded(values: Tensor) -> Integers:
    groups = values.float().view(len(values), -1, GROUP)
    scale = groups.abs().amax(-1, keepdim=True) / 127
    numbers = (groups / scale.clamp(min=torch.finfo(torch.float32).tiny)).round_().add_(128)
    return Integers(8, numbers.to(torch.uint8).view(values.shape), scale.squeeze(-1), None)


IntegerParts = tuple[int, Tensor, Tensor, Tensor | None]  # bits, integers [1, elements, N], scale and offset [1, groups, N]


def _integers_q8_0(blocks: Tensor) -> IntegerParts:
    return 8, blocks[:, 2:] ^ 128, half_at(blocks, 0), None


def _integers_q4_0(blocks: Tensor) -> IntegerParts:
    return 4, _nibbles(blocks[:, 2:]), half_at(blocks, 0), None


def _integers_q4_1(blocks: Tensor) -> IntegerParts:
    scale = half_at(blocks, 0)
    return 4, _nibbles(blocks[:, 4:]), scale, half_at(blocks, 2) + 8 * scale


def _integers_q5_0(blocks: Tensor) -> IntegerParts:
    return 8, (_nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4) + 112, half_at(blocks, 0), None


def _integers_q5_1(blocks: Tensor) -> IntegerParts:
    scale = half_at(blocks, 0)
    return 8, (_nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4) + 112, scale, half_at(blocks, 2) + 16 * scale


def _integers_q4_k(blocks: Tensor) -> IntegerParts:
    both = half_at(blocks, 0, 2)
    scales, minima = scales_and_minima(blocks[:, 4:16])
    scale = both[:, :1] * scales
    return 4, nibble_groups(blocks[:, 16:]), scale, 8 * scale - both[:, 1:] * minima


TO_INTEGERS: dict[str, Callable[[Tensor], IntegerParts]] = {
    "Q8_0": _integers_q8_0,
    "Q4_0": _integers_q4_0,
    "Q4_1": _integers_q4_1,
    "Q5_0": _integers_q5_0,
    "Q5_1": _integers_q5_1,
    "Q4_K": _integers_q4_k,
}


VALUES_AT_ONCE = 1 << 25  # converted together
MAX_ZERO_POINT = 6e4  # in float16 (`packed.py`)


def has_layout(type_: int) -> bool:
    return GGML_TYPES[type_][0] in INTEGER_TYPES | FLOAT4_TYPES


def to_layout(stored: QuantizedMatrix, device: torch.device) -> PackedInts | Float4:
    """Return the matrix in a quantized layout on the device, where it is converted."""
    name, _, nbytes = GGML_TYPES[stored.type]
    if name in FLOAT4_TYPES:
        return _floats_of(stored, nbytes, device)
    convert = ALL_TO_INTEGERS[name]
    bits, group, _ = INTEGER_TYPES[name]
    parts = list[tuple[Tensor, Tensor, Tensor | None]]()
    step = max(1, VALUES_AT_ONCE // stored.columns)
    for start in range(0, len(stored), step):
        rows = stored.read(start, min(start + step, len(stored))).to(device)
        numbers, scale, offset = _by_rows(convert(rows.reshape(-1, nbytes).t().contiguous()[None]), len(rows))
        numbers, scale, zeros = (numbers, scale, None) if offset is None else _with_zeros(numbers, scale, offset, bits, group)
        parts.append((pack_nibbles(numbers) if bits == 4 else numbers, scale, zeros))
    numbers, scale = (torch.cat([part[index] for part in parts]) for index in (0, 1))  # type: ignore[misc]
    zeros = None if parts[0][2] is None else torch.cat([part[2] for part in parts])  # type: ignore[misc]
    return PackedInts(bits, group, numbers, _shortened(scale), zeros, None)


def _floats_of(stored: QuantizedMatrix, nbytes: int, device: torch.device) -> Float4:
    """Return an MXFP4 matrix. A block is an exponent and 16 bytes: 16 values in low nibbles, then 16 in high ones."""
    blocks = stored.read(0, len(stored)).to(device).view(len(stored), -1, nbytes)
    halves = blocks[..., 1:]
    numbers = pack_nibbles(torch.cat((halves & 15, halves >> 4), dim=-1))
    return Float4("e2m1", 2 * (nbytes - 1), numbers.flatten(1), blocks[..., 0].contiguous())


def stack_layouts(matrices: list[Any]) -> PackedInts | Float4:
    """Stack one matrix per expert, all of one type."""
    first: PackedInts | Float4 = matrices[0]
    numbers = torch.stack([matrix.numbers for matrix in matrices])
    if isinstance(first, Float4):
        return replace(first, numbers=numbers, scale=torch.stack([matrix.scale for matrix in matrices]))
    dtype = torch.float32 if any(matrix.scale.dtype == torch.float32 for matrix in matrices) else torch.float16
    zeros = None if first.zeros is None else torch.stack([matrix.zeros for matrix in matrices])
    return replace(first, numbers=numbers, scale=torch.stack([matrix.scale.to(dtype) for matrix in matrices]), zeros=zeros)


def _by_rows(parts: IntegerParts, rows: int) -> tuple[Tensor, Tensor, Tensor | None]:
    _, numbers, scale, offset = parts
    each = [None if part is None else part[0].t().reshape(rows, -1) for part in (numbers, scale, offset)]
    return each[0], each[1], each[2]  # type: ignore[return-value]


def _with_zeros(numbers: Tensor, scale: Tensor, offset: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return zero points: scale * (number - middle) + offset = scale * (number - zero).

    Where the zero point would be too large, the group is constant: all its integers get the same value, and the offset is the
    scale.
    """
    middle = 2 ** (bits - 1)
    zeros = middle - offset / scale
    constant = ~(zeros.abs() <= MAX_ZERO_POINT)  # NaN, too: 0 / 0
    scale = torch.where(constant, offset, scale)
    zeros = torch.where(constant, middle - 1.0, zeros)
    if bool(constant.any()):
        numbers = torch.where(constant.repeat_interleave(group, -1), middle, numbers).to(torch.uint8)
    return numbers, scale, zeros


def _shortened(scale: Tensor) -> Tensor:
    """Return scales in half precision, unless they are so small that precision is lost."""
    half = scale.half()
    close = (half.float() - scale).abs() <= scale.abs() * 2.0**-11
    return half if bool(close.all()) else scale


def _integers_q5_k(blocks: Tensor) -> IntegerParts:
    both = half_at(blocks, 0, 2)
    scales, minima = scales_and_minima(blocks[:, 4:16])
    scale = both[:, :1] * scales
    numbers = nibble_groups(blocks[:, 48:]) | slices(blocks[:, 16:48], 1).flatten(1, 2) << 4
    return 8, numbers + 112, scale, 16 * scale - both[:, 1:] * minima


def _integers_q6_k(blocks: Tensor) -> IntegerParts:
    low = slices(blocks[:, :128].reshape(1, 2, 64, -1), 4).flatten(1, 3)
    high = slices(blocks[:, 128:192].reshape(1, 2, 32, -1), 2).flatten(1, 3)
    return 8, (low | high << 4) + 96, blocks[:, 192:208].view(torch.int8) * half_at(blocks, 208), None


ALL_TO_INTEGERS: dict[str, Callable[[Tensor], IntegerParts]] = {**TO_INTEGERS, "Q5_K": _integers_q5_k, "Q6_K": _integers_q6_k}
