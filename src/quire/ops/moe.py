"""Mixture of experts: choosing experts per token, and running each expert on its own tokens."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.activation import reference_gated
from quire.ops.arguments import ExpertBiases, Inner

# rows, the expert's number, and what is added before and behind its activation
RunExpert = Callable[[Tensor, int, Tensor | None, Tensor | None], Tensor]


def route(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """logits [T, experts] -> weights [T, top_k] float32 and expert ids [T, top_k]; the softmax is over all experts."""
    if logits.is_cuda:
        from quire.ops.kernels import moe

        return moe.route(logits, top_k, renormalize)
    return reference_route(logits, top_k, renormalize)


def reference_route(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    weights, experts = torch.softmax(logits.float(), dim=-1).topk(top_k, dim=-1)
    return (weights / weights.sum(-1, keepdim=True) if renormalize else weights), experts


def experts_forward(
    x: Tensor, weights: Tensor, experts: Tensor, up: Tensor, down: Tensor, activation: Inner, biases: ExpertBiases | None = None
) -> Tensor:
    """x [T, H], weights and experts [T, top_k], up [E, 2I, H] (gate above up) or [E, I, H], down [E, H, I] -> [T, H].

    A token's contributions are added in an order of its own, so the other tokens cannot change its result.
    """
    if x.is_cuda:
        from quire.ops.kernels import moe

        return moe.experts_forward(x, weights, experts, up, down, activation, biases)
    return reference_experts_forward(x, weights, experts, up, down, activation, biases)


def reference_experts_forward(
    x: Tensor, weights: Tensor, experts: Tensor, up: Tensor, down: Tensor, activation: Inner, biases: ExpertBiases | None = None
) -> Tensor:
    def run(rows: Tensor, expert: int, before: Tensor | None, behind: Tensor | None) -> Tensor:
        return F.linear(reference_gated(F.linear(rows, up[expert], before), activation), down[expert], behind)

    return sum_experts(x, weights, experts, len(up), run, biases)


def sum_experts(x: Tensor, weights: Tensor, experts: Tensor, count: int, run: RunExpert, biases: ExpertBiases | None) -> Tensor:
    """Each of `count` experts runs its own tokens' rows at once; what they give is weighted and added in the experts' order."""
    flat = experts.flatten()  # [T * top_k]
    order = flat.argsort(stable=True)  # slots grouped by expert
    tokens, share = order // experts.shape[1], weights.flatten()[order].unsqueeze(1)
    out = torch.zeros_like(x, dtype=torch.float32)
    start = 0
    for expert, taken in enumerate(torch.bincount(flat, minlength=count).tolist()):
        if taken:
            mine = tokens[start : start + taken]
            before = None if biases is None else biases.up[expert]
            behind = None if biases is None or biases.down is None else biases.down[expert]
            out.index_add_(0, mine, run(x[mine], expert, before, behind).float() * share[start : start + taken])
            start += taken
    return out.to(x.dtype)
