"""Families of known attention with a mixture of experts."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from quire.files.reading import shown
from quire.layers.attention import SelfAttention
from quire.layers.embedding import Head
from quire.layers.mlp import GatedMLP
from quire.layers.moe import MoE, RoutedMoE
from quire.layers.norm import LayerNorm, Norm
from quire.models.decoder import Decoder
from quire.models.deepseek import SparseDecoder
from quire.models.exaone import Exaone4
from quire.models.llama import Ernie45, Llama, Mixtral, Qwen2, Qwen3, local_experts
from quire.models.olmo import Olmo2
from quire.types.errors import ModelError

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts


class Qwen2MoE(Qwen2):
    """Qwen 2 with experts and a gated shared expert."""

    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        return self.attention(facts, index, bias=facts.hf.get("qkv_bias", True))

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:
        return super().make_mlp(facts, index) if is_dense(facts, index) else with_shared_expert(facts)


def is_dense(facts: "ModelFacts", index: int) -> bool:
    hf = facts.hf
    return index in (hf.get("mlp_only_layers") or ()) or bool((index + 1) % hf.get("decoder_sparse_step", 1))


def with_shared_expert(facts: "ModelFacts", renormalize: bool = False) -> RoutedMoE:
    """Return experts with a gated shared expert. `renormalize`: default of norm_topk_prob."""
    hf = facts.hf
    return RoutedMoE(
        facts.hidden_size,
        hf["moe_intermediate_size"],
        hf["hidden_act"],
        experts=hf["num_experts"],
        top_k=hf["num_experts_per_tok"],
        renormalize=bool(hf.get("norm_topk_prob", renormalize)),
        shared=GatedMLP(facts.hidden_size, hf["shared_expert_intermediate_size"], hf["hidden_act"]),
        shared_gated=True,
    )


class OlmoE(Olmo2):
    """OLMoE: OLMo 2's attention in Llama's block."""

    def make_block(self, facts: "ModelFacts", index: int) -> nn.Module:
        return Decoder.make_block(self, facts, index)

    def differences(self, facts: "ModelFacts", index: int) -> dict[str, Any]:
        return super().differences(facts, index) | {"clip": facts.hf.get("clip_qkv")}

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        hf = facts.hf
        return MoE(
            facts.hidden_size,
            hf["intermediate_size"],
            hf["hidden_act"],
            experts=hf["num_experts"],
            top_k=hf["num_experts_per_tok"],
            renormalize=bool(hf.get("norm_topk_prob")),
        )


class FlexOlmo(OlmoE):
    def make_block(self, facts: "ModelFacts", index: int) -> nn.Module:
        return Olmo2.make_block(self, facts, index)


class PhiMoE(Mixtral):
    """Phi 3.5 MoE: LayerNorms, biases, and two experts per token that are chosen one after the other."""

    def __init__(self, facts: "ModelFacts") -> None:
        if (chosen := facts.hf.get("num_experts_per_tok", 2)) != 2:
            raise ModelError(
                f"num_experts_per_tok must be 2 for {facts.architecture}, whose router chooses two experts; got {shown(chosen)}"
            )
        super().__init__(facts)

    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        bias = bool(facts.hf.get("attention_bias"))
        return self.attention(facts, index, bias=bias, out_bias=bias)

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        tolerance = facts.hf.get("router_jitter_noise", 0.01)
        return local_experts(RoutedMoE, facts, renormalize=False, scoring="sparsemixer", tolerance=tolerance)

    def make_norm(self, facts: "ModelFacts", size: int | None = None) -> Norm:
        return LayerNorm(size or facts.hidden_size, facts.hf.get("rms_norm_eps", 1e-5))

    def make_head(self, facts: "ModelFacts") -> Head:
        tied = self.embed_tokens if facts.hf.get("tie_word_embeddings", self.tied) else None
        return Head(facts.vocab_size, facts.hidden_size, tied=tied, bias=bool(facts.hf.get("lm_head_bias")))


class MiniMaxM2(Mixtral):
    """MiniMax M2: sigmoid scores with a correction for the choice; queries and keys are normalized over all heads."""

    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        return self.attention(facts, index, width_norm=facts.hf.get("rms_norm_eps", 1e-6))

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        correction = (facts.hf["num_local_experts"],)
        return local_experts(RoutedMoE, facts, renormalize=True, scoring="sigmoid", correction=correction)


class Ernie45MoE(Ernie45):
    renames = (
        *Ernie45.renames,
        (r"^mtp_", None),  # draft layers
        (r"\.mlp\.(gate\.)?moe_statics\.", ".mlp."),
        (r"\.mlp\.shared_experts\.", ".mlp.shared_expert."),
    )

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:
        hf = facts.hf
        first, last, every = (
            hf.get("moe_layer_start_index", 1),
            hf.get("moe_layer_end_index", -1),
            hf.get("moe_layer_interval", 1),
        )
        if (index + 1) % every or index < first or index > (len(facts.layers) - 1 if last == -1 else last):
            return super().make_mlp(facts, index)
        inner, shared = hf["moe_intermediate_size"], hf.get("moe_num_shared_experts", 2)
        bias = bool(hf.get("use_bias"))
        return RoutedMoE(
            facts.hidden_size,
            inner,
            hf["hidden_act"],
            experts=hf["moe_num_experts"],
            top_k=hf["moe_k"],
            renormalize=True,
            correction=(1, hf["moe_num_experts"]),
            shared=GatedMLP(facts.hidden_size, inner * shared, hf["hidden_act"], bias=bias) if shared else None,
        )


class Glm4MoE(SparseDecoder, Llama):
    """GLM 4.5."""

    shared = 1

    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        norms, head_dim = dict[str, Norm](), facts.layers[index].head_dim
        if facts.hf.get("use_qk_norm"):
            norms = {name: self.make_norm(facts, head_dim) for name in ("q_norm", "k_norm")}
        return self.attention(facts, index, bias=bool(facts.hf.get("attention_bias")), **norms)

    def routing(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "renormalize": hf.get("norm_topk_prob", True),
            "scoring": "sigmoid",
            "correction": (hf["n_routed_experts"],),
            "groups": (hf.get("n_group") or 1, hf.get("topk_group") or 1, 2),
            "scale": hf.get("routed_scaling_factor") or 1.0,
        }


class SolarOpen(Glm4MoE):
    """Solar Open: experts in all layers."""


class Dots1(Qwen3, Glm4MoE):
    """dots.llm1: Qwen 3's attention."""


