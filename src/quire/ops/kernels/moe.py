"""Mixture of experts without the host knowing who goes where: routing, a grouped matrix product, and the weighted sum.

A *slot* is one of the top_k places of a token; slots sorted by expert lie one after the other.

    order   [ slots of expert 0 | expert 1 | ... ]        ends [ e0, e1, ... ]: where each expert's slots end

A product has as many programs as there could be tiles of rows; each finds its expert in `ends`, and those left over leave.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.kernels.activation import gated

SUM_BLOCK = 1024
SORT_BLOCK, SORT_STEP = 32, 128
FEW_SLOTS = 4096  # so many are sorted by comparing all with all, in one launch


@triton.jit
def _route(
    logits,  # [T, EXPERTS]
    weights,  # [T, TOP_K] float32
    experts,  # [T, TOP_K] int64
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    TOP_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, EXPERT_BLOCK)
    top = tl.arange(0, TOP_BLOCK)
    logit = tl.load(logits + token * EXPERTS + at, mask=at < EXPERTS, other=float("-inf")).to(tl.float32)
    chance = tl.exp(logit - tl.max(logit, 0))
    chance = chance / tl.sum(chance, 0)
    left = tl.where(at < EXPERTS, chance, -1.0)
    value = tl.zeros((TOP_BLOCK,), tl.float32)
    index = tl.zeros((TOP_BLOCK,), tl.int64)
    for i in tl.static_range(TOP_K):
        best = tl.argmax(left, 0)
        value = tl.where(top == i, tl.max(left, 0), value)
        index = tl.where(top == i, best, index)
        left = tl.where(at == best, -1.0, left)
    if RENORMALIZE:
        value = value / tl.sum(value, 0)
    tl.store(weights + token * TOP_K + top, value, mask=top < TOP_K)
    tl.store(experts + token * TOP_K + top, index, mask=top < TOP_K)


def route(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    logits = logits.contiguous()
    tokens, experts = logits.shape
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    if tokens:
        _route[(tokens,)](
            logits, weights, chosen, EXPERTS=experts, TOP_K=top_k, RENORMALIZE=renormalize,
            EXPERT_BLOCK=triton.next_power_of_2(experts), TOP_BLOCK=triton.next_power_of_2(top_k), num_warps=1,
        )  # fmt: skip
    return weights, chosen


@triton.jit(do_not_specialize=["slots"])
def _sort(
    experts,  # [slots]
    order,  # [slots]
    ends,  # [EXPERTS]
    slots,
    EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """A slot's place is the number of those before it; the first program also counts where each expert's slots end."""
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(experts + slot, mask=slot < slots, other=EXPERTS)
    place = tl.zeros((BLOCK,), tl.int32)
    for begin in tl.range(0, slots, STEP):
        other = begin + tl.arange(0, STEP)
        theirs = tl.load(experts + other, mask=other < slots, other=EXPERTS)[None, :]
        before = (theirs < own[:, None]) | ((theirs == own[:, None]) & (other[None, :] < slot[:, None]))
        place += tl.sum(before.to(tl.int32), 1)
    tl.store(order + place, slot.to(tl.int64), mask=slot < slots)
    if tl.program_id(0) == 0:
        expert = tl.arange(0, EXPERT_BLOCK)
        end = tl.zeros((EXPERT_BLOCK,), tl.int32)
        for begin in tl.range(0, slots, STEP):
            other = begin + tl.arange(0, STEP)
            theirs = tl.load(experts + other, mask=other < slots, other=EXPERTS)[None, :]
            end += tl.sum((theirs <= expert[:, None]).to(tl.int32), 1)
        tl.store(ends + expert, end, mask=expert < EXPERTS)


def sort_slots(experts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """experts [slots] of `count` -> order [slots] int64, ends [count] int32."""
    slots = len(experts)
    if slots > FEW_SLOTS:
        chosen, order = experts.sort(stable=True)
        numbers = torch.arange(count, device=experts.device)
        return order, torch.searchsorted(chosen, numbers, right=True, out_int32=True)
    order = torch.empty_like(experts)
    ends = torch.empty(count, dtype=torch.int32, device=experts.device)
    _sort[(triton.cdiv(slots, SORT_BLOCK),)](
        experts, order, ends, slots, EXPERTS=count, EXPERT_BLOCK=triton.next_power_of_2(count),
        BLOCK=SORT_BLOCK, STEP=SORT_STEP,
    )  # fmt: skip
    return order, ends


@triton.jit
def _product(
    x,  # [rows, INNER]
    matrices,  # [EXPERTS, outputs, INNER]
    out,  # [slots, outputs]
    order,  # [slots] slots sorted by expert
    ends,  # [EXPERTS]
    outputs,
    INNER: tl.constexpr,
    EXPERTS: tl.constexpr,
    SHARING: tl.constexpr,  # slots that read the same row of x
    EXPERT_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tile = tl.program_id(1)
    each = tl.arange(0, EXPERT_BLOCK)
    end = tl.load(ends + each, mask=each < EXPERTS, other=0)
    begin = tl.load(ends + each - 1, mask=(each > 0) & (each < EXPERTS), other=0)
    tiles = tl.where(each < EXPERTS, (end - begin + BLOCK_M - 1) // BLOCK_M, 0)
    last = tl.cumsum(tiles, 0)
    expert = tl.sum((last <= tile).to(tl.int32), 0)
    if expert < EXPERTS:
        mine = each == expert
        first = tl.sum(tl.where(mine, begin + (tile - last + tiles) * BLOCK_M, 0), 0)
        stop = tl.sum(tl.where(mine, end, 0), 0)
        at = first + tl.arange(0, BLOCK_M)
        slot = tl.load(order + at, mask=at < stop, other=0)
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        rows = x + (slot // SHARING)[:, None] * INNER + k[None, :]
        columns = matrices + expert.to(tl.int64) * outputs * INNER + n.to(tl.int64)[:, None] * INNER + k[None, :]
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for done in tl.range(0, INNER, BLOCK_K):
            inside = (k < INNER - done)[None, :]
            a = tl.load(rows + done, mask=(at < stop)[:, None] & inside, other=0.0)
            b = tl.load(columns + done, mask=(n < outputs)[:, None] & inside, other=0.0)
            acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
        place = out + slot[:, None] * outputs + n[None, :]
        tl.store(place, acc.to(out.dtype.element_ty), mask=(at < stop)[:, None] & (n < outputs)[None, :])


def _blocks(rows: float, dtype: torch.dtype) -> tuple[int, int, int, int, int]:
    """BLOCK_M, BLOCK_N, BLOCK_K, warps, stages for so many rows an expert on average."""
    if dtype == torch.float32:
        return 16, 32, 32, 4, 1
    if rows <= 8:
        return 16, 64, 128, 4, 4
    if rows <= 16:
        return 32, 128, 64, 4, 4
    if rows <= 64:
        return 64, 128, 64, 4, 4
    return 128, 256, 64, 8, 3


def product(x: Tensor, matrices: Tensor, order: Tensor, ends: Tensor, sharing: int) -> Tensor:
    """x [slots / sharing, inner], matrices [E, outputs, inner] -> [slots, outputs]: each slot's row through its expert."""
    experts, outputs, inner = matrices.shape
    slots = len(order)
    out = x.new_empty(slots, outputs)
    block_m, block_n, block_k, warps, stages = _blocks(slots / experts, x.dtype)
    most = min(slots, slots // block_m + experts)  # tiles that could have rows
    _product[(triton.cdiv(outputs, block_n), most)](
        x, matrices, out, order, ends, outputs, INNER=inner, EXPERTS=experts, SHARING=sharing,
        EXPERT_BLOCK=triton.next_power_of_2(experts), BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


@triton.jit
def _weighted_sum(
    y,  # [T, TOP_K, size]
    weights,  # [T, TOP_K] float32
    out,  # [T, size]
    size,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(TOP_K):
        part = tl.load(y + (token * TOP_K + i) * size + at, mask=at < size, other=0.0).to(tl.float32)
        acc += part * tl.load(weights + token * TOP_K + i)
    tl.store(out + token * size + at, acc.to(out.dtype.element_ty), mask=at < size)


def experts_forward(x: Tensor, weights: Tensor, experts: Tensor, up: Tensor, down: Tensor, activation: str) -> Tensor:
    tokens, top_k = experts.shape
    out = torch.empty_like(x)
    if not tokens:
        return out
    x = x.contiguous()
    order, ends = sort_slots(experts.flatten(), len(up))
    inner = gated(product(x, up, order, ends, sharing=top_k), activation)
    y = product(inner, down, order, ends, sharing=1)
    size = x.shape[1]
    _weighted_sum[(tokens, triton.cdiv(size, SUM_BLOCK))](y, weights, out, size, TOP_K=top_k, BLOCK=SUM_BLOCK)
    return out
