"""Qwen 3 with a mixture of experts in some of its blocks."""

from typing import TYPE_CHECKING

from torch import nn

from quire.layers.moe import MoE
from quire.models.llama import Qwen3

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts


class Qwen3MoE(Qwen3):
    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:
        hf = facts.hf
        experts = hf["num_local_experts"] if "num_local_experts" in hf else hf["num_experts"]
        every = hf.get("decoder_sparse_step", 1)
        if index in (hf.get("mlp_only_layers") or ()) or not experts or (index + 1) % every:
            return super().make_mlp(facts, index)
        return MoE(
            facts.hidden_size,
            hf["moe_intermediate_size"],
            hf["hidden_act"],
            experts=experts,
            top_k=hf["num_experts_per_tok"],
            renormalize=bool(hf.get("norm_topk_prob")),
        )
