"""Layouts of quantized matrices, independent of the checkpoint's format: few, so that few kernels serve all.

Everything is row-major along the inputs K. A matrix may have dimensions before its outputs N: experts have one. `cut` returns
one matrix of a stack. 4-bit values are two per byte, that of the even input in the low nibble.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import cache, cached_property, reduce
from math import gcd
from typing import Any, Literal, Protocol, Self

import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_FP4 = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
FP4 = tuple(sign * value / 12 for sign in (1, -1) for value in _FP4)
TABLES = {"e2m1": E2M1, "nf4": NF4, "fp4": FP4}
Code = Literal["e2m1", "nf4", "fp4"]


class Activation(StrEnum):
    """Activation quantization of an 8-bit GEMM. The float32 reference does not apply it."""

    NONE = "none"  # weights only
    TOKEN = "token"  # scale per token
    GROUP = "group"  # scale per 128 values of a token
    TENSOR = "tensor"  # static scale from the checkpoint


class QuantizedLayout(Protocol):
    @property
    def kind(self) -> str:
        """Return the name in `DeviceFacts.keeps`."""
        ...

    @property
    def outputs(self) -> int: ...

    @property
    def inputs(self) -> int: ...

    def dequantize(self) -> Tensor:
        """Return [..., N, K] float32, with the inputs in the checkpoint's order."""
        ...

    def cut(self, index: int) -> Self:
        """Return one matrix of a stack."""
        ...


class _Stack:
    numbers: Tensor  # [..., N, K], or several values in one

    @property
    def outputs(self) -> int:
        return self.numbers.shape[-2]

    @property
    def inputs(self) -> int:
        return self.numbers.shape[-1]

    def cut(self, index: int) -> Self:
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        tensors = {name: value[index] for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **tensors)  # type: ignore[type-var]


@dataclass(frozen=True)
class PackedInts(_Stack):
    """value = scale * (number - zero). Products take rows in the model's dtype."""

    bits: int  # 4 or 8
    group: int  # inputs per scale; divides K
    numbers: Tensor  # [..., N, K * bits / 8] uint8
    scale: Tensor  # [..., N, K / group], in the checkpoint's dtype
    # [..., N, K / group] uint8 (4-bit: at most 16) or float32; None: all are 2 ** (bits - 1)
    zeros: Tensor | None
    order: Tensor | None  # [..., K] int32: column k belongs to input order[k]; None: in order

    @property
    def kind(self) -> str:
        return f"int{self.bits}"

    @property
    def inputs(self) -> int:
        return self.numbers.shape[-1] * 8 // self.bits

    def unpacked(self) -> Tensor:
        """Return the values [..., N, K] uint8."""
        return unpack_nibbles(self.numbers) if self.bits == 4 else self.numbers

    def divided(self, bits: int, group: int, dtype: torch.dtype) -> "PackedInts":
        """Return the same values with more bits, smaller groups and another dtype of scales."""
        if (bits, group, dtype) == (self.bits, self.group, self.scale.dtype):
            return self
        moved = 2 ** (bits - 1) - 2 ** (self.bits - 1)  # the middle stays the middle
        numbers = self.unpacked() + moved if moved else self.numbers
        times = self.group // group
        zeros = None if self.zeros is None else (self.zeros + moved).repeat_interleave(times, -1)
        return PackedInts(bits, group, numbers, self.scale.to(dtype).repeat_interleave(times, -1), zeros, self.order)

    def dequantize(self) -> Tensor:
        zeros = 2 ** (self.bits - 1) if self.zeros is None else self.zeros.float().unsqueeze(-1)
        values = (in_groups(self.unpacked().float(), self.group) - zeros) * self.scale.float().unsqueeze(-1)
        values = values.flatten(-2)
        if self.order is None:
            return values
        places = self.order.long().unsqueeze(-2).expand(values.shape)
        return torch.empty_like(values).scatter_(-1, places, values)


