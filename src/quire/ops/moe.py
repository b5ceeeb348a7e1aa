"""Mixture of experts: choose experts per token, and run each expert on its tokens."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.activation import reference_gated
from quire.ops.arguments import ExpertBiases, Inner


def route_by_scores(
    logits: Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    correction: Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    group_best: int = 2,
    renormalize: bool = True,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return weights [T, top_k] float32 and expert ids [T, top_k] for logits [T, experts] float32.

    scoring: "softmax" or "sigmoid"
    correction: [experts] added for the choice, not for the weights
    top_groups: only experts of the `top_groups` best groups are chosen; a group is scored by the sum of its `group_best` best
        experts
    """
    if logits.is_cuda:
        from quire.ops.kernels import moe

        route = moe.route_by_scores
    else:
        route = reference_route_by_scores
    return route(
        logits, top_k, scoring=scoring, correction=correction, groups=groups, top_groups=top_groups, group_best=group_best,
        renormalize=renormalize, scale=scale,
    )  # fmt: skip


def reference_route_by_scores(
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
    scores = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)
    ranked = scores if correction is None else scores + correction
    if groups > 1:
        by_group = ranked.view(len(ranked), groups, -1)
        best = by_group.topk(group_best, dim=-1).values.sum(-1).topk(top_groups, dim=-1).indices
        chosen = torch.zeros(by_group.shape[:2], dtype=torch.bool, device=logits.device).scatter_(1, best, True)
        ranked = by_group.masked_fill(~chosen.unsqueeze(-1), float("-inf")).flatten(1)
    experts = ranked.topk(top_k, dim=-1).indices
    weights = scores.gather(1, experts)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min_(1e-12)
    return weights * scale, experts


def route_sparsemixer(logits: Tensor, top_k: int, tolerance: float) -> tuple[Tensor, Tensor]:
    """Route as Phi-MoE was trained: choose one expert after the other, each weighed against those with similar logits.

    Return weights [T, top_k] float32 and expert ids [T, top_k] for logits [T, experts] float32.
    """
    weights, experts, left = [], [], logits
    for _ in range(top_k):
        most, best = left.max(dim=-1, keepdim=True)
        far = (most - logits) / torch.maximum(logits.abs(), most) > 2 * tolerance
        weights.append(left.masked_fill(far, float("-inf")).softmax(-1).gather(-1, best))
        experts.append(best)
        left = left.scatter(-1, best, float("-inf"))
    return torch.cat(weights, -1), torch.cat(experts, -1)


# rows, expert id, and the biases before and after its activation
RunExpert = Callable[[Tensor, int, Tensor | None, Tensor | None], Tensor]


def route(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Return weights [T, top_k] float32 and expert ids [T, top_k] for logits [T, experts]; the softmax is over all experts."""
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
    """Return the experts' output [T, H] for x [T, H].

    weights, experts: [T, top_k]
    up: [E, 2I, H], gate rows first, or [E, I, H] without gates
    down: [E, H, I]
    A token's contributions are added in an order that does not depend on the other tokens.
    """
    if x.is_cuda:
        from quire.ops.kernels import moe

        return moe.experts_forward(x, weights, experts, up, down, activation, biases)
    return reference_experts_forward(x, weights, experts, up, down, activation, biases)


def reference_experts_forward(
    x: Tensor, weights: Tensor, experts: Tensor, up: Tensor, down: Tensor, activation: Inner, biases: ExpertBiases | None = None
) -> Tensor:
    def run(rows: Tensor, expert: int, before: Tensor | None, after: Tensor | None) -> Tensor:
        return F.linear(reference_gated(F.linear(rows, up[expert], before), activation), down[expert], after)

    return sum_experts(x, weights, experts, len(up), run, biases)


def sum_experts(x: Tensor, weights: Tensor, experts: Tensor, count: int, run: RunExpert, biases: ExpertBiases | None) -> Tensor:
    """Run each of `count` experts on its tokens at once by `run`, and add the weighted outputs in the experts' order."""
    flat = experts.flatten()  # [T * top_k]
    order = flat.argsort(stable=True)  # slots grouped by expert
    tokens, share = order // experts.shape[1], weights.flatten()[order].unsqueeze(1)
    out = torch.zeros_like(x, dtype=torch.float32)
    start = 0
    for expert, taken in enumerate(torch.bincount(flat, minlength=count).tolist()):
        if taken:
            mine = tokens[start : start + taken]
            before = None if biases is None else biases.up[expert]
            after = None if biases is None or biases.down is None else biases.down[expert]
            out.index_add_(0, mine, run(x[mine], expert, before, after).float() * share[start : start + taken])
            start += taken
    return out.to(x.dtype)
