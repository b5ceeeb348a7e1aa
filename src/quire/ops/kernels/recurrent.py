"""Triton kernels of recurrent layers: causal convolution, gated delta rule, gated norm and SSD."""

import torch
import triton
import triton.language as tl
from torch import Tensor, empty

from quire.ops.arguments import StateRows, TimeSteps
from quire.ops.kernels.launcher import launched, power_of_two
from quire.ops.order import order_is_fixed

BLOCK = 512  # channels per program
# not specialized: the layout of a kernel, and so its order of sums, would depend on the strides, which one token may change
STRIDES = ("x_stride", "query_stride", "key_stride", "value_stride", "dt_stride", "beta_stride", "last")


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
        row_ends = tl.load(starts + 1 + at, mask=at < rows, other=2147483647)
        row = tl.minimum(tl.sum((row_ends <= token).to(tl.int32), 0), rows - 1).to(tl.int64)
    begin = tl.load(starts + row).to(tl.int64)
    count = tl.load(starts + row + 1) - begin
    entry = tl.load(entries + row)
    owned = tl.where(entry >= 0, channels, 0)  # channels of rows that have a state entry
    held = tl.where(tl.load(ends + row) > count, owned, 0)  # and of them those that had one before
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
            tl.store(own + (tap - 1), value.to(state.dtype.element_ty), mask=lane < owned)
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
    owned = tl.where(entry >= 0, tl.where(stop > begin, channels, 0), 0)
    held = tl.where(tl.load(ends + row) > stop - begin, owned, 0)
    own = state + tl.minimum(tl.maximum(entry, 0), last) * channels * (WIDTH - 1) + lane * (WIDTH - 1)
    for tap in tl.static_range(WIDTH - 1):  # reads are ahead of writes
        source = stop - (WIDTH - 1) + tap
        here = source >= begin
        new = tl.load(x + source * x_stride + lane, mask=lane < tl.where(here, owned, 0), other=0.0)
        old = tl.load(own + (source - begin + WIDTH - 1), mask=lane < tl.where(here, 0, held), other=0.0)
        tl.store(own + tap, tl.where(here, new.to(old.dtype), old), mask=lane < owned)


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


COLUMNS = 16  # values of a head per program
EPS = 1e-6


