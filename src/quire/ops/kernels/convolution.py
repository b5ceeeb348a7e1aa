"""Convolutions of channels with their own last inputs: one program for a token and a block of channels.

Rows of several tokens read their first taps from the state, which a second launch then moves on; rows of one token do both.
"""

import triton
import triton.language as tl
from torch import Tensor, empty

from quire.ops.arguments import StateRows
from quire.ops.kernels.launcher import launched
from quire.ops.kernels.math import power_of_two

BLOCK = 512  # channels


@launched
@triton.jit
def _convolve(
    x,  # [T, C]
    weight,  # [C, WIDTH]
    bias,  # [C]
    state,  # [entries, C, WIDTH - 1]
    entries,  # [R] int64
    starts,  # [R + 1] int32
    ends,  # [R] int32
    out,  # [T, C]
    rows,
    channels,
    x_stride,
    last,  # entry
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BIASED: tl.constexpr,
    SILU: tl.constexpr,
    SINGLE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < channels
    row = token
    if not SINGLE:
        at = tl.arange(0, ROWS)
        behind = tl.load(starts + 1 + at, mask=at < rows, other=2147483647)
        row = tl.minimum(tl.sum((behind <= token).to(tl.int32), 0), rows - 1).to(tl.int64)
    begin = tl.load(starts + row).to(tl.int64)
    count = tl.load(starts + row + 1) - begin
    entry = tl.load(entries + row)
    kept = tl.where(entry >= 0, channels, 0)  # channels whose state is somebody's
    held = tl.where(tl.load(ends + row) > count, kept, 0)  # and of them those that had one before
    own = state + tl.minimum(tl.maximum(entry, 0), last) * channels * (WIDTH - 1) + lane * (WIDTH - 1)
    total = tl.zeros([BLOCK], tl.float32)
    if BIASED:
        total += tl.load(bias + lane, mask=inside, other=0.0).to(tl.float32)
    for tap in tl.static_range(WIDTH):
        source = token - (WIDTH - 1) + tap
        here = source >= begin
        new = tl.load(x + source * x_stride + lane, mask=lane < tl.where(here, channels, 0), other=0.0)
        old = tl.load(own + (source - begin + WIDTH - 1), mask=lane < tl.where(here, 0, held), other=0.0)
        value = tl.where(here, new, old.to(new.dtype))
        total += value.to(tl.float32) * tl.load(weight + lane * WIDTH + tap, mask=inside, other=0.0).to(tl.float32)
        if SINGLE and tap > 0:
            tl.store(own + (tap - 1), value.to(state.dtype.element_ty), mask=lane < kept)
    if SILU:
        total = total * tl.sigmoid(total)
    tl.store(out + token * channels + lane, total.to(out.dtype.element_ty), mask=inside)


@launched
@triton.jit
def _move_on(
    x,  # [T, C]
    state,  # [entries, C, WIDTH - 1]
    entries,  # [R] int64
    starts,  # [R + 1] int32
    ends,  # [R] int32
    channels,
    x_stride,
    last,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin = tl.load(starts + row).to(tl.int64)
    stop = tl.load(starts + row + 1).to(tl.int64)
    entry = tl.load(entries + row)
    kept = tl.where(entry >= 0, tl.where(stop > begin, channels, 0), 0)
    held = tl.where(tl.load(ends + row) > stop - begin, kept, 0)
    own = state + tl.minimum(tl.maximum(entry, 0), last) * channels * (WIDTH - 1) + lane * (WIDTH - 1)
    for tap in tl.static_range(WIDTH - 1):  # what is read stands behind what is written
        source = stop - (WIDTH - 1) + tap
        here = source >= begin
        new = tl.load(x + source * x_stride + lane, mask=lane < tl.where(here, kept, 0), other=0.0)
        old = tl.load(own + (source - begin + WIDTH - 1), mask=lane < tl.where(here, 0, held), other=0.0)
        tl.store(own + tap, tl.where(here, new.to(old.dtype), old), mask=lane < kept)


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, rows: StateRows, silu: bool) -> Tensor:
    tokens, channels = x.shape
    width, count = weight.shape[1], len(rows.entries)
    out = empty((tokens, channels), dtype=x.dtype, device=x.device)
    blocks, last = triton.cdiv(channels, BLOCK), len(state) - 1
    if not tokens:
        return out
    _convolve[(tokens, blocks)](
        x, weight, weight if bias is None else bias, state, rows.entries, rows.starts, rows.ends, out,
        count, channels, x.stride(0), last,
        WIDTH=width, ROWS=1 if rows.single else power_of_two(count), BLOCK=BLOCK, BIASED=bias is not None, SILU=silu,
        SINGLE=rows.single, num_warps=4,
    )  # fmt: skip
    if not rows.single:
        _move_on[(count, blocks)](
            x, state, rows.entries, rows.starts, rows.ends, channels, x.stride(0), last, WIDTH=width, BLOCK=BLOCK, num_warps=4
        )
    return out
