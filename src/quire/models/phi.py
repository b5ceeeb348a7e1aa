"""Phi 1, 1.5 and 2: attention and feed-forward beside each other behind one norm, heads that turn in part, many biases."""

from typing import TYPE_CHECKING

from torch import nn

from quire.layers.attention import SelfAttention
from quire.layers.embedding import Head
from quire.layers.head_norms import HeadLayerNorm
from quire.layers.mlp import MLP
from quire.layers.norm import LayerNorm, Norm
from quire.models.blocks import ParallelBlock
from quire.models.decoder import Decoder

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts


class Phi(Decoder):
    renames = (
        *Decoder.renames,
        (r"^final_layernorm\.", "norm."),
        (r"\.self_attn\.dense\.", ".self_attn.o_proj."),
        (r"\.self_attn\.(q|k)_layernorm\.", r".self_attn.\1_norm."),
        (r"\.mlp\.fc1\.", ".mlp.up_proj."),
        (r"\.mlp\.fc2\.", ".mlp.down_proj."),
    )

    def make_block(self, facts: "ModelFacts", index: int) -> nn.Module:
        return ParallelBlock(self.make_norm(facts), self.make_attention(facts, index), self.make_mlp(facts, index))

    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        cache, norms = facts.layers[index], dict[str, HeadLayerNorm]()
        if facts.hf.get("qk_layernorm"):
            for name, heads in (("q_norm", facts.hf["num_attention_heads"]), ("k_norm", cache.kv_heads)):
                norms[name] = HeadLayerNorm(heads, cache.head_dim, facts.hf.get("layer_norm_eps", 1e-5), bias=True)
        return self.attention(facts, index, bias=True, out_bias=True, **norms)

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        return MLP(facts.hidden_size, facts.hf["intermediate_size"], facts.hf.get("hidden_act", "gelu_new"))

    def make_norm(self, facts: "ModelFacts", size: int | None = None) -> Norm:
        return LayerNorm(size or facts.hidden_size, facts.hf.get("layer_norm_eps", 1e-5))

    def make_head(self, facts: "ModelFacts") -> Head:
        tied = self.embed_tokens if facts.hf.get("tie_word_embeddings", self.tied) else None
        return Head(facts.vocab_size, facts.hidden_size, tied=tied, bias=True)
