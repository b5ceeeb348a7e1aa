"""DeepSeek V2 and V3 (R1, Kimi K2), and other families with its latent attention."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from quire.files.reading import shown
from quire.layers.latent import LatentAttention
from quire.layers.mlp import GatedMLP
from quire.layers.moe import RoutedMoE
from quire.layers.norm import RMSNorm
from quire.layers.rope import Rope, rope_parameters
from quire.models.decoder import Decoder
from quire.models.granite import Granite
from quire.types.errors import ModelError

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts


class Latent(Decoder):
    """Decoders with latent attention."""

    interleaved = True

    def make_attention(self, facts: "ModelFacts", index: int) -> LatentAttention:  # type: ignore[override]
        hf = facts.hf
        nope, rotary, heads = hf["qk_nope_head_dim"], hf["qk_rope_head_dim"], hf["num_attention_heads"]
        return LatentAttention(
            facts.hidden_size,
            heads,
            facts.layers[index],
            self.rope(facts, index),
            nope=nope,
            rotary=rotary,
            values=hf["v_head_dim"] or facts.hidden_size // heads,
            query_rank=hf["q_lora_rank"] or None,
            scale=(nope + rotary) ** -0.5 * stretched_scale(rope_parameters(hf)),
            bias=bool(hf.get("attention_bias")),
            last=index == len(facts.layers) - 1,
        )

    def rope(self, facts: "ModelFacts", index: int, layer_type: str | None = None) -> Rope:  # noqa: ARG002
        if layer_type not in self.ropes:
            interleaved = self.interleaved and facts.hf.get("rope_interleave", True)
            parameters = {**rope_parameters(facts.hf), "partial_rotary_factor": 1.0}
            self.ropes[layer_type] = Rope(
                facts.hf["qk_rope_head_dim"], facts.max_position, facts.hf, parameters, interleaved=interleaved
            )
        return self.ropes[layer_type]


def stretched_scale(rope: Mapping[str, Any]) -> float:
    """Return the factor of attention scores for YaRN."""
    weight, factor = rope.get("mscale_all_dim"), rope.get("factor")
    if rope["rope_type"] == "default" or not weight or not factor or factor <= 1:
        return 1.0
    return float(0.1 * weight * math.log(factor) + 1.0) ** 2


class SparseDecoder(Decoder):
    """Decoders with experts after the first, dense layers. Layers after the last one are draft layers."""

    shared = 0  # default of n_shared_experts
    renames: tuple[tuple[str, str | None], ...] = (
        *Decoder.renames,
        (r"\.mlp\.gate\.e_score_correction[_.]bias$", ".mlp.e_score_correction_bias"),
        (r"\.mlp\.shared_experts\.", ".mlp.shared_expert."),
    )

    def __init__(self, facts: "ModelFacts") -> None:
        super().__init__(facts)
        count = len(facts.layers)
        drafts = "|".join(str(count + i) for i in range(facts.hf.get("num_nextn_predict_layers") or 1))
        self.renames = (*self.renames, (rf"^layers\.({drafts})\.", None))

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:
        hf = facts.hf
        if not is_sparse(hf, index):
            return super().make_mlp(facts, index)
        inner, shared = hf["moe_intermediate_size"], hf.get("n_shared_experts", self.shared)
        experts, top_k, routing = hf["n_routed_experts"], hf["num_experts_per_tok"], self.routing(hf)
        check_routing(experts, top_k, routing.get("groups", (1, 1, 1)))
        return RoutedMoE(
            facts.hidden_size,
            inner,
            hf["hidden_act"],
            experts=experts,
            top_k=top_k,
            shared=GatedMLP(facts.hidden_size, inner * shared, hf["hidden_act"]) if shared else None,
            **routing,
        )

    def routing(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of RoutedMoE that choose experts."""
        raise NotImplementedError


class DeepseekV2(SparseDecoder, Latent):
    """DeepSeek V2: a group of experts is scored by its best."""

    def routing(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        limited = hf.get("topk_method") == "group_limited_greedy"
        groups = (hf["n_group"], hf["topk_group"], 1) if limited else (1, 1, 1)
        scale = hf.get("routed_scaling_factor", 1.0)
        return {"renormalize": bool(hf.get("norm_topk_prob")), "groups": groups, "scale": scale}


def check_routing(experts: int, top_k: int, groups: tuple[int, int, int]) -> None:
    count, chosen, best = groups
    if experts % count or not 0 < chosen <= count or (count > 1 and best > experts // count):
        share = f"{chosen} (topk_group) of {count} groups (n_group)"
        raise ModelError(f"{experts} experts (n_routed_experts) cannot be divided into {share}")
    if not 0 < top_k <= experts // count * chosen:
        raise ModelError(f"num_experts_per_tok must be between 1 and {experts // count * chosen}; got {top_k}")


def is_sparse(hf: Mapping[str, Any], index: int) -> bool:
    """Return whether a layer has experts."""
    if not hf.get("n_routed_experts"):
        return False
    kinds = hf.get("mlp_layer_types")
    if kinds is not None:
        return bool(kinds[index] == "sparse")
    return bool(index >= hf["first_k_dense_replace"] and index % (hf.get("moe_layer_freq") or 1) == 0)


class DeepseekV3(DeepseekV2):
    """DeepSeek V3: sigmoid scores with a correction for the choice; a group of experts is scored by its two best."""

    def routing(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        corrected, scoring = hf.get("topk_method", "noaux_tc") == "noaux_tc", hf.get("scoring_func", "sigmoid")
        if scoring not in ("sigmoid", "softmax"):
            raise ModelError(f"scoring_func must be sigmoid or softmax; got {shown(scoring)}")
        return {
            "renormalize": hf.get("norm_topk_prob", True),
            "scoring": scoring,
            "correction": (hf["n_routed_experts"],) if corrected else None,
            "groups": (hf.get("n_group") or 1, hf.get("topk_group") or 1, 2),
            "scale": hf.get("routed_scaling_factor", 1.0),
        }


class AXK1(DeepseekV3):
    """A.X K1: a norm of the experts' output."""

    renames = (*DeepseekV3.renames, (r"(?<!\.mlp)\.post_mlp_layernorm\.", ".mlp.post_mlp_layernorm."))

    def routing(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        return {**super().routing(hf), "norm": RMSNorm(hf["hidden_size"], hf["rms_norm_eps"])}


class Glm4MoELite(DeepseekV3):
    """GLM 4.7 Flash."""


class Youtu(Latent):
    tied = True


class MiniCPM3(Latent, Granite):  # type: ignore[misc]
    """Granite's multipliers under other names (`config/families/`); RoPE rotates halves."""

    interleaved = False
    tied = True
