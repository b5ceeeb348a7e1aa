"""Hunyuan: Llama with norms of the heads of queries and keys after RoPE."""

from typing import TYPE_CHECKING

from torch import nn

from quire.layers.attention import SelfAttention
from quire.layers.moe import RoutedMoE
from quire.models.decoder import Decoder

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts


class HunYuan(Decoder):
    renames: tuple[tuple[str, str | None], ...] = (
        *Decoder.renames,
        (r"\.self_attn\.query_layernorm\.", ".self_attn.q_norm."),
        (r"\.self_attn\.key_layernorm\.", ".self_attn.k_norm."),
    )

    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        bias, head_dim = bool(facts.hf.get("attention_bias")), facts.layers[index].head_dim
        q_norm, k_norm = self.make_norm(facts, head_dim), self.make_norm(facts, head_dim)
        return self.attention(facts, index, bias=bias, out_bias=bias, q_norm=q_norm, k_norm=k_norm, norm_last=True)


class HunYuanMoE(HunYuan):
    """Hunyuan with experts and a shared expert."""

    renames = (
        *HunYuan.renames,
        (r"\.mlp\.gate\.wg\.", ".mlp.gate."),
        (r"\.mlp\.shared_mlp\.", ".mlp.shared_expert."),
    )

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:
        hf = facts.hf
        experts, top_k = (value[index] if isinstance(value, list) else value for value in (hf["num_experts"], hf["moe_topk"]))
        return RoutedMoE(
            facts.hidden_size,
            hf["intermediate_size"],
            hf["hidden_act"],
            experts=experts,
            top_k=top_k,
            renormalize=True,
            shared=super().make_mlp(facts, index),
        )