@dataclass(frozen=True)
class Float8(_Stack):
    """fp8: value = scale * number, by blocks of `rows` outputs and `columns` inputs; the last ones may be smaller.

    Per channel: rows = 1, columns = K. A scale per tensor is repeated for each channel.
    """

    rows: int
    columns: int
    numbers: Tensor  # [..., N, K] float8_e4m3fn
    scale: Tensor  # [..., N / rows, K / columns], both rounded up, float32
    activation: Activation = Activation.NONE
    input_scale: Tensor | None = None  # [...] float32, with Activation.TENSOR

    kind = "fp8"

    def each_scale(self) -> Tensor:
        """Return scales that broadcast to [..., N, K]."""
        scale = self.scale if self.rows == 1 else self.scale.repeat_interleave(self.rows, -2)[..., : self.outputs, :]
        return scale if scale.shape[-1] == 1 else scale.repeat_interleave(self.columns, -1)[..., : self.inputs]

    def dequantize(self) -> Tensor:
        return self.numbers.float() * self.each_scale()


@dataclass(frozen=True)
class Int8(_Stack):
    """W8A8: value = scale * number. Activations are quantized to 8 bits, too."""

    numbers: Tensor  # [..., N, K] int8
    scale: Tensor  # [..., N, 1] float32
    activation: Activation = Activation.TOKEN

    kind = "w8a8"

    def dequantize(self) -> Tensor:
        return self.numbers.float() * self.scale


@dataclass(frozen=True)
class Float4(_Stack):
    """4-bit floats: value = table[number] * scale * factor. nvfp4 (e2m1, groups of 16, a factor), mxfp4 (e2m1, groups of 32,
    powers of two), bitsandbytes' nf4 and fp4. Activations have the model's dtype.
    """

    code: Code  # which table
    group: int
    numbers: Tensor  # [..., N, K / 2] uint8
    scale: Tensor  # [..., N, K / group] float8_e4m3fn, float32, or uint8: 2 ** (number - 127)
    factor: Tensor | None = None  # [..., N, 1] float32

    kind = "fp4"

    @property
    def inputs(self) -> int:
        return 2 * self.numbers.shape[-1]

    def dequantize(self) -> Tensor:
        values = in_groups(table_of(self.code, self.numbers.device)[unpack_nibbles(self.numbers).int()], self.group)
        scale = powers_of_two(self.scale) if self.scale.dtype == torch.uint8 else self.scale.float()
        values = (values * scale.unsqueeze(-1)).flatten(-2)
        return values if self.factor is None else values * self.factor


@cache
def table_of(code: Code, device: torch.device) -> Tensor:
    return torch.tensor(TABLES[code], device=device)


def powers_of_two(exponents: Tensor) -> Tensor:
    """Return 2 ** (number - 127) in float32 for uint8 exponents."""
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.int() - 127)


def in_groups(x: Tensor, size: int) -> Tensor:
    """Return x [..., n] as [..., n / size, size]."""
    return x.reshape(*x.shape[:-1], -1, size)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Return packed [..., n] uint8 as [..., 2n] uint8."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def pack_nibbles(numbers: Tensor) -> Tensor:
    """Return numbers [..., 2n] of 0 ... 15 as [..., n] uint8."""
    numbers = numbers.to(torch.uint8)
    return numbers[..., 0::2] | numbers[..., 1::2] << 4


