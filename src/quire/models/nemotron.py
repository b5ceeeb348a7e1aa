"""Nemotron: LayerNorms whose weight is an offset from one and squared ReLU; Nemotron-H has one mixer per layer."""

from typing import TYPE_CHECKING, Any

from torch import nn

from quire.config.layer_patterns import nemotron_types
from quire.layers.mlp import MLP
from quire.layers.moe import NarrowMoE, RoutedMoE
from quire.layers.norm import LayerNorm, Norm, RMSNorm
from quire.models.deepseek import check_routing
from quire.models.hybrid import HybridDecoder, OneMixerBlock, make_mamba2
from quire.models.llama import Llama
from quire.ops.arguments import Ungated

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts


class Nemotron(Llama):
    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        hf = facts.hf
        return MLP(facts.hidden_size, hf["intermediate_size"], hf.get("hidden_act", "relu2"), bias=bool(hf.get("mlp_bias")))

    def make_norm(self, facts: "ModelFacts", size: int | None = None) -> Norm:
        return LayerNorm(size or facts.hidden_size, facts.hf.get("norm_eps", 1e-5), offset=1.0)


EXPERTS = ("moe", "E")  # mlp types of layers with experts


class NemotronH(HybridDecoder):
    """Nemotron-H: each layer is Mamba 2, attention without RoPE, or a feed-forward, with experts or without."""

    renames = (
        (r"^(backbone|model)\.", ""),
        (r"^embeddings\.", "embed_tokens."),
        (r"^norm_f\.", "norm."),
        (r"^mtp\.", None),
        (r"\.gate\.e_score_correction_bias$", ".e_score_correction_bias"),
        (r"\.shared_experts\.", ".shared_expert."),
    )

    def make_norm(self, facts: "ModelFacts", size: int | None = None) -> Norm:
        return RMSNorm(size or facts.hidden_size, facts.hf.get("layer_norm_epsilon", 1e-5))

    def make_block(self, facts: "ModelFacts", index: int) -> nn.Module:
        kind, hf = facts.kinds[index], facts.hf
        if kind == "attention":
            bias = bool(hf.get("attention_bias"))
            mixer: nn.Module = self.attend(facts, index, bias=bias, out_bias=bias, rope=None)
        elif kind == "recurrent":
            mixer = self.make_mixer(facts, index)
        else:
            mixer = self.make_mlp(facts, index)
        return OneMixerBlock(self.make_norm(facts), mixer, feeds=kind == "neither")

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:
        hf = facts.hf
        activation, bias = hf.get("mlp_hidden_act", "relu2"), bool(hf.get("mlp_bias"))
        if nemotron_types(hf)[index] not in EXPERTS:
            return MLP(facts.hidden_size, hf["intermediate_size"], activation, bias=bias)
        experts, top_k = hf["n_routed_experts"], hf["num_experts_per_tok"]
        groups = hf.get("n_group") or 1, hf.get("topk_group") or 1, 2
        check_routing(experts, top_k, groups)
        options: dict[str, Any] = {
            "experts": experts,
            "top_k": top_k,
            "renormalize": bool(hf.get("norm_topk_prob", True)),
            "scoring": "sigmoid",
            "correction": (experts,),
            "groups": groups,
            "scale": hf.get("routed_scaling_factor", 1.0),
            "shared": MLP(facts.hidden_size, hf["moe_shared_expert_intermediate_size"], activation, bias=bias),
        }
        sizes = facts.hidden_size, hf["moe_intermediate_size"], Ungated(activation)
        width = hf.get("moe_latent_size")
        return RoutedMoE(*sizes, **options) if width is None else NarrowMoE(*sizes, width=width, bias=bias, **options)

    def make_mixer(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        hf = facts.hf
        return make_mamba2(
            facts,
            hf.get("layer_norm_epsilon", 1e-5),
            bias=bool(hf.get("mamba_proj_bias", hf.get("use_bias"))),
            conv_bias=bool(hf.get("use_conv_bias", True)),
            limits=(hf.get("time_step_min", 0.001), float("inf")),
        )
