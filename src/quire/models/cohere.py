"""Command R (Cohere): one LayerNorm without a bias before parallel attention and feed-forward; scaled logits.

Cohere 2 has RoPE only in layers with a window.
"""

from typing import TYPE_CHECKING, Any

from torch import nn

from quire.layers.attention import SelfAttention
from quire.layers.embedding import Head
from quire.layers.norm import HeadLayerNorm, LayerNorm, Norm
from quire.models.blocks import ParallelBlock
from quire.models.decoder import Decoder

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts


class Cohere(Decoder):
    tied = True
    interleaved = True

    def make_block(self, facts: "ModelFacts", index: int) -> nn.Module:
        return ParallelBlock(self.make_norm(facts), self.make_attention(facts, index), self.make_mlp(facts, index))

    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        return self.attention(facts, index, **self.differences(facts, index))

    def differences(self, facts: "ModelFacts", index: int) -> dict[str, Any]:
        bias, cache = bool(facts.hf.get("attention_bias")), facts.layers[index]
        differences: dict[str, Any] = {"bias": bias, "out_bias": bias}
        if facts.hf.get("use_qk_norm"):
            for name, heads in (("q_norm", facts.hf["num_attention_heads"]), ("k_norm", cache.kv_heads)):
                differences[name] = HeadLayerNorm(heads, cache.head_dim, facts.hf.get("layer_norm_eps", 1e-5), own=True)
        return differences

    def make_norm(self, facts: "ModelFacts", size: int | None = None) -> Norm:
        return LayerNorm(size or facts.hidden_size, facts.hf.get("layer_norm_eps", 1e-5), bias=False)

    def make_head(self, facts: "ModelFacts") -> Head:
        tied = self.embed_tokens if facts.hf.get("tie_word_embeddings", self.tied) else None
        return Head(facts.vocab_size, facts.hidden_size, tied=tied, scale=facts.hf.get("logit_scale", 0.0625))


class Cohere2(Cohere):
    def differences(self, facts: "ModelFacts", index: int) -> dict[str, Any]:
        bias = bool(facts.hf.get("attention_bias"))
        no_rope = {"rope": None} if facts.layers[index].window is None else {}
        return {"bias": bias, "out_bias": bias} | no_rope
