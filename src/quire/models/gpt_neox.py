"""GPT-NeoX and Pythia: attention and feed-forward beside each other, a norm before each."""

from typing import TYPE_CHECKING

from torch import nn

from quire.layers.attention import SelfAttention
from quire.layers.mlp import MLP
from quire.layers.norm import LayerNorm, Norm
from quire.models.blocks import ParallelBlock
from quire.models.decoder import Decoder

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts


class GPTNeoX(Decoder):
    renames = (
        (r"^gpt_neox\.", ""),
        (r"\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)$", None),
        (r"^embed_in\.", "embed_tokens."),
        (r"^embed_out\.", "lm_head."),
        (r"^final_layer_norm\.", "norm."),
        (r"\.attention\.query_key_value\.", ".self_attn.qkv."),
        (r"\.attention\.dense\.", ".self_attn.o_proj."),
        (r"\.mlp\.dense_h_to_4h\.", ".mlp.up_proj."),
        (r"\.mlp\.dense_4h_to_h\.", ".mlp.down_proj."),
    )

    def make_block(self, facts: "ModelFacts", index: int) -> nn.Module:
        if not facts.hf.get("use_parallel_residual", True):
            return super().make_block(facts, index)
        attention, mlp = self.make_attention(facts, index), self.make_mlp(facts, index)
        return ParallelBlock(self.make_norm(facts), attention, mlp, self.make_norm(facts))

    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        bias = facts.hf.get("attention_bias", True)
        return self.attention(facts, index, bias=bias, out_bias=bias, fused="by key head")

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        return MLP(facts.hidden_size, facts.hf["intermediate_size"], facts.hf.get("hidden_act", "gelu"))

    def make_norm(self, facts: "ModelFacts", size: int | None = None) -> Norm:
        return LayerNorm(size or facts.hidden_size, facts.hf.get("layer_norm_eps", 1e-5))