class ExaoneMoE(Exaone4, Glm4MoE):
    """Exaone with experts: Exaone 4's attention in Llama's block."""

    renames = (*Glm4MoE.renames, (r"^mtp\.", None))

    def make_block(self, facts: "ModelFacts", index: int) -> nn.Module:
        return Decoder.make_block(self, facts, index)


class Deepseek(Glm4MoE):
    """DeepSeek MoE 16B: Llama's attention, and experts with a softmax router."""

    def routing(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        if hf.get("scoring_func", "softmax") != "softmax":
            raise ModelError(f"scoring_func must be softmax; got {shown(hf['scoring_func'])}")
        return {"renormalize": bool(hf.get("norm_topk_prob"))}


class Bailing(Glm4MoE):
    """Ling and Ring, second generation."""

    renames = (
        *Glm4MoE.renames,
        (r"^word_embeddings\.", "embed_tokens."),
        (r"\.attention\.query_key_value\.", ".self_attn.qkv."),
        (r"\.attention\.dense\.", ".self_attn.o_proj."),
        (r"\.attention\.query_layernorm\.", ".self_attn.q_norm."),
        (r"\.attention\.key_layernorm\.", ".self_attn.k_norm."),
        (r"\.mlp\.gate\.expert_bias$", ".mlp.e_score_correction_bias"),
    )

    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        hf, norms, head_dim = facts.hf, dict[str, Norm](), facts.layers[index].head_dim
        if hf.get("use_qk_norm"):
            norms = {name: self.make_norm(facts, head_dim) for name in ("q_norm", "k_norm")}
        bias = bool(hf.get("use_bias"))
        return self.attention(facts, index, bias=bias or bool(hf.get("use_qkv_bias")), out_bias=bias, fused=True, **norms)

    def make_head(self, facts: "ModelFacts") -> Head:
        if facts.hf.get("norm_head"):
            raise ModelError("norm_head is not supported; it must be false")
        return super().make_head(facts)


class OlderBailing(Bailing):
    """Ling and Ring, first generation: a softmax router."""

    def routing(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        return {"renormalize": bool(hf.get("norm_topk_prob", True))}
