"""Exaone: version 3 is Llama under other names; version 4 normalizes heads and the outputs of attention and feed-forward."""

from typing import TYPE_CHECKING, Any

from torch import nn

from quire.layers.attention import SelfAttention
from quire.layers.mlp import GatedMLP
from quire.layers.norm import Norm, RMSNorm
from quire.models.blocks import PostNormBlock
from quire.models.decoder import Decoder

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts


class Exaone(Decoder):
    renames = (
        (r"^transformer\.", ""),
        (r"rotary\.inv_freq$", None),
        (r"^wte\.", "embed_tokens."),
        (r"^h\.", "layers."),
        (r"^ln_f\.", "norm."),
        (r"\.ln_1\.", ".input_layernorm."),
        (r"\.ln_2\.", ".post_attention_layernorm."),
        (r"\.attn\.attention\.out_proj\.", ".self_attn.o_proj."),
        (r"\.attn\.attention\.", ".self_attn."),
        (r"\.mlp\.c_fc_0\.", ".mlp.gate_proj."),
        (r"\.mlp\.c_fc_1\.", ".mlp.up_proj."),
        (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
    )

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        return GatedMLP(facts.hidden_size, facts.hf["intermediate_size"], facts.hf.get("activation_function", "silu"))

    def make_norm(self, facts: "ModelFacts", size: int | None = None) -> Norm:
        return RMSNorm(size or facts.hidden_size, facts.hf.get("layer_norm_epsilon", 1e-5))


class Exaone4(Decoder):
    """Exaone 4. If some layers have a window, the others have no RoPE."""

    def make_block(self, facts: "ModelFacts", index: int) -> nn.Module:
        attention, mlp = self.make_attention(facts, index), self.make_mlp(facts, index)
        return PostNormBlock(attention, self.make_norm(facts), mlp, self.make_norm(facts))

    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        cache, differences = facts.layers[index], dict[str, Any]()
        if facts.hf.get("sliding_window") and cache.window is None:
            differences["rope"] = None
        for name in ("q_norm", "k_norm"):
            differences[name] = self.make_norm(facts, cache.head_dim)
        return self.attention(facts, index, **differences)