def merge(parts: Sequence[Any]) -> Any | None:
    """Stack matrices along the outputs; None: their layouts differ."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if len({type(part) for part in parts}) > 1:
        return None
    match first:
        case PackedInts():
            return _merge_ints(parts)
        case Float8():
            return _merge_float8(parts)
        case Int8():
            same = len({part.activation for part in parts}) == 1
            return Int8(_stacked(parts, "numbers"), _stacked(parts, "scale"), first.activation) if same else None
        case Float4():
            return _merge_float4(parts)
    raise AssertionError(type(first))


def _stacked(parts: Sequence[Any], name: str) -> Tensor:
    return torch.cat([getattr(part, name) for part in parts], dim=-2)


def _merge_ints(parts: Sequence[PackedInts]) -> PackedInts | None:
    if len({part.order is None for part in parts}) > 1:
        return None
    bits, group = max(part.bits for part in parts), gcd(*(part.group for part in parts))
    dtype = reduce(torch.promote_types, (part.scale.dtype for part in parts))
    parts = [part.divided(bits, group, dtype) for part in parts]
    first = parts[0]
    if first.order is not None and not all(torch.equal(first.order, part.order) for part in parts if part.order is not None):
        return None
    zeros = None
    if any(part.zeros is not None for part in parts):
        middle = 2 ** (first.bits - 1)
        none = [torch.full_like(part.scale, middle, dtype=torch.uint8) for part in parts]
        zeros = torch.cat([own if part.zeros is None else part.zeros for own, part in zip(none, parts, strict=True)], dim=-2)
    return PackedInts(first.bits, first.group, _stacked(parts, "numbers"), _stacked(parts, "scale"), zeros, first.order)


def _merge_float8(parts: Sequence[Float8]) -> Float8 | None:
    first = parts[0]
    if len({(part.columns, part.activation) for part in parts}) > 1:
        return None
    starts = [sum(part.outputs for part in parts[:index]) for index in range(len(parts))]
    rows = gcd(*starts, *(part.rows for part in parts))  # no block has outputs of two parts
    scales = [part.scale.repeat_interleave(part.rows // rows, -2)[..., : -(-part.outputs // rows), :] for part in parts]
    given = [part.input_scale for part in parts if part.input_scale is not None]
    largest = torch.stack(given).amax(0) if given else None  # they are for the same activations
    return Float8(rows, first.columns, _stacked(parts, "numbers"), torch.cat(scales, dim=-2), first.activation, largest)


def _merge_float4(parts: Sequence[Float4]) -> Float4 | None:
    first = parts[0]
    if len({(part.code, part.group, part.scale.dtype, part.factor is None) for part in parts}) > 1:
        return None
    factor = None if first.factor is None else _stacked(parts, "factor")
    return Float4(first.code, first.group, _stacked(parts, "numbers"), _stacked(parts, "scale"), factor)


FLOAT8_MAX, INT8_MAX = 448.0, 127.0
ALIGNED = 16  # rows are padded to a multiple of it if scales are stored by group


@dataclass(frozen=True)
class Rounding:
    """Activation quantization of a GEMM; columns are ordered as in the words of its matrix: two that are `value_stride` apart
    are neighbours.
    """

    kind: torch.dtype  # int8 or float8_e4m3fn
    columns: int  # more than inputs are zeros
    value_stride: int
    group: int = 0  # columns per scale; 0: one scale per row
    given: Tensor | None = None  # static scale, float32

    @property
    def largest(self) -> float:
        return INT8_MAX if self.kind == torch.int8 else FLOAT8_MAX

    def allocate(self, count: int, like: Tensor, dtype: torch.dtype) -> "RoundedRows":
        """Allocate quantized rows of that dtype on the device of `like`."""
        height = -(-count // ALIGNED) * ALIGNED if self.group else count
        numbers = torch.empty(height, self.columns, dtype=self.kind, device=like.device)
        shape = (self.columns // self.group, height) if self.group else (count,)
        return RoundedRows(numbers, torch.empty(shape, dtype=torch.float32, device=like.device), count, dtype)


@dataclass(frozen=True)
class RoundedRows:
    """Rows [count, inputs] of `dtype` that exist in 8 bits only."""

    numbers: Tensor  # [count or more, columns]; rows after count are undefined
    scales: Tensor  # float32 [count], or [columns / group, rows of numbers]
    count: int
    dtype: torch.dtype

    def __len__(self) -> int:
        return self.count

    @cached_property
    def device(self) -> torch.device:
        return self.numbers.device


Activations = Tensor | RoundedRows
