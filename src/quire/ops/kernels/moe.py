"""Mixture of experts without the host knowing who goes where: routing, and the choice between the ways through the experts.

A *slot* is one of the top_k places of a token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.arguments import ExpertBiases, Inner, Ungated
from quire.ops.kernels import moe_few, moe_many
from quire.ops.kernels.launcher import launched, let_next_start, overlapping, power_of_two, wait_for_previous

FEW_SLOTS = 64  # so few rarely share an expert


@launched
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
    EARLY: tl.constexpr,
):
    """Picks the greatest key TOP_K times. A key is a logit's bits made to rise with it, less the expert's number."""
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, EXPERT_BLOCK)
    logit = tl.load(logits + token * EXPERTS + at, mask=at < EXPERTS, other=float("-inf")).to(tl.float32)
    bits = logit.to(tl.int32, bitcast=True)
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    least: tl.constexpr = -0x8000000000000000
    key = tl.where(at < EXPERTS, (rising.to(tl.int64) << 32) - at, least)
    top = tl.arange(0, TOP_BLOCK)
    picked = tl.zeros((TOP_BLOCK,), tl.int64)
    for i in tl.static_range(TOP_K):
        best = tl.max(key, 0)
        picked = tl.where(top == i, best, picked)
        key = tl.where(key == best, least, key)
    expert = -picked & 0xFFFFFFFF
    rising = ((picked + expert) >> 32).to(tl.int32)
    value = (rising ^ ((rising >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    value = tl.where(top < TOP_K, value, float("-inf"))
    most = tl.sum(tl.where(top == 0, value, 0.0), 0)
    chance = tl.exp(value - most)
    whole = tl.sum(chance, 0) if RENORMALIZE else tl.sum(tl.exp(logit - most), 0)
    tl.store(weights + token * TOP_K + top, chance / whole, mask=top < TOP_K)
    tl.store(experts + token * TOP_K + top, expert, mask=top < TOP_K)


def route(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    logits = logits.contiguous()
    tokens, experts = logits.shape
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    if tokens:
        _route[(tokens,)](
            logits, weights, chosen, EXPERTS=experts, TOP_K=top_k, RENORMALIZE=renormalize,
            EXPERT_BLOCK=power_of_two(experts), TOP_BLOCK=power_of_two(top_k), num_warps=1, **overlapping(),
        )  # fmt: skip
    return weights, chosen


def experts_forward(
    x: Tensor, weights: Tensor, experts: Tensor, up: Tensor, down: Tensor, activation: Inner, biases: ExpertBiases | None = None
) -> Tensor:
    if not len(x):
        return torch.empty_like(x)
    if isinstance(activation, Ungated):
        return moe_many.ungated_forward(x.contiguous(), weights, experts, up, down, activation.name)
    few = experts.numel() <= FEW_SLOTS
    forward = moe_few.experts_forward if few else moe_many.experts_forward
    return forward(x.contiguous(), weights, experts, up, down, activation, biases)
