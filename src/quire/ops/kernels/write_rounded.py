"""The end of kernels that make rows for a product in 8 bits: they are rounded as they are written (`ops/rounded.py`)."""

from typing import Any

import triton
import triton.language as tl

from quire.ops.rounded import Rounding


def constants_of(rounding: Rounding) -> dict[str, Any]:
    """For kernels that know `write_rounded`."""
    given = rounding.given is not None
    return {"APART": rounding.apart, "GROUP": rounding.group, "GIVEN": given, "LARGEST": rounding.largest}


@triton.jit
def write_rounded(
    value,  # [BLOCK] float32, from column `first` on: a whole row, unless scales are by GROUP; 0 where it has none
    out,  # [rows, columns] of 8 bits
    scales,  # [rows] float32; by group [columns / GROUP, height]
    given,  # [1] float32: the scale
    row,
    first,
    columns,
    height,
    APART: tl.constexpr,
    GROUP: tl.constexpr,
    GIVEN: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if GROUP > 0:
        groups = tl.reshape(value, (BLOCK // GROUP, GROUP))
        factor = tl.maximum(tl.max(tl.abs(groups), 1), 1e-10) / LARGEST
        number = tl.reshape(groups / factor[:, None], (BLOCK,))
        group = first // GROUP + tl.arange(0, BLOCK // GROUP)
        tl.store(scales + group.to(tl.int64) * height + row, factor, mask=group * GROUP < columns)
    else:
        factor = tl.load(given) if GIVEN else tl.maximum(tl.max(tl.abs(value), 0), 1e-10) / LARGEST
        number = tl.minimum(tl.maximum(value / factor, -LARGEST), LARGEST)
        if out.dtype.element_ty == tl.int8:
            number = tl.floor(tl.abs(number) + 0.5) * tl.where(number < 0, -1.0, 1.0)
        tl.store(scales + row, factor)
    # not in the shape of `value`: Triton reads whatever is of one shape in the layout that suits the shortest of its numbers,
    # and in that a norm's sum would be added up in another order than where it is not rounded
    BLOCKS: tl.constexpr = BLOCK // (2 * APART)
    apart = tl.reshape(number.to(out.dtype.element_ty), (BLOCKS, 2, APART))
    beside = tl.reshape(tl.permute(apart, (0, 2, 1)), (BLOCKS, 2 * APART))
    at = first + tl.arange(0, BLOCKS)[:, None] * (2 * APART) + tl.arange(0, 2 * APART)[None, :]
    tl.store(out + row * columns + at, beside, mask=at < columns)
