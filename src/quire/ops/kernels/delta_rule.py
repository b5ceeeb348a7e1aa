"""The gated delta rule: a program goes through a row's tokens with some columns of one head's state in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor, empty

from quire.ops.arguments import StateRows, TimeSteps
from quire.ops.kernels.launcher import launched
from quire.ops.kernels.math import power_of_two

COLUMNS = 16  # values of a head
EPS = 1e-6


@launched
@triton.jit
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
    kept = tl.where(entry >= 0, tl.where(stop > begin, KEYS, 0), 0)
    held = tl.where(tl.load(ends + row) > stop - begin, kept, 0)
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
    tl.store(place, now, mask=(at < kept)[:, None] & inside[None, :])


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
