"""LFM2: gated short convolutions and some attention layers."""

from typing import TYPE_CHECKING

from torch import nn

from quire.layers.attention import SelfAttention
from quire.layers.mlp import GatedMLP
from quire.layers.moe import RoutedMoE
from quire.layers.norm import Norm, RMSNorm
from quire.layers.recurrent import ShortConv
from quire.models.hybrid import HybridDecoder

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts


class LFM2(HybridDecoder):
    tied = True
    renames = (
        *HybridDecoder.renames,
        (r"^embedding_norm\.", "norm."),
        (r"\.self_attn\.out_proj\.", ".mixer.o_proj."),
        (r"\.self_attn\.", ".mixer."),
        (r"\.conv\.(in_proj|out_proj|conv)\.", r".mixer.\1."),
        (r"\.mixer\.([qk])_layernorm\.", r".mixer.\1_norm."),
        (r"\.operator_norm\.", ".norm."),
        (r"\.ffn_norm\.", ".feed_norm."),
        (r"\.w1\.", ".gate_proj."),
        (r"\.w3\.", ".up_proj."),
        (r"\.w2\.", ".down_proj."),
    )

    def make_norm(self, facts: "ModelFacts", size: int | None = None) -> Norm:
        return RMSNorm(size or facts.hidden_size, facts.hf.get("norm_eps", 1e-5))

    def make_mixer(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        return ShortConv(facts.hidden_size, facts.hf.get("conv_L_cache", 3), bias=bool(facts.hf.get("conv_bias")))

    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        size = facts.layers[0].head_dim
        return self.attend(facts, index, q_norm=self.make_norm(facts, size), k_norm=self.make_norm(facts, size))

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        return GatedMLP(facts.hidden_size, self.inner_size(facts), "silu")

    def inner_size(self, facts: "ModelFacts") -> int:
        hf = facts.hf
        size = int(hf.get("block_ff_dim") or hf["intermediate_size"])
        if hf.get("block_auto_adjust_ff_dim", True):
            size = int(2 * size / 3)
            if (factor := hf.get("block_ffn_dim_multiplier", 1.0)) is not None:
                step = hf.get("block_multiple_of", 256)
                size = -(-int(factor * size) // step) * step
        return size


class LFM2MoE(LFM2):
    """LFM2 with experts after the first few layers."""

    renames = (*LFM2.renames, (r"\.feed_forward\.expert_bias$", ".feed_forward.e_score_correction_bias"))

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:
        hf = facts.hf
        if index < hf.get("num_dense_layers", 2):
            return GatedMLP(facts.hidden_size, hf["intermediate_size"], "silu")
        experts = hf.get("num_experts", 32)
        return RoutedMoE(
            facts.hidden_size,
            hf.get("moe_intermediate_size", 1792),
            "silu",
            experts=experts,
            top_k=hf.get("num_experts_per_tok", 4),
            renormalize=bool(hf.get("norm_topk_prob", True)),
            scoring="sigmoid",
            correction=(experts,) if hf.get("use_expert_bias", True) else None,
            scale=hf.get("routed_scaling_factor", 1.0),
        )
