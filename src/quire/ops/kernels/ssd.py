"""The recurrence of Mamba 2: rows of one token in one launch, one program for a head and a part of it; rows of several in
another, where a program goes through a row's pieces with the state of a head in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor, empty

from quire.ops.arguments import StateRows, TimeSteps
from quire.ops.kernels.launcher import launched
from quire.ops.kernels.math import power_of_two

PART = 32  # of a head, in rows of one token
PIECE = 64  # tokens


@triton.jit
def _time_step(raw, bias, low, high):
    value = raw.to(tl.float32) + bias
    value = tl.where(value > 20.0, value, tl.log(1.0 + tl.exp(tl.minimum(value, 20.0))))
    return tl.minimum(tl.maximum(value, low), high)


@launched
@triton.jit
def _single(
    x,  # [T, heads, SIZE]
    dt,  # [T, heads]
    dt_bias,  # [heads] float32
    a_log,  # [heads] float32
    key,  # [T, groups, WIDTH]
    query,  # [T, groups, WIDTH]
    skip,  # [heads] float32
    state,  # [entries, heads, SIZE, WIDTH] float32
    entries,  # [R] int64
    starts,  # [R + 1] int32
    ends,  # [R] int32
    out,  # [T, heads, SIZE] float32
    low,
    high,
    heads,
    repeats,
    x_stride,
    dt_stride,
    key_stride,
    query_stride,
    last,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    WIDE: tl.constexpr,
    SKIPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    token = tl.load(starts + row).to(tl.int64)
    if tl.load(starts + row + 1) - token == 1:
        entry = tl.load(entries + row)
        at = tl.program_id(2) * PART + tl.arange(0, PART)
        across = tl.arange(0, WIDE)
        inside, wide = at < SIZE, across < WIDTH
        kept = tl.where(entry >= 0, SIZE, 0)
        held = tl.where(tl.load(ends + row) > 1, kept, 0)
        step = _time_step(tl.load(dt + token * dt_stride + head), tl.load(dt_bias + head), low, high)
        decay = tl.exp(-step * tl.exp(tl.load(a_log + head)))
        own = state + (tl.minimum(tl.maximum(entry, 0), last) * heads + head) * SIZE * WIDTH
        place = own + at[:, None] * WIDTH + across[None, :]
        group = head // repeats * WIDTH
        value = tl.load(x + token * x_stride + head * SIZE + at, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(key + token * key_stride + group + across, mask=wide, other=0.0).to(tl.float32)
        c = tl.load(query + token * query_stride + group + across, mask=wide, other=0.0).to(tl.float32)
        now = (
            tl.load(place, mask=(at < held)[:, None] & wide[None, :], other=0.0) * decay + (step * value)[:, None] * b[None, :]
        )
        tl.store(place, now, mask=(at < kept)[:, None] & wide[None, :])
        total = tl.sum(now * c[None, :], 1)
        if SKIPS:
            total += value * tl.load(skip + head)
        tl.store(out + (token * heads + head) * SIZE + at, total, mask=inside)


@launched
@triton.jit
def _several(
    x,
    dt,
    dt_bias,
    a_log,
    key,
    query,
    skip,
    state,
    entries,
    starts,
    ends,
    out,
    low,
    high,
    heads,
    repeats,
    x_stride,
    dt_stride,
    key_stride,
    query_stride,
    last,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
    PIECE: tl.constexpr,
    SKIPS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    begin = tl.load(starts + row).to(tl.int64)
    stop = tl.load(starts + row + 1).to(tl.int64)
    if stop - begin > 1:
        entry = tl.load(entries + row)
        at, across, turn = tl.arange(0, TALL), tl.arange(0, WIDE), tl.arange(0, PIECE)
        inside, wide = at < SIZE, across < WIDTH
        kept = tl.where(entry >= 0, SIZE, 0)
        held = tl.where(tl.load(ends + row) > stop - begin, kept, 0)
        own = state + (tl.minimum(tl.maximum(entry, 0), last) * heads + head) * SIZE * WIDTH
        place = own + at[:, None] * WIDTH + across[None, :]
        now = tl.load(place, mask=(at < held)[:, None] & wide[None, :], other=0.0)
        rate = -tl.exp(tl.load(a_log + head))
        bias = tl.load(dt_bias + head)
        group = head // repeats * WIDTH
        for first in tl.range(begin, stop, PIECE):
            token = first + turn
            there = token < stop
            step = _time_step(tl.load(dt + token * dt_stride + head, mask=there, other=0.0), bias, low, high)
            step = tl.where(there, step, 0.0)
            total = tl.cumsum(step * rate, 0)
            whole = tl.sum(step * rate, 0)
            value = tl.load(
                x + token[:, None] * x_stride + head * SIZE + at[None, :], mask=there[:, None] & inside[None, :], other=0.0
            ).to(tl.float32)
            seen = there[:, None] & wide[None, :]
            b = tl.load(key + token[:, None] * key_stride + group + across[None, :], mask=seen, other=0.0).to(tl.float32)
            c = tl.load(query + token[:, None] * query_stride + group + across[None, :], mask=seen, other=0.0).to(tl.float32)
            scores = tl.dot(c, tl.trans(b), input_precision=PRECISION)
            weight = tl.where(
                turn[:, None] >= turn[None, :], tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0)) * step[None, :], 0.0
            )
            made = tl.dot(scores * weight, value, input_precision=PRECISION)
            made += tl.dot(c * tl.exp(total)[:, None], tl.trans(now), input_precision=PRECISION)
            if SKIPS:
                made += value * tl.load(skip + head)
            left = tl.exp(whole - total) * step
            now = now * tl.exp(whole) + tl.dot(tl.trans(value * left[:, None]), b, input_precision=PRECISION)
            tl.store(out + (token[:, None] * heads + head) * SIZE + at[None, :], made, mask=there[:, None] & inside[None, :])
        tl.store(place, now, mask=(at < kept)[:, None] & wide[None, :])


def ssd(x: Tensor, steps: TimeSteps, key: Tensor, query: Tensor, skip: Tensor | None, state: Tensor, rows: StateRows) -> Tensor:
    tokens, heads, size = x.shape
    width, count = state.shape[3], len(rows.entries)
    out = empty((tokens, heads, size), dtype=torch.float32, device=x.device)
    if not tokens:
        return out
    tensors = (
        x, steps.raw, steps.bias, steps.rate_log, key, query, steps.bias if skip is None else skip, state,
        rows.entries, rows.starts, rows.ends, out,
    )  # fmt: skip
    numbers = (
        steps.low, steps.high, heads, heads // key.shape[1], x.stride(0), steps.raw.stride(0), key.stride(0), query.stride(0),
        len(state) - 1,
    )  # fmt: skip
    wide = max(16, power_of_two(width))
    _single[(count, heads, triton.cdiv(size, PART))](
        *tensors, *numbers, SIZE=size, WIDTH=width, PART=PART, WIDE=wide, SKIPS=skip is not None, num_warps=4
    )
    if not rows.single:
        _several[(count, heads)](
            *tensors, *numbers, SIZE=size, WIDTH=width, TALL=max(16, power_of_two(size)), WIDE=wide, PIECE=PIECE,
            SKIPS=skip is not None, PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=8,
        )  # fmt: skip
    return out
