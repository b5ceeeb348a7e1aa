"""gpt-oss: experts with biases, a sliding window in every other layer, and attention sinks."""

from typing import TYPE_CHECKING

from torch import nn

from quire.layers.attention import SelfAttention
from quire.layers.moe import MoE
from quire.models.decoder import Decoder
from quire.ops.arguments import ClampedSwiglu

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts


class GptOss(Decoder):
    renames = (*Decoder.renames, (r"\.mlp\.router\.", ".mlp.gate."))

    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        bias = bool(facts.hf["attention_bias"])
        return self.attention(facts, index, bias=bias, out_bias=bias, sinks=True)

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        hf = facts.hf
        return MoE(
            facts.hidden_size,
            hf["intermediate_size"],
            ClampedSwiglu(float(hf["swiglu_alpha"]), float(hf["swiglu_limit"])),
            experts=hf["num_local_experts"],
            top_k=hf["num_experts_per_tok"],
            renormalize=True,
            biased=True,
            paired=True,
        )
