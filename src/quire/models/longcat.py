"""LongCat-Flash: blocks of two latent attentions, two feed-forwards, and experts parallel to them. The experts read the output
of the first attention; their output is added at the end. Some experts are the identity.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quire.attn.batch import Batch, Tokens
from quire.layers.latent import EPS, LatentAttention
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP
from quire.layers.moe import RoutedMoE
from quire.layers.norm import Norm, RMSNorm
from quire.models.deepseek import Latent
from quire.types.errors import ModelError

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts


class ScaledNorm(RMSNorm):
    """RMSNorm whose output is multiplied by `scale`."""

    def __init__(self, size: int, eps: float, scale: float) -> None:
        super().__init__(size, eps)
        self.scale = scale

    def finish(self, device: torch.device) -> None:  # noqa: ARG002
        self.weight.data *= self.scale


class IdentityMoE(RoutedMoE):
    """Mixture of experts whose router also chooses among `identities` experts that return their input."""

    def __init__(
        self, hidden_size: int, inner_size: int, activation: str, *, experts: int, identities: int, **more: Any
    ) -> None:
        super().__init__(hidden_size, inner_size, activation, experts=experts, correction=(experts + identities,), **more)
        self.gate = Linear(hidden_size, experts + identities)

    def run_experts(self, x: Tensor, weights: Tensor, chosen: Tensor, tokens: Tokens) -> Tensor:
        identity = chosen >= self.experts.total
        given = weights.masked_fill(~identity, 0.0).sum(-1, keepdim=True).to(x.dtype) * x
        return super().run_experts(x, weights.masked_fill(identity, 0.0), chosen.masked_fill(identity, 0), tokens) + given


class LongCatBlock(nn.Module):
    """Norm, attention, norm, feed-forward, twice; the experts read the input of the first feed-forward."""

    def __init__(self, norms: list[Norm], attentions: list[LatentAttention], mlps: list[nn.Module], mlp: IdentityMoE) -> None:
        super().__init__()
        self.input_layernorm = nn.ModuleList(norms[:2])  # type: ignore[arg-type]
        self.post_attention_layernorm = nn.ModuleList(norms[2:])  # type: ignore[arg-type]
        self.self_attn, self.mlps, self.mlp = nn.ModuleList(attentions), nn.ModuleList(mlps), mlp

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor | None]:
        before: Any = self.input_layernorm
        after: Any = self.post_attention_layernorm
        first, second = self.self_attn
        assert isinstance(second, LatentAttention)
        x, residual = before[0].add(x, residual)
        x, residual = after[0].add(first(x, batch), residual)
        routed = self.mlp(x, batch.tokens)
        x, residual = before[1].add(self.mlps[0](x, batch.tokens), residual)
        x, residual = after[1].add(second(x, batch), second.select_residual(residual, batch))
        return self.mlps[1](x, second.tokens_after(batch)) + second.select_residual(routed, batch), residual


class LongCat(Latent):
    renames = (
        *Latent.renames,
        (r"^mtp\.", None),  # draft layers
        (r"\.mlp\.router\.classifier\.", ".mlp.gate."),
        (r"\.mlp\.router\.e_score_correction_bias$", ".mlp.e_score_correction_bias"),
    )

    def __init__(self, facts: "ModelFacts") -> None:
        super().__init__(facts)
        experts, identities = facts.hf["n_routed_experts"], facts.hf.get("zero_expert_num") or 0
        if identities:  # transformers also writes weights for these
            unused = "|".join(map(str, range(experts, experts + identities)))
            self.renames = (*self.renames, (rf"\.mlp\.experts\.({unused})\.", None))

    def count_blocks(self, facts: "ModelFacts") -> int:
        return len(facts.layers) // 2

    def make_block(self, facts: "ModelFacts", index: int) -> nn.Module:
        norms = [self.make_norm(facts) for _ in range(4)]
        attentions = [self.make_attention(facts, 2 * index + which) for which in range(2)]
        return LongCatBlock(norms, attentions, [self.make_mlp(facts, index) for _ in range(2)], self.make_mixture(facts))

    def make_attention(self, facts: "ModelFacts", index: int) -> LatentAttention:  # type: ignore[override]
        hf, attention = facts.hf, super().make_attention(facts, index)
        ranks = hf["q_lora_rank"], hf["kv_lora_rank"]
        if not all(ranks):
            raise ModelError(f"q_lora_rank and kv_lora_rank must be positive integers; got {ranks[0]!r} and {ranks[1]!r}")
        queries, keys = ((facts.hidden_size / rank) ** 0.5 for rank in ranks)
        attention.core.spec = replace(attention.core.spec, scale=attention.core.spec.scale * queries)
        attention.kv_a_layernorm = ScaledNorm(ranks[1], EPS, keys)
        return attention

    def make_mixture(self, facts: "ModelFacts") -> IdentityMoE:
        hf = facts.hf
        if hf.get("router_bias"):
            raise ModelError("router_bias is not supported; it must be false")
        return IdentityMoE(
            facts.hidden_size,
            hf["moe_intermediate_size"],
            hf["hidden_act"],
            experts=hf["n_routed_experts"],
            identities=hf.get("zero_expert_num") or 0,
            top_k=hf["num_experts_per_tok"],
            renormalize=False,
            scale=hf.get("routed_scaling_factor", 1.0),
        )

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        return GatedMLP(facts.hidden_size, facts.hf["intermediate_size"], facts.hf["hidden_act"])
