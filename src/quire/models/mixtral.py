"""Mixtral: Llama with a mixture of experts in every block."""

from typing import TYPE_CHECKING

from torch import nn

from quire.layers.moe import MoE
from quire.models.decoder import Decoder

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts


class Mixtral(Decoder):
    renames = (
        *Decoder.renames,
        (r"\.block_sparse_moe\.", ".mlp."),
        (r"\.w1\.", ".gate_proj."),
        (r"\.w2\.", ".down_proj."),
        (r"\.w3\.", ".up_proj."),
    )

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        hf = facts.hf
        return MoE(
            facts.hidden_size,
            hf["intermediate_size"],
            hf["hidden_act"],
            experts=hf["num_local_experts"],
            top_k=hf["num_experts_per_tok"],
            renormalize=True,
        )
