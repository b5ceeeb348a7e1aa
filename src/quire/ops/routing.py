"""Other ways to choose a token's experts than by the softmax of its router's logits."""

import torch
from torch import Tensor


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
    """logits [T, experts] float32 -> weights [T, top_k] float32 and expert ids [T, top_k], by scores: "softmax" or "sigmoid".

    `correction` [experts] counts in the choice, not in the weights. Of several groups only the experts of the `top_groups` best
    are chosen from: those whose `group_best` best experts are best together.
    """
    if logits.is_cuda:
        from quire.ops.kernels import routing

        route = routing.route_by_scores
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
    """As Phi-MoE was trained: one expert after the other, each weighed against those that come near it.

    logits [T, experts] float32 -> weights [T, top_k] float32 and expert ids [T, top_k].
    """
    weights, experts, left = [], [], logits
    for _ in range(top_k):
        most, best = left.max(dim=-1, keepdim=True)
        far = (most - logits) / torch.maximum(logits.abs(), most) > 2 * tolerance
        weights.append(left.masked_fill(far, float("-inf")).softmax(-1).gather(-1, best))
        experts.append(best)
        left = left.scatter(-1, best, float("-inf"))
    return torch.cat(weights, -1), torch.cat(experts, -1)
