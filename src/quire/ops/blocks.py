"""GGUF's block types: dequantized to floating point, or taken apart into integers with scales.

A tensor is a row of blocks; a block is one or two half-precision scales and a few bits per element. The common types are
done here with torch, a cache-sized run at a time; the rare ones by the `gguf` package. Values are bit for bit
those of ggml's reference: the order of multiplications is kept.

That is written for blocks [G, block bytes, N]. For columns of a matrix the blocks are turned, so that the same byte of N blocks
lies together and every operation runs along N; for rows of it N is 1, and nothing is turned.
"""

import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from quire.files.gguf import FLOATS, GGML_TYPES, READABLE_TYPES, WHOLE_NUMBERS
from quire.ops.quantized_layouts import Float4, PackedInts, pack_nibbles
from quire.types.errors import ModelError

HALVES = ("Q4_0", "Q4_1", "Q5_0", "Q8_0")  # types whose scales and offsets are in half precision, one to a group of 32
AROUND = 1 << 16  # bytes: with a page of a file, the system maps its neighbours
RUN_ELEMENTS = 1 << 19  # dequantized at once: small enough for a cache, and many blocks side by side

Dequantize = Callable[[Tensor, Tensor], None]  # blocks [G, block bytes, N] uint8, out [G, block elements, N] float32

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix [N, columns] as a file has it, in blocks (those of floats have one element): mapped, not copied."""

    type: int  # ggml's
    columns: int
    rows: Tensor  # [N, row bytes] uint8
    order: Tensor | None = None  # [N]: row i of the matrix is row order[i] of the file; None = they lie in order
    file: mmap.mmap | None = field(default=None, repr=False)
    offset: int = 0  # of the rows in the file
    name: str = ""  # in the model

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, start: int, stop: int) -> Tensor:
        """Rows of the matrix, [stop - start, row bytes]."""
        return self.rows[start:stop] if self.order is None else self.rows.index_select(0, self.order[start:stop])

    def cut(self, rows: range, columns: range) -> "QuantizedMatrix | None":
        """Some rows where they lie; of some columns, which are whole blocks, a copy. None = the rows lie among others."""
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
        """Lets go of the pages that were read. The system still has them, and gives them back for little."""
        if self.file is not None and hasattr(mmap, "MADV_DONTNEED"):
            start, end = self.offset // AROUND * AROUND, -(-(self.offset + self.rows.nbytes) // AROUND) * AROUND
            self.file.madvise(mmap.MADV_DONTNEED, start, min(end, len(self.file)) - start)


@dataclass(frozen=True)
class IntegerMatrix:
    """A matrix [N, columns] of 4- or 8-bit numbers in memory, whose groups are whole numbers of 32."""

    form: PackedInts

    @property
    def columns(self) -> int:
        return self.form.inputs

    def __len__(self) -> int:
        return self.form.outputs

    def forget(self) -> None:
        """It is in no file."""

    def rows(self, start: int, stop: int) -> PackedInts:
        form = self.form
        zeros = None if form.zeros is None else form.zeros[start:stop]
        return replace(form, numbers=form.numbers[start:stop], scale=form.scale[start:stop], zeros=zeros)

    def take_apart(self, start: int, stop: int) -> "Integers":
        some = self.rows(start, stop)
        scale = some.scale.float().repeat_interleave(some.group // GROUP, -1)
        offset = None
        if some.zeros is not None:
            zeros = some.zeros.float().repeat_interleave(some.group // GROUP, -1)
            offset = scale * (2 ** (some.bits - 1) - zeros)
        return Integers(some.bits, some.unpacked(), scale, offset)


BlockMatrix = QuantizedMatrix | IntegerMatrix


def has_half_factors(stored: BlockMatrix) -> bool:
    """Are its scales and offsets numbers of half precision, one to a group of 32?"""
    if isinstance(stored, QuantizedMatrix):
        return GGML_TYPES[stored.type][0] in HALVES
    scale = stored.form.scale.float()
    return stored.form.zeros is None and torch.equal(scale.half().float(), scale)


def cut(parts: Sequence[BlockMatrix], start: int, stop: int) -> Iterator[tuple[BlockMatrix, int, int, int]]:
    """Outputs start ... stop as rows of parts: part, its first row and the end, and which output the first row is."""
    first = 0
    for part in parts:
        low, high = max(start, first), min(stop, first + len(part))
        if low < high:
            yield part, low - first, high - first, low
        first += len(part)


def dequantize(raw: Tensor, type_: int, shape: tuple[int, ...]) -> Tensor:
    """raw [nbytes] uint8, as it lies in the file -> a tensor of `shape`: float32, or the file's own floating type."""
    name, elements, nbytes = GGML_TYPES[type_]
    if name not in READABLE_TYPES:
        raise ModelError(f"GGUF tensors of type {name} cannot be read; these can: {', '.join(READABLE_TYPES)}")
    if name in _PLAIN:
        return raw.view(_PLAIN[name]).view(shape).clone()
    fill = DEQUANTIZE.get(name)
    if fill is None:
        return _by_package(raw, type_, shape)
    blocks = raw.view(-1, nbytes)
    out = torch.empty(blocks.shape[0], elements)
    run = RUN_ELEMENTS // elements
    for start in range(0, blocks.shape[0], run):
        fill(blocks[start : start + run, :, None], out[start : start + run, :, None])
    return out.view(shape)


