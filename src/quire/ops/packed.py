"""Matrices of 4 and 8 bits on a GPU: repacked once, when all is loaded, for kernels that read them as they lie.

    few rows    the packed matrix streams past them (`kernels/packed.py`): no number of a row is rounded
    many rows   in 8 bits, where the scheme rounds rows; else the matrix is dequantized, and a library multiplies

What goes where was measured on an H200.
"""

from dataclasses import dataclass
from math import gcd, lcm
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.forms import Activation, Float4, Float8, Int8, PackedInts, powers_of_two, unpack_nibbles
from quire.ops.linear import SHORT, gated_linear, linear

STREAMED = 512  # rows: for more it is faster to dequantize
ROUNDED = 17  # rows from which on products in 8 bits are faster
FILLING = 264, 132  # programs that keep an H200 reading, with up to 16 rows, and with more
WIDEST = 128  # words of a block
FLOAT8_MAX, INT8_MAX = 448.0, 127.0


@dataclass(frozen=True)
class PackedMatrix:
    """A form (`forms.py`) of the GPU's own."""

    kind: str
    inputs: int
    packed: Any  # kernels.packed.Packed
    order: Tensor | None = None  # of the inputs
    activation: Activation = Activation.NONE
    input_scale: Tensor | None = None

    @property
    def outputs(self) -> int:
        return len(self.packed.words)

    def multiply(self, x: Tensor, bias: Tensor | None, activation: str = "") -> Tensor:
        """x [..., inputs] -> [..., outputs]; with an activation: of gate above up [..., outputs / 2]."""
        if self.order is not None:
            x = x.index_select(-1, self.order)
        rows = x.reshape(-1, x.shape[-1])
        out = self._multiply(rows, bias, activation)
        return out.view(*x.shape[:-1], out.shape[-1])

    def _multiply(self, x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        from quire.ops.kernels.packed import dequantize, product

        if len(x) >= ROUNDED and self._rounds(x):
            return self._round(x, bias, activation)
        if len(x) <= STREAMED and x.dtype in SHORT:
            outputs = self.outputs // 2 if activation else self.outputs
            return product(x, self.packed, bias, activation, choose_way(self.packed, len(x), outputs, bool(activation)))
        matrix = dequantize(self.packed, x)
        return gated_linear(x, matrix, bias, activation) if activation else linear(x, matrix, bias)

    def _rounds(self, x: Tensor) -> bool:
        """Whether rows are rounded to 8 bits, one scale to a row, and the libraries multiply them."""
        if self.activation not in (Activation.TOKEN, Activation.TENSOR) or self.packed.scales.shape[1] > 1:
            return False
        if self.packed.form == "float8" and torch.cuda.get_device_capability(x.device) < (8, 9):
            return False
        return self.outputs % 16 == 0 and self.packed.columns % 16 == 0 and x.dtype in SHORT

    def _round(self, x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        from quire.ops.kernels.rounding import rescale, round_rows

        packed = self.packed
        scale = packed.scales.flatten()
        if len(scale) < self.outputs:
            scale = scale.repeat_interleave(self.outputs // len(scale))
        if packed.form == "int8":
            numbers, scales = round_rows(x, packed.columns, packed.apart, torch.int8, INT8_MAX, None)
            sums = torch._int_mm(numbers, packed.words.view(torch.int8).t())
        else:
            numbers, scales = round_rows(x, packed.columns, packed.apart, torch.float8_e4m3fn, FLOAT8_MAX, self.input_scale)
            one = _one(x.device)
            # sums are as large as float16 is not
            kind = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
            matrix = packed.words.view(torch.float8_e4m3fn).t()
            sums = torch._scaled_mm(numbers, matrix, one, one, out_dtype=kind, use_fast_accum=True)
        return rescale(sums, scales, scale, bias, activation, x.dtype)


_ones: dict[torch.device, Tensor] = {}


def _one(device: torch.device) -> Tensor:
    if device not in _ones:
        _ones[device] = torch.ones((), device=device)
    return _ones[device]


def choose_way(packed: Any, rows: int, outputs: int, gated: bool) -> Any:
    from quire.ops.kernels.packed import NUMBERS, Way

    several = packed.scales.shape[1] > 1
    words = min(WIDEST, _power(gcd(packed.apart, packed.group) if several else packed.apart))
    if rows > 64:
        return Way(128, 128, min(64, words), 1, 8, 3, fold=several)
    block = 16 if rows <= 16 else 32 if rows <= 32 else 64
    if gated and block == 64:
        words = min(64, words)
    tiles = -(-outputs // 64)
    shares = max(1, min(8, packed.words.shape[1] // words, round(FILLING[rows > 16] / tiles)))
    stages = 5 if NUMBERS[packed.form] == 2 and block == 16 else 3
    return Way(block, 64, words, shares, 4, stages)


def pack(form: Any) -> PackedMatrix | None:
    """A form as a GPU multiplies by it; None = no kernel reads it so."""
    if form.numbers.dim() != 2:
        return None
    match form:
        case PackedInts(bits=4):
            packed = _pack("int4", form.unpacked(), form.group, form.scale, form.zeros, fill=8)
        case PackedInts(bits=8):
            zeros = None if form.zeros is None else form.zeros.to(torch.int16) - 128
            packed = _pack("int8", (form.numbers ^ 128), form.group, form.scale, zeros, fill=0)
        case Int8():
            packed = _pack("int8", form.numbers.view(torch.uint8), form.inputs, form.scale, None, fill=0)
        case Float8():
            scale = form.scale
            if form.rows > 1 and form.outputs % form.rows:
                scale = scale.repeat_interleave(form.rows, -2)[: form.outputs]
            packed = _pack("float8", form.numbers.view(torch.uint8), min(form.columns, form.inputs), scale, None, fill=0)
        case Float4(code="e2m1"):
            scale = powers_of_two(form.scale) if form.scale.dtype == torch.uint8 else form.scale.float()
            scale = scale if form.factor is None else scale * form.factor
            packed = _pack("float4", unpack_nibbles(form.numbers), form.group, scale, None, fill=0)
        case _:
            return None
    if packed is None:
        return None
    return PackedMatrix(
        form.kind, form.inputs, packed, getattr(form, "order", None),
        getattr(form, "activation", Activation.NONE), getattr(form, "input_scale", None),
    )  # fmt: skip


def _pack(name: str, numbers: Tensor, group: int, scale: Tensor, zeros: Tensor | None, fill: int) -> Any:
    """numbers [outputs, inputs] uint8, one to a byte."""
    from quire.ops.kernels.packed import NUMBERS, Packed

    inputs, per = numbers.shape[1], NUMBERS[name]
    groups = scale.shape[1]
    if groups > 1 and group % 16:
        return None
    grain = per * (64 if groups == 1 else lcm(group, 64))
    columns = -(-inputs // grain) * grain
    numbers = F.pad(numbers, (0, columns - inputs), value=fill)
    if groups > 1:
        more = columns // group - groups
        scale = F.pad(scale, (0, more))
        zeros = None if zeros is None else F.pad(zeros, (0, more))
    else:
        group = columns
    parts = numbers.chunk(per, 1)
    words = torch.zeros(parts[0].shape, dtype=torch.int32, device=numbers.device)
    for index, part in enumerate(parts):
        words |= part.to(torch.int32) << (16 // per * index)
    words = (words - ((words & 0x8000) << 1)).to(torch.int16)
    return Packed(name, words, scale.contiguous(), zeros, columns // per, group)


def _power(number: int) -> int:
    """The largest power of two that divides it."""
    return number & -number
