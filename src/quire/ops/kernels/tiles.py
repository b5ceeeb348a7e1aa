"""Tiles of GEMM kernels: the expert of a tile, found on the device, sums of shares, and outputs."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.kernels.activation import gate_by


@triton.jit
def find_tile(ends, tile, EXPERTS: tl.constexpr, EXPERT_BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Return a tile's expert (EXPERTS: no such tile), its first slot, and the end of the expert's slots.

    Slots are sorted by expert; ends [EXPERTS] has the end of each expert's slots. A tile has up to ROWS slots of one expert.
    """
    each = tl.arange(0, EXPERT_BLOCK)
    end = tl.load(ends + each, mask=each < EXPERTS, other=0)
    begin = tl.load(ends + each - 1, mask=(each > 0) & (each < EXPERTS), other=0)
    tiles = tl.where(each < EXPERTS, (end - begin + ROWS - 1) // ROWS, 0)
    last = tl.cumsum(tiles, 0)
    expert = tl.sum((last <= tile).to(tl.int32), 0)
    mine = each == expert
    first = tl.sum(tl.where(mine, begin + (tile - last + tiles) * ROWS, 0), 0)
    stop = tl.sum(tl.where(mine, end, 0), 0)
    return expert, first, stop


@triton.jit
def add_shares(acc, sums, turns, tile, SHARES: tl.constexpr):
    """Add the shares of a tile; program_id(1) has the share acc [N, M].

    sums: room for every share of every tile, of acc's dtype
    turns: [tiles] zeros; reset to zero
    Return the sum, and whether it is complete: only the program that ends last has it.
    """
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
    """Return counters that are zero before and after every launch."""
    return torch.zeros(1 << 16, dtype=torch.int32, device=device)


@triton.jit
def put_outputs(
    acc, bias, out, read, begins, target, exists, outputs,
    BIAS: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Store acc [N, R] float32 of matrix rows `read` [N] (gated: gate rows first) to out [., outputs], from column `begins` on,
    in the rows target [R] that exist.
    """
    kind: tl.constexpr = out.dtype.element_ty
    if BIAS:
        acc += tl.load(bias + read).to(tl.float32)[:, None]
    if KIND != "":
        both = tl.reshape(acc, (2, acc.shape[0] // 2, acc.shape[1]))
        gate, up = tl.split(tl.permute(both, (1, 2, 0)))
        acc = gate_by(gate, up, KIND, ALPHA, LIMIT, kind)
    n = begins + tl.arange(0, acc.shape[0])
    tl.store(out + target[None, :] * outputs + n[:, None], acc.to(kind), mask=(n < outputs)[:, None] & exists[None, :])
