"""Mamba's selective scan (`ops/recurrent.py`): one program for a row and a block of channels, token by token."""

import torch
import triton
import triton.language as tl
from torch import Tensor, empty

from quire.ops.arguments import StateRows
from quire.ops.kernels.launcher import cdiv, launched, power_of_two

BLOCK = 32  # channels per program


@launched
@triton.jit(do_not_specialize=["last"])
def _selective_scan(
    x,  # [T, channels] float32
    dt,  # [T, channels] float32
    rate,  # [channels, WIDTH] float32
    key,  # [T, WIDTH] float32
    query,  # [T, WIDTH] float32
    skip,  # [channels] float32
    state,  # [entries, channels, WIDTH] float32
    entries,  # [R] int64
    starts,  # [R + 1] int32
    ends,  # [R] int32
    out,  # [T, channels] float32
    channels,
    last,  # entry
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    begin = tl.load(starts + row).to(tl.int64)
    stop = tl.load(starts + row + 1).to(tl.int64)
    if stop > begin:
        entry = tl.load(entries + row)
        lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        across = tl.arange(0, WIDE)
        inside, wide = lane < channels, across < WIDTH
        owned = tl.where(entry >= 0, channels, 0)
        held = tl.where(tl.load(ends + row) > stop - begin, owned, 0)
        tile = lane[:, None] * WIDTH + across[None, :]
        place = state + tl.minimum(tl.maximum(entry, 0), last) * channels * WIDTH + tile
        now = tl.load(place, mask=(lane < held)[:, None] & wide[None, :], other=0.0)
        decay = tl.load(rate + tile, mask=inside[:, None] & wide[None, :], other=0.0)
        bypass = tl.load(skip + lane, mask=inside, other=0.0)
        value = tl.load(x + begin * channels + lane, mask=inside, other=0.0)
        step = tl.load(dt + begin * channels + lane, mask=inside, other=0.0)
        b = tl.load(key + begin * WIDTH + across, mask=wide, other=0.0)
        c = tl.load(query + begin * WIDTH + across, mask=wide, other=0.0)
        for token in tl.range(begin, stop):
            following = tl.minimum(token + 1, stop - 1)  # is read meanwhile
            next_value = tl.load(x + following * channels + lane, mask=inside, other=0.0)
            next_step = tl.load(dt + following * channels + lane, mask=inside, other=0.0)
            next_b = tl.load(key + following * WIDTH + across, mask=wide, other=0.0)
            next_c = tl.load(query + following * WIDTH + across, mask=wide, other=0.0)
            now = now * tl.exp(step[:, None] * decay) + (step * value)[:, None] * b[None, :]
            total = tl.sum(now * c[None, :], 1) + value * bypass
            tl.store(out + token * channels + lane, total, mask=inside)
            value, step, b, c = next_value, next_step, next_b, next_c
        tl.store(place, now, mask=(lane < owned)[:, None] & wide[None, :])


def selective_scan(
    x: Tensor, dt: Tensor, decay: Tensor, key: Tensor, query: Tensor, skip: Tensor, state: Tensor, rows: StateRows
) -> Tensor:
    tokens, channels = x.shape
    width = state.shape[2]
    out = empty((tokens, channels), dtype=torch.float32, device=x.device)
    if tokens:
        _selective_scan[(len(rows.entries), cdiv(channels, BLOCK))](
            x, dt, decay, key, query, skip, state, rows.entries, rows.starts, rows.ends, out, channels, len(state) - 1,
            WIDTH=width, WIDE=power_of_two(width), BLOCK=BLOCK, num_warps=1,
        )  # fmt: skip
    return out