@launched
@triton.jit(do_not_specialize=STRIDES)
def _delta_rule(
    query,  # [T, key heads, KEYS]
    key,  # [T, key heads, KEYS]
    value,  # [T, heads, VALUES]
    dt,  # [T, heads], or [T, heads, KEYS]
    dt_bias,  # [heads] float32, or [heads, KEYS]
    rate_log,  # [heads] float32
    beta,  # [T, heads]
    state,  # [entries, heads, KEYS, VALUES] float32
    entries,  # [R] int64
    starts,  # [R + 1] int32
    ends,  # [R] int32
    out,  # [T, heads, VALUES] float32
    eps,
    scale,
    reach,
    heads,
    repeats,
    query_stride,
    key_stride,
    value_stride,
    dt_stride,
    beta_stride,
    last,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    TALL: tl.constexpr,
    COLUMNS: tl.constexpr,
    BY_KEY: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin = tl.load(starts + row).to(tl.int64)
    stop = tl.load(starts + row + 1).to(tl.int64)
    entry = tl.load(entries + row)
    at, column = tl.arange(0, TALL), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    tall, inside = at < KEYS, column < VALUES
    owned = tl.where(entry >= 0, tl.where(stop > begin, KEYS, 0), 0)
    held = tl.where(tl.load(ends + row) > stop - begin, owned, 0)
    own = state + (tl.minimum(tl.maximum(entry, 0), last) * heads + head) * KEYS * VALUES
    place = own + at[:, None] * VALUES + column[None, :]
    now = tl.load(place, mask=(at < held)[:, None] & inside[None, :], other=0.0)
    rate, shared = tl.exp(tl.load(rate_log + head)), head // repeats * KEYS
    bias = tl.load(dt_bias + head * KEYS + at, mask=tall, other=0.0) if BY_KEY else tl.load(dt_bias + head)
    for token in tl.range(begin, stop):
        if BY_KEY:
            step = tl.load(dt + token * dt_stride + head * KEYS + at, mask=tall, other=0.0).to(tl.float32) + bias
        else:
            step = tl.load(dt + token * dt_stride + head).to(tl.float32) + bias
        step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))
        q = tl.load(query + token * query_stride + shared + at, mask=tall, other=0.0).to(tl.float32)
        k = tl.load(key + token * key_stride + shared + at, mask=tall, other=0.0).to(tl.float32)
        v = tl.load(value + token * value_stride + head * VALUES + column, mask=inside, other=0.0).to(tl.float32)
        share = tl.sigmoid(tl.load(beta + token * beta_stride + head).to(tl.float32)) * reach
        q *= tl.rsqrt(tl.sum(q * q, 0) + eps) * scale
        k *= tl.rsqrt(tl.sum(k * k, 0) + eps)
        decay = tl.exp(-step * rate)
        if BY_KEY:
            now *= decay[:, None]
        else:
            now *= decay
        wrong = share * (v - tl.sum(now * k[:, None], 0))
        now += k[:, None] * wrong[None, :]
        tl.store(out + (token * heads + head) * VALUES + column, tl.sum(now * q[:, None], 0), mask=inside)
    tl.store(place, now, mask=(at < owned)[:, None] & inside[None, :])


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    steps: TimeSteps,
    beta: Tensor,
    state: Tensor,
    rows: StateRows,
    reach: float = 1.0,
) -> Tensor:
    tokens, heads, values = value.shape
    keys = key.shape[2]
    out = empty((tokens, heads, values), dtype=torch.float32, device=value.device)
    if tokens:
        _delta_rule[(len(rows.entries), heads, triton.cdiv(values, COLUMNS))](
            query, key, value, steps.raw, steps.bias, steps.rate_log, beta, state, rows.entries, rows.starts, rows.ends, out,
            EPS, keys**-0.5, reach, heads, heads // key.shape[1], query.stride(0), key.stride(0), value.stride(0),
            steps.raw.stride(0), beta.stride(0), len(state) - 1,
            KEYS=keys, VALUES=values, TALL=power_of_two(keys), COLUMNS=COLUMNS, BY_KEY=steps.raw.ndim == 3, num_warps=4,
        )  # fmt: skip
    return out