def dequantize_columns(stored: BlockMatrix, start: int, stop: int, out: Tensor) -> None:
    """Rows start ... stop of a matrix as columns: out [columns, stop - start], of any floating type."""
    if isinstance(stored, IntegerMatrix):
        out.copy_(stored.rows(start, stop).dequantize().t())
        return
    name, elements, nbytes = GGML_TYPES[stored.type]
    fill = DEQUANTIZE.get(name)
    run = max(1, RUN_ELEMENTS // stored.columns)
    for first in range(start, stop, run):
        rows = stored.read(first, min(first + run, stop))
        place = out[:, first - start : first - start + len(rows)]
        if fill is None:
            wide = _by_package(rows.flatten(), stored.type, (len(rows), stored.columns)).t()
        else:
            blocks = rows.view(len(rows), -1, nbytes).permute(1, 2, 0).contiguous()
            wide = torch.empty(blocks.shape[0], elements, len(rows))
            fill(blocks, wide)
        place.copy_(wide.view(stored.columns, len(rows)))


NIBBLE_ROW = 20  # bytes of 32 elements with scale and offset


def fill_nibble_rows(stored: BlockMatrix, start: int, stop: int, out: Tensor) -> None:
    """Rows start ... stop of a matrix of 4-bit numbers in blocks of 32, each block as out's rows [groups, 20] uint8 have them:

    [ element 0, 16 | 1, 17 | ... | 15, 31 | scale | offset ]   the lower 4 bits first; both numbers in half precision
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
    """A block begins with what a row ends with: all moves by that, then each gets its own instead of its neighbour's."""
    words, there = out.view(torch.int32), blocks.view(torch.int32)  # [groups, 5]
    words.view(-1)[:-1] = there.view(-1)[1:]
    words[:, 4] = there[:, 0]


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
    """[G, outer * inner, N] -> [G, outer, inner, N]."""
    return x.view(len(x), outer, inner, -1)


def half_at(blocks: Tensor, start: int, count: int = 1) -> Tensor:
    """`count` half-precision numbers from byte `start` of each block: [G, count, N] float32."""
    low, high = blocks[:, start : start + 2 * count : 2], blocks[:, start + 1 : start + 2 * count : 2]
    return (low.to(torch.int16) | high.to(torch.int16) << 8).view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """[G, n, N] -> [G, 2n, N]: all low halves, then all high halves."""
    return slices(packed, 4).flatten(1, 2)


def slices(packed: Tensor, bits: int) -> Tensor:
    """[..., n, N] -> [..., 8 / bits, n, N]: the lowest `bits` of every byte, the next, ..."""
    down = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device).view(-1, 1, 1)
    return (packed.unsqueeze(-3) >> down).bitwise_and_((1 << bits) - 1)


def _bits(packed: Tensor) -> Tensor:
    """[G, n, N] -> [G, 8n, N] of 0 and 1, lowest bit first."""
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
    """The 8 scales and 8 minima of 6 bits each that K blocks keep in 12 bytes: two of [G, 8, N].

    bytes 0-3    low 6 bits: scales 0-3    high 2 bits: top of scales 4-7
    bytes 4-7    low 6 bits: minima 0-3    high 2 bits: top of minima 4-7
    bytes 8-11   low nibble: rest of scales 4-7    high nibble: rest of minima 4-7
    """
    a, b, c = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat((a & 63, (c & 15) | (a >> 6 << 4)), dim=1)
    minima = torch.cat((b & 63, (c >> 4) | (b >> 6 << 4)), dim=1)
    return scales, minima


