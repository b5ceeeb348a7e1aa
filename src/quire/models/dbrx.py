"""DBRX: LayerNorms without biases, clipped projections, experts concatenated in one matrix."""

from typing import TYPE_CHECKING

from torch import nn

from quire.layers.attention import SelfAttention
from quire.layers.moe import Experts, MoE, PlainExperts
from quire.layers.norm import LayerNorm, Norm
from quire.layers.parameter import CheckpointTensor, Destination, WeightSlices
from quire.models.decoder import Decoder
from quire.types.errors import ModelError

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts


class StackedExperts(PlainExperts):
    """Experts whose checkpoint has `path.w1`, `path.v1` and `path.w2` (down, transposed), each [E * inner, hidden]."""

    def weight_slices(self, layer: Experts, path: str) -> WeightSlices:
        gates, ups = layer.up.data.chunk(2, dim=1)
        taken: WeightSlices = {}
        for name, stack in (("w1", gates), ("v1", ups), ("w2", layer.down.data.mT)):
            destinations = []
            for number, expert in enumerate(layer.local):
                first = expert * layer.total_inner
                rows = first + layer.local_inner.start, first + layer.local_inner.stop
                destinations.append(Destination(stack[number], (rows, (0, layer.hidden_size))))
            taken[f"{path}.{name}"] = CheckpointTensor(
                (layer.total * layer.total_inner, layer.hidden_size), tuple(destinations)
            )
        return taken


class DBRX(Decoder):
    renames = (
        (r"^transformer\.", ""),
        (r"rotary_emb\.inv_freq$", None),
        (r"^wte\.", "embed_tokens."),
        (r"^blocks\.", "layers."),
        (r"^norm_f\.", "norm."),
        (r"\.norm_attn_norm\.norm_1\.", ".input_layernorm."),
        (r"\.norm_attn_norm\.norm_2\.", ".post_attention_layernorm."),
        (r"\.norm_attn_norm\.attn\.Wqkv\.", ".self_attn.qkv."),
        (r"\.norm_attn_norm\.attn\.out_proj\.", ".self_attn.o_proj."),
        (r"\.ffn\.router\.layer\.", ".mlp.gate."),
        (r"\.ffn\.experts\.mlp\.", ".mlp.experts."),
    )

    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        clip = facts.hf["attn_config"].get("clip_qkv")
        return self.attention(facts, index, heads=facts.hf["n_heads"], fused=True, clip=clip)

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        ffn = facts.hf["ffn_config"]
        power = ffn.get("moe_normalize_expert_weights", 1.0)
        if power not in (None, 1):
            raise ModelError(f"ffn_config.moe_normalize_expert_weights must be 1 or null; got {power!r}")
        moe = MoE(
            facts.hidden_size,
            ffn["ffn_hidden_size"],
            (ffn.get("ffn_act_fn") or {}).get("name", "silu"),
            experts=ffn["moe_num_experts"],
            top_k=ffn["moe_top_k"],
            renormalize=power is not None,
        )
        moe.experts.use(StackedExperts())
        return moe

    def make_norm(self, facts: "ModelFacts", size: int | None = None) -> Norm:
        return LayerNorm(size or facts.hidden_size, 1e-5, bias=False)
