"""Mixtures whose experts are chosen in other ways than by a softmax, and those with an expert for every token beside them."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from quire.attn.batch import Tokens
from quire.layers.linear import Linear, Plain
from quire.layers.moe import Experts, MoE
from quire.layers.norm import RMSNorm
from quire.layers.parameter import parameter
from quire.ops.arguments import Inner
from quire.ops.linear import linear_float
from quire.ops.moe import route, route_by_scores, route_sparsemixer
from quire.types.errors import ModelError


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
        activation: Inner,
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
        for name, value in (("routed_scaling_factor", scale), ("router_jitter_noise", tolerance)):
            if not isinstance(value, int | float):  # null, which a configuration may say
                raise ModelError(f"{name} must be a number, got {value!r}")
        self.scoring, self.groups, self.scale, self.tolerance = scoring, groups, scale, tolerance
        self.e_score_correction_bias = None if correction is None else parameter(*correction, dtype=torch.float32)
        self.shared_expert = shared
        self.shared_expert_gate = Linear(hidden_size, 1) if shared_gated else None
        self.post_mlp_layernorm = norm

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        out = self.run_experts(x, *self.choose(x, tokens), tokens)
        if self.shared_expert is None:
            return self.normed(out)
        beside: Tensor = self.shared_expert(x, tokens)
        if self.shared_expert_gate is not None:
            beside = torch.sigmoid(self.shared_expert_gate(x, tokens)) * beside
        return self.normed(out + beside)

    def run_experts(self, x: Tensor, weights: Tensor, chosen: Tensor, tokens: Tokens) -> Tensor:
        out: Tensor = self.experts(x, weights, chosen, tokens)
        return out

    def normed(self, out: Tensor) -> Tensor:
        return out if self.post_mlp_layernorm is None else self.post_mlp_layernorm(out)

    def choose(self, x: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """x [T, H] -> weights [T, top_k] float32 and experts [T, top_k]."""
        correction = self.e_score_correction_bias
        if self.scoring == "softmax" and correction is None and self.groups[0] == 1 and self.scale == 1.0:
            return route(self.gate(x, tokens), self.top_k, self.renormalize)
        plain = isinstance(self.gate.method, Plain) and (tokens.lora is None or self.gate.bank is None)
        logits = linear_float(x, self.gate.weight, self.gate.bias) if plain else self.gate(x, tokens).float()
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


class NarrowMoE(RoutedMoE):
    """Experts see `width` numbers of a token, which are made of it, and what they give is made its size again."""

    def __init__(self, hidden_size: int, inner_size: int, activation: Inner, *, width: int, bias: bool, **more: Any) -> None:
        super().__init__(hidden_size, inner_size, activation, **more)
        self.experts = Experts(more["experts"], width, inner_size, activation)
        self.fc1_latent_proj = Linear(hidden_size, width, bias=bias)
        self.fc2_latent_proj = Linear(width, hidden_size, bias=bias)

    def run_experts(self, x: Tensor, weights: Tensor, chosen: Tensor, tokens: Tokens) -> Tensor:
        narrow = self.fc1_latent_proj(x, tokens)
        out: Tensor = self.fc2_latent_proj(self.experts(narrow, weights, chosen, tokens), tokens)
        return out