def _scale_k(blocks: Tensor, out: Tensor) -> None:
    """out [G, 256, N] holds the integers; each 32 of them have a scale and a minimum."""
    both = half_at(blocks, 0, 2)
    scales, minima = scales_and_minima(blocks[:, 4:16])
    groups = _split(out, 8, 32)
    groups.mul_((both[:, :1] * scales).unsqueeze(2)).sub_((both[:, 1:] * minima).unsqueeze(2))


def nibble_groups(packed: Tensor) -> Tensor:
    """[G, 128, N] -> [G, 256, N]: 32 bytes hold the low halves of one group and the high halves of the next."""
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
    """A matrix [N, K] as whole numbers of 4 or 8 bits: value = scale * (number - 2 ** (bits - 1)) + offset, by groups of 32."""

    bits: int
    numbers: Tensor  # [N, K] uint8
    scale: Tensor  # [N, K / 32] float32
    offset: Tensor | None  # [N, K / 32] float32

    def widened(self) -> "Integers":
        """The same values with numbers of 8 bits."""
        return self if self.bits == 8 else Integers(8, self.numbers + 120, self.scale, self.offset)


def take_apart(stored: BlockMatrix, start: int = 0, stop: int | None = None) -> Integers:
    """Its rows, or some. Types with a scale per 32 elements keep their values exactly; others are rounded to 8 bits."""
    if isinstance(stored, IntegerMatrix):
        return stored.take_apart(start, len(stored) if stop is None else stop)
    name, _, nbytes = GGML_TYPES[stored.type]
    rows = stored.read(start, len(stored) if stop is None else stop)
    apart = APART.get(name)
    if apart is None:
        return _rounded(dequantize(rows.flatten(), stored.type, (len(rows), stored.columns)))
    bits, *parts = apart(rows.reshape(-1, nbytes).t().contiguous()[None])
    numbers, scale, offset = (None if part is None else part[0].t().reshape(len(rows), -1) for part in parts)
    assert numbers is not None and scale is not None
    return Integers(bits, numbers, scale, offset)


def _rounded(values: Tensor) -> Integers:
    groups = values.float().view(len(values), -1, GROUP)
    scale = groups.abs().amax(-1, keepdim=True) / 127
    numbers = (groups / scale.clamp(min=torch.finfo(torch.float32).tiny)).round_().add_(128)
    return Integers(8, numbers.to(torch.uint8).view(values.shape), scale.squeeze(-1), None)


Apart = tuple[int, Tensor, Tensor, Tensor | None]  # bits, numbers [1, elements, N], scale and offset [1, groups, N]


def _apart_q8_0(blocks: Tensor) -> Apart:
    return 8, blocks[:, 2:] ^ 128, half_at(blocks, 0), None


def _apart_q4_0(blocks: Tensor) -> Apart:
    return 4, _nibbles(blocks[:, 2:]), half_at(blocks, 0), None


def _apart_q4_1(blocks: Tensor) -> Apart:
    scale = half_at(blocks, 0)
    return 4, _nibbles(blocks[:, 4:]), scale, half_at(blocks, 2) + 8 * scale


def _apart_q5_0(blocks: Tensor) -> Apart:
    return 8, (_nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4) + 112, half_at(blocks, 0), None


def _apart_q5_1(blocks: Tensor) -> Apart:
    scale = half_at(blocks, 0)
    return 8, (_nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4) + 112, scale, half_at(blocks, 2) + 16 * scale


def _apart_q4_k(blocks: Tensor) -> Apart:
    both = half_at(blocks, 0, 2)
    scales, minima = scales_and_minima(blocks[:, 4:16])
    scale = both[:, :1] * scales
    return 4, nibble_groups(blocks[:, 16:]), scale, 8 * scale - both[:, 1:] * minima


APART: dict[str, Callable[[Tensor], Apart]] = {
    "Q8_0": _apart_q8_0,
    "Q4_0": _apart_q4_0,
    "Q4_1": _apart_q4_1,
    "Q5_0": _apart_q5_0,
    "Q5_1": _apart_q5_1,
    "Q4_K": _apart_q4_k,
}


AT_ONCE = 1 << 25  # numbers that are taken apart together
FARTHEST = 6e4  # zero point, as float16 has them (`packed.py`)


def has_form(type_: int) -> bool:
    return GGML_TYPES[type_][0] in WHOLE_NUMBERS | FLOATS