@launched
@triton.jit
def _gated_norm(
    x,  # [T, groups * SIZE] float32
    gate,  # [T, groups * SIZE]
    weight,  # [groups * SIZE], or [SIZE] for all groups
    out,  # [T, groups * SIZE]
    eps,
    gate_stride,
    weight_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    SIGMOID: tl.constexpr,
):
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    place = (token * tl.num_programs(1) + group) * SIZE + at
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    opened = tl.load(gate + token * gate_stride + group * SIZE + at, mask=inside, other=0.0).to(tl.float32)
    if SIGMOID:
        opened = tl.sigmoid(opened)
    else:
        opened *= tl.sigmoid(opened)
    if not NORM_FIRST:
        value *= opened
    value *= tl.rsqrt(tl.sum(value * value) / SIZE + eps)
    value *= tl.load(weight + group * weight_stride + at, mask=inside, other=0.0).to(tl.float32)
    if NORM_FIRST:
        value *= opened
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int, norm_first: bool, act: str = "silu") -> Tensor:
    tokens, size = len(x), x.shape[1] // groups
    out = empty((tokens, x.shape[1]), dtype=gate.dtype, device=x.device)
    block = power_of_two(size)
    if tokens:
        _gated_norm[(tokens, groups)](
            x, gate, weight, out, eps, gate.stride(0), size if len(weight) > size else 0,
            SIZE=size, BLOCK=block, NORM_FIRST=norm_first, SIGMOID=act == "sigmoid", num_warps=min(max(block // 512, 1), 8),
        )  # fmt: skip
    return out


PART = 32  # values of a head per program that goes token by token
ALL_TOKENS = (1 << 31) - 1
CHUNK_TOKENS = 64


@triton.jit
def _time_step(raw, bias, low, high):
    value = raw.to(tl.float32) + bias
    value = tl.where(value > 20.0, value, tl.log(1.0 + tl.exp(tl.minimum(value, 20.0))))
    return tl.minimum(tl.maximum(value, low), high)


@launched
@triton.jit(do_not_specialize=STRIDES)
def _by_token(
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
    MOST: tl.constexpr,  # tokens of a row; longer rows are left out
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    begin = tl.load(starts + row).to(tl.int64)
    stop = tl.load(starts + row + 1).to(tl.int64)
    if (stop > begin) & (stop - begin <= MOST):
        entry = tl.load(entries + row)
        at = tl.program_id(2) * PART + tl.arange(0, PART)
        across = tl.arange(0, WIDE)
        inside, wide = at < SIZE, across < WIDTH
        owned = tl.where(entry >= 0, SIZE, 0)
        held = tl.where(tl.load(ends + row) > stop - begin, owned, 0)
        rate, bias, bypass = tl.exp(tl.load(a_log + head)), tl.load(dt_bias + head), tl.load(skip + head)
        own = state + (tl.minimum(tl.maximum(entry, 0), last) * heads + head) * SIZE * WIDTH
        place = own + at[:, None] * WIDTH + across[None, :]
        now = tl.load(place, mask=(at < held)[:, None] & wide[None, :], other=0.0)
        values, shared = x + head * SIZE + at, head // repeats * WIDTH + across
        raw = tl.load(dt + begin * dt_stride + head)
        value = tl.load(values + begin * x_stride, mask=inside, other=0.0)
        b = tl.load(key + begin * key_stride + shared, mask=wide, other=0.0)
        c = tl.load(query + begin * query_stride + shared, mask=wide, other=0.0)
        for token in tl.range(begin, stop):
            following = tl.minimum(token + 1, stop - 1)  # is read meanwhile
            next_raw = tl.load(dt + following * dt_stride + head)
            next_value = tl.load(values + following * x_stride, mask=inside, other=0.0)
            next_b = tl.load(key + following * key_stride + shared, mask=wide, other=0.0)
            next_c = tl.load(query + following * query_stride + shared, mask=wide, other=0.0)
            step = _time_step(raw, bias, low, high)
            number = value.to(tl.float32)
            now = now * tl.exp(-step * rate) + (step * number)[:, None] * b.to(tl.float32)[None, :]
            total = tl.sum(now * c.to(tl.float32)[None, :], 1)
            if SKIPS:
                total += number * bypass
            tl.store(out + (token * heads + head) * SIZE + at, total, mask=inside)
            raw, value, b, c = next_raw, next_value, next_b, next_c
        tl.store(place, now, mask=(at < owned)[:, None] & wide[None, :])


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
    CHUNK: tl.constexpr,
    SKIPS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    begin = tl.load(starts + row).to(tl.int64)
    stop = tl.load(starts + row + 1).to(tl.int64)
    if stop - begin > 1:
        entry = tl.load(entries + row)
        at, across, turn = tl.arange(0, TALL), tl.arange(0, WIDE), tl.arange(0, CHUNK)
        inside, wide = at < SIZE, across < WIDTH
        owned = tl.where(entry >= 0, SIZE, 0)
        held = tl.where(tl.load(ends + row) > stop - begin, owned, 0)
        own = state + (tl.minimum(tl.maximum(entry, 0), last) * heads + head) * SIZE * WIDTH
        place = own + at[:, None] * WIDTH + across[None, :]
        now = tl.load(place, mask=(at < held)[:, None] & wide[None, :], other=0.0)
        rate = -tl.exp(tl.load(a_log + head))
        bias = tl.load(dt_bias + head)
        group = head // repeats * WIDTH
        for first in tl.range(begin, stop, CHUNK):
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
        tl.store(place, now, mask=(at < owned)[:, None] & wide[None, :])


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
    in_order = order_is_fixed()
    _by_token[(count, heads, triton.cdiv(size, PART))](
        *tensors, *numbers, SIZE=size, WIDTH=width, PART=PART, WIDE=wide, SKIPS=skip is not None,
        MOST=ALL_TOKENS if in_order else 1, num_warps=4,
    )  # fmt: skip
    if not rows.single and not in_order:
        _several[(count, heads)](
            *tensors, *numbers, SIZE=size, WIDTH=width, TALL=max(16, power_of_two(size)), WIDE=wide, CHUNK=CHUNK_TOKENS,
            SKIPS=skip is not None, PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=8,
        )  # fmt: skip
    return out
