"""Mixture of experts without the host knowing who goes where: routing, and the choice between the ways through the experts.

A *slot* is one of the top_k places of a token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.kernels import moe_few, moe_many
from quire.ops.kernels.overlap import let_next_start, overlapping, wait_for_previous

FEW_SLOTS = 64  # so few rarely share an expert
RANK_STEP = 128


@triton.jit
def _keys(logit, at, EXPERTS: tl.constexpr):
    """Integers that are all different, in the order of the logits; of equal ones the lower number is greater."""
    bits = logit.to(tl.int32, bitcast=True)
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(at < EXPERTS, (rising.to(tl.int64) << 32) - at, -0x8000000000000000)


@triton.jit
def _route(
    logits,  # [T, EXPERTS]
    weights,  # [T, TOP_K] float32
    experts,  # [T, TOP_K] int64
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    EARLY: tl.constexpr,
):
    """An expert's place is the number of those with a greater key."""
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    token = tl.program_id(0).to(tl.int64)
    logits += token * EXPERTS
    at = tl.arange(0, EXPERT_BLOCK)
    logit = tl.load(logits + at, mask=at < EXPERTS, other=float("-inf")).to(tl.float32)
    chance = tl.exp(logit - tl.max(logit, 0))
    key = _keys(logit, at, EXPERTS)
    place = tl.zeros((EXPERT_BLOCK,), tl.int32)
    for begin in tl.range(0, EXPERTS, STEP):
        other = begin + tl.arange(0, STEP)
        theirs = _keys(tl.load(logits + other, mask=other < EXPERTS, other=0.0).to(tl.float32), other, EXPERTS)
        place += tl.sum((theirs[:, None] > key[None, :]).to(tl.int32), 0)
    chosen = (place < TOP_K) & (at < EXPERTS)
    whole = tl.sum(tl.where(chosen, chance, 0.0), 0) if RENORMALIZE else tl.sum(chance, 0)
    tl.store(weights + token * TOP_K + place, chance / whole, mask=chosen)
    tl.store(experts + token * TOP_K + place, at.to(tl.int64), mask=chosen)


def route(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    logits = logits.contiguous()
    tokens, experts = logits.shape
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    if tokens:
        block = triton.next_power_of_2(experts)
        _route[(tokens,)](
            logits, weights, chosen, EXPERTS=experts, TOP_K=top_k, RENORMALIZE=renormalize,
            EXPERT_BLOCK=block, STEP=min(RANK_STEP, block), num_warps=4, **overlapping(),
        )  # fmt: skip
    return weights, chosen


def experts_forward(x: Tensor, weights: Tensor, experts: Tensor, up: Tensor, down: Tensor, activation: str) -> Tensor:
    if not len(x):
        return torch.empty_like(x)
    few = experts.numel() <= FEW_SLOTS
    forward = moe_few.experts_forward if few else moe_many.experts_forward
    return forward(x.contiguous(), weights, experts, up, down, activation)
