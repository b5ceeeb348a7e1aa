"""Mixtures whose experts are chosen in other ways than by a softmax, and those with an expert for every token beside them."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from quire.attn.batch import AdapterRows
from quire.layers.linear import Linear, Plain
from quire.layers.moe import MoE
from quire.layers.norm import RMSNorm
from quire.layers.parameter import parameter
from quire.ops.linear import linear_float
from quire.ops.moe import route
from quire.ops.routing import route_by_scores, route_sparsemixer


class RoutedMoE(MoE):
    """`scoring` turns a router's logits into scores; `correction`: the shape of what is added to them for the choice alone.

    `groups`: of experts, how many of these are chosen from, and how many of its best a group is judged by. `scale`: of the
    chosen ones' weights. `tolerance`: of Phi's choice. `shared`: what every token goes through besides; `shared_gated`: as
    far as a gate lets it. `norm`: of what comes out.
    """

    fixed = frozenset({"e_score_correction_bias"})

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        activation: str,
        *,
        experts: int,
        top_k: int,
        renormalize: bool,
        scoring: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax",
        correction: Sequence[int] | None = None,
        groups: tuple[int, int, int] = (1, 1, 2),
        scale: float = 1.0,
        tolerance: float = 0.01,
        shared: nn.Module | None = None,
        shared_gated: bool = False,
        norm: RMSNorm | None = None,
    ) -> None:
        super().__init__(hidden_size, inner_size, activation, experts=experts, top_k=top_k, renormalize=renormalize)
        self.scoring, self.groups, self.scale, self.tolerance = scoring, groups, scale, tolerance
        self.e_score_correction_bias = None if correction is None else parameter(*correction, dtype=torch.float32)
        self.shared_expert = shared
        self.shared_expert_gate = Linear(hidden_size, 1) if shared_gated else None
        self.post_mlp_layernorm = norm

    def forward(self, x: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        weights, chosen = self.choose(x, adapters)
        out: Tensor = self.experts(x, weights, chosen, adapters)
        if self.shared_expert is None:
            return self.normed(out)
        beside: Tensor = self.shared_expert(x, adapters)
        if self.shared_expert_gate is not None:
            beside = torch.sigmoid(self.shared_expert_gate(x, adapters)) * beside
        return self.normed(out + beside)

    def normed(self, out: Tensor) -> Tensor:
        return out if self.post_mlp_layernorm is None else self.post_mlp_layernorm(out)

    def choose(self, x: Tensor, adapters: AdapterRows | None) -> tuple[Tensor, Tensor]:
        """x [T, H] -> weights [T, top_k] float32 and experts [T, top_k]."""
        correction = self.e_score_correction_bias
        if self.scoring == "softmax" and correction is None and self.groups[0] == 1 and self.scale == 1.0:
            return route(self.gate(x, adapters), self.top_k, self.renormalize)
        plain = isinstance(self.gate.method, Plain) and (adapters is None or self.gate.bank is None)
        logits = linear_float(x, self.gate.weight, self.gate.bias) if plain else self.gate(x, adapters).float()
        if self.scoring == "sparsemixer":
            return route_sparsemixer(logits, self.top_k, self.tolerance)
        return route_by_scores(
            logits,
            self.top_k,
            scoring=self.scoring,
            correction=None if correction is None else correction.flatten(),
            groups=self.groups[0],
            top_groups=self.groups[1],
            group_best=self.groups[2],
            renormalize=self.renormalize,
            scale=self.scale,
        )
