"""GGUF's blocks as forms (`forms.py`), for devices that multiply by those: whole numbers with a scale to each 32 or 16, and a
zero point, which is any number, where blocks have a minimum; and MXFP4's floats. Types with tables of their own or with fewer
bits have no form."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quire.files.gguf import FLOATS, GGML_TYPES, WHOLE_NUMBERS
from quire.ops.blocks import APART, Apart, QuantizedMatrix, half_at, nibble_groups, scales_and_minima, slices
from quire.ops.forms import Float4, PackedInts, pack_nibbles

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
