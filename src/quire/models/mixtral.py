"""Mixtral: Llama with a mixture of experts in every block."""

from typing import TYPE_CHECKING, Any

from torch import nn

from quire.layers.moe import MoE
from quire.models.decoder import Decoder

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts


def local_experts(kind: type[nn.Module], facts: "ModelFacts", **more: Any) -> nn.Module:
    """Experts as Mixtral's configuration describes them, and with what a family has `more`."""
    hf = facts.hf
    sizes = {"experts": hf["num_local_experts"], "top_k": hf["num_experts_per_tok"]}
    return kind(facts.hidden_size, hf["intermediate_size"], hf["hidden_act"], **sizes, **more)


class Mixtral(Decoder):
    renames = (
        *Decoder.renames,
        (r"\.block_sparse_moe\.", ".mlp."),
        (r"\.w1\.", ".gate_proj."),
        (r"\.w2\.", ".down_proj."),
        (r"\.w3\.", ".up_proj."),
    )

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        return local_experts(MoE, facts, renormalize=True)
