"""StarCoder: the first (GPT-BigCode) is GPT-2 with one key head for all query heads, the second turns its heads."""

from typing import TYPE_CHECKING

from torch import nn

from quire.layers.attention import SelfAttention
from quire.layers.mlp import MLP
from quire.layers.norm import LayerNorm, Norm
from quire.models.decoder import Decoder
from quire.models.gpt2 import GPT2

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts


class GPTBigCode(GPT2):
    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        hf = facts.hf
        scale = facts.layers[index].head_dim ** -0.5 if hf.get("scale_attn_weights", True) else 1.0
        return self.attention(
            facts, index, heads=hf["n_head"], rope=None, bias=True, out_bias=True, fused="by key head", scale=scale
        )

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        inner = facts.hf.get("n_inner") or 4 * facts.hidden_size
        return MLP(facts.hidden_size, inner, facts.hf.get("activation_function", "gelu_pytorch_tanh"))


class StarCoder2(Decoder):
    tied = True
    renames = (*Decoder.renames, (r"\.mlp\.c_fc\.", ".mlp.up_proj."), (r"\.mlp\.c_proj\.", ".mlp.down_proj."))

    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        bias = facts.hf.get("use_bias", True)
        return self.attention(facts, index, bias=bias, out_bias=bias)

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        hf = facts.hf
        activation = hf.get("hidden_act", "gelu_pytorch_tanh")
        return MLP(facts.hidden_size, hf["intermediate_size"], activation, bias=hf.get("use_bias", True))

    def make_norm(self, facts: "ModelFacts", size: int | None = None) -> Norm:
        return LayerNorm(size or facts.hidden_size, facts.hf.get("norm_epsilon", 1e-5))
