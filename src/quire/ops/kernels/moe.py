"""Mixture of experts without a host synchronization: routing, and the choice of the kernels of `experts.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.arguments import ExpertBiases, Inner, Ungated
from quire.ops.kernels.experts import few_slots_forward, sorted_forward, ungated_forward
from quire.ops.kernels.launcher import launched, let_next_start, overlapping, power_of_two, wait_for_previous
from quire.ops.order import order_is_fixed


@triton.jit
def _keys(score, at, exists):
    """Return [...] int64 keys that rise with scores; of equal scores the first has the greater key. Missing ones have the
    least."""
    bits = score.to(tl.int32, bitcast=True)
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    least: tl.constexpr = -0x8000000000000000
    return tl.where(exists, (rising.to(tl.int64) << 32) - at, least)


@launched
@triton.jit
def _choose(
    logits,  # [T, GROUPS * EACH] float32
    correction,  # [GROUPS * EACH] float32, if CORRECTED
    weights,  # [T, TOP_K] float32
    experts,  # [T, TOP_K] int64
    scale,
    SIGMOID: tl.constexpr,
    CORRECTED: tl.constexpr,
    GROUPS: tl.constexpr,
    EACH: tl.constexpr,  # experts per group
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    EACH_BLOCK: tl.constexpr,
    TOP_BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    token = tl.program_id(0).to(tl.int64)
    group, within = tl.arange(0, GROUP_BLOCK), tl.arange(0, EACH_BLOCK)
    at = group[:, None] * EACH + within[None, :]
    exists = (group < GROUPS)[:, None] & (within < EACH)[None, :]
    logit = tl.load(logits + token * (GROUPS * EACH) + at, mask=exists, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        score = tl.where(exists, 1.0 / (1.0 + tl.exp(-logit)), 0.0)
    else:
        most = tl.max(tl.max(logit, 1), 0)
        score = tl.exp(logit - most)
        score = score / tl.sum(tl.sum(score, 1), 0)
    ranked = score
    if CORRECTED:
        ranked = score + tl.load(correction + at, mask=exists, other=0.0)
    least: tl.constexpr = -0x8000000000000000
    key = _keys(ranked, at, exists)
    if TOP_GROUPS < GROUPS:
        best = tl.max(key, 1)
        group_score = tl.max(tl.where(exists, ranked, float("-inf")), 1)
        if GROUP_BEST > 1:
            group_score += tl.max(tl.where(exists & (key != best[:, None]), ranked, float("-inf")), 1)
        group_key = _keys(group_score, group, group < GROUPS)
        chosen = group < 0
        for _ in tl.static_range(TOP_GROUPS):
            greatest = tl.max(group_key, 0)
            chosen = chosen | (group_key == greatest)
            group_key = tl.where(group_key == greatest, least, group_key)
        key = tl.where(chosen[:, None], key, least)
    top = tl.arange(0, TOP_BLOCK)
    picked = tl.zeros((TOP_BLOCK,), tl.int64)
    weight = tl.zeros((TOP_BLOCK,), tl.float32)
    for i in tl.static_range(TOP_K):
        greatest = tl.max(tl.max(key, 1), 0)
        own = exists & (key == greatest)
        picked = tl.where(top == i, tl.max(tl.max(tl.where(own, at, 0), 1), 0).to(tl.int64), picked)
        weight = tl.where(top == i, tl.sum(tl.sum(tl.where(own, score, 0.0), 1), 0), weight)
        key = tl.where(own, least, key)
    if RENORMALIZE:
        weight = weight / tl.maximum(tl.sum(weight, 0), 1e-12)
    tl.store(weights + token * TOP_K + top, weight * scale, mask=top < TOP_K)
    tl.store(experts + token * TOP_K + top, picked, mask=top < TOP_K)


def route_by_scores(
    logits: Tensor,
    top_k: int,
    *,
    scoring: str,
    correction: Tensor | None,
    groups: int,
    top_groups: int,
    group_best: int,
    renormalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    logits = logits.contiguous()
    tokens, experts = logits.shape
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    if tokens:
        each = experts // groups
        _choose[(tokens,)](
            logits, logits if correction is None else correction, weights, chosen, float(scale), SIGMOID=scoring == "sigmoid",
            CORRECTED=correction is not None, GROUPS=groups, EACH=each, TOP_GROUPS=min(top_groups, groups),
            GROUP_BEST=group_best, TOP_K=top_k, RENORMALIZE=renormalize, GROUP_BLOCK=power_of_two(groups),
            EACH_BLOCK=power_of_two(each), TOP_BLOCK=power_of_two(top_k), num_warps=1 if experts <= 128 else 4, **overlapping(),
        )  # fmt: skip
    return weights, chosen


FEW_SLOTS = 64  # up to which slots rarely share an expert


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
    """Pick the greatest key TOP_K times. A key is a logit's bits, made to rise with it, minus the expert's index."""
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
        return ungated_forward(x.contiguous(), weights, experts, up, down, activation.name)
    few = experts.numel() <= FEW_SLOTS and not order_is_fixed()
    forward = few_slots_forward if few else sorted_forward
    return forward(x.contiguous(), weights, experts, up, down, activation, biases)