def form_of(stored: QuantizedMatrix, device: torch.device) -> PackedInts | Float4:
    """In the device's memory, which is where it is taken apart."""
    name, _, nbytes = GGML_TYPES[stored.type]
    if name in FLOATS:
        return _floats_of(stored, nbytes, device)
    apart = _APART[name]
    bits, group, _ = WHOLE_NUMBERS[name]
    parts = list[tuple[Tensor, Tensor, Tensor | None]]()
    step = max(1, AT_ONCE // stored.columns)
    for start in range(0, len(stored), step):
        rows = stored.read(start, min(start + step, len(stored))).to(device)
        numbers, scale, offset = _by_rows(apart(rows.reshape(-1, nbytes).t().contiguous()[None]), len(rows))
        numbers, scale, zeros = (numbers, scale, None) if offset is None else _with_zeros(numbers, scale, offset, bits, group)
        parts.append((pack_nibbles(numbers) if bits == 4 else numbers, scale, zeros))
    numbers, scale = (torch.cat([part[index] for part in parts]) for index in (0, 1))  # type: ignore[misc]
    zeros = None if parts[0][2] is None else torch.cat([part[2] for part in parts])  # type: ignore[misc]
    return PackedInts(bits, group, numbers, _shortened(scale), zeros, None)


def _floats_of(stored: QuantizedMatrix, nbytes: int, device: torch.device) -> Float4:
    """A block is a power of two and 16 bytes: the first 16 numbers in their lower halves, the others in their upper ones."""
    blocks = stored.read(0, len(stored)).to(device).view(len(stored), -1, nbytes)
    halves = blocks[..., 1:]
    numbers = pack_nibbles(torch.cat((halves & 15, halves >> 4), dim=-1))
    return Float4("e2m1", 2 * (nbytes - 1), numbers.flatten(1), blocks[..., 0].contiguous())


def stack_forms(forms: list[Any]) -> PackedInts | Float4:
    """One of each expert, all of one type."""
    first: PackedInts | Float4 = forms[0]
    numbers = torch.stack([form.numbers for form in forms])
    if isinstance(first, Float4):
        return replace(first, numbers=numbers, scale=torch.stack([form.scale for form in forms]))
    dtype = torch.float32 if any(form.scale.dtype == torch.float32 for form in forms) else torch.float16
    zeros = None if first.zeros is None else torch.stack([form.zeros for form in forms])
    return replace(first, numbers=numbers, scale=torch.stack([form.scale.to(dtype) for form in forms]), zeros=zeros)


def _by_rows(apart: Apart, rows: int) -> tuple[Tensor, Tensor, Tensor | None]:
    _, numbers, scale, offset = apart
    each = [None if part is None else part[0].t().reshape(rows, -1) for part in (numbers, scale, offset)]
    return each[0], each[1], each[2]  # type: ignore[return-value]


def _with_zeros(numbers: Tensor, scale: Tensor, offset: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """scale * (number - middle) + offset = scale * (number - zero). Where the offset is all that counts, the group has one
    number, and the offset is its scale."""
    middle = 2 ** (bits - 1)
    zeros = middle - offset / scale
    constant = ~(zeros.abs() <= FARTHEST)  # NaN, too: 0 / 0
    scale = torch.where(constant, offset, scale)
    zeros = torch.where(constant, middle - 1.0, zeros)
    if bool(constant.any()):
        numbers = torch.where(constant.repeat_interleave(group, -1), middle, numbers).to(torch.uint8)
    return numbers, scale, zeros


def _shortened(scale: Tensor) -> Tensor:
    """In half precision, unless they are so small that it shows."""
    half = scale.half()
    close = (half.float() - scale).abs() <= scale.abs() * 2.0**-11
    return half if bool(close.all()) else scale


def _apart_q5_k(blocks: Tensor) -> Apart:
    both = half_at(blocks, 0, 2)
    scales, minima = scales_and_minima(blocks[:, 4:16])
    scale = both[:, :1] * scales
    numbers = nibble_groups(blocks[:, 48:]) | slices(blocks[:, 16:48], 1).flatten(1, 2) << 4
    return 8, numbers + 112, scale, 16 * scale - both[:, 1:] * minima


def _apart_q6_k(blocks: Tensor) -> Apart:
    low = slices(blocks[:, :128].reshape(1, 2, 64, -1), 4).flatten(1, 3)
    high = slices(blocks[:, 128:192].reshape(1, 2, 32, -1), 2).flatten(1, 3)
    return 8, (low | high << 4) + 96, blocks[:, 192:208].view(torch.int8) * half_at(blocks, 208), None


_APART: dict[str, Callable[[Tensor], Apart]] = {**APART, "Q5_K": _apart_q5_k, "Q6_K": _apart_q6_k}
