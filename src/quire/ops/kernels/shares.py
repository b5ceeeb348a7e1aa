"""Sums that several programs have shares of: who ends last adds them, in their order, so that the sum does not depend on who
that is."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def add_shares(acc, sums, turns, tile, SHARES: tl.constexpr):
    """acc [N, M], the share of program_id(1); sums: of its type, room for every share of every tile; turns [tiles]: zeros,
    and left so. -> the sum, and whether it is there: only who ends last has it."""
    N: tl.constexpr = acc.shape[0]
    M: tl.constexpr = acc.shape[1]
    at = tl.arange(0, N)[:, None] * M + tl.arange(0, M)[None, :]
    sums += tile.to(tl.int64) * (SHARES * N * M)
    tl.store(sums + tl.program_id(1) * (N * M) + at, acc)
    tl.debug_barrier()
    last = tl.atomic_add(turns + tile, 1, sem="acq_rel") == SHARES - 1
    if last:
        tl.store(turns + tile, 0)
        acc = tl.load(sums + at, cache_modifier=".cg")
        for other in tl.static_range(1, SHARES):
            acc += tl.load(sums + other * (N * M) + at, cache_modifier=".cg")
    return acc, last


@cache
def turns_of(device: torch.device) -> Tensor:
    """Zeros; every launch leaves them so."""
    return torch.zeros(1 << 16, dtype=torch.int32, device=device)
