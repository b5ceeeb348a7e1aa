"""StableLM: Llama with LayerNorms and partial RoPE; optionally with head norms or parallel blocks."""

from typing import TYPE_CHECKING

from torch import nn

from quire.layers.attention import SelfAttention
from quire.layers.norm import HeadLayerNorm, LayerNorm, Norm
from quire.models.blocks import ParallelBlock
from quire.models.decoder import Decoder

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts


class StableLM(Decoder):
    renames = (*Decoder.renames, (r"\.self_attn\.(q|k)_layernorm\.", r".self_attn.\1_norm."))

    def make_block(self, facts: "ModelFacts", index: int) -> nn.Module:
        if not facts.hf.get("use_parallel_residual"):
            return super().make_block(facts, index)
        return ParallelBlock(self.make_norm(facts), self.make_attention(facts, index), self.make_mlp(facts, index))

    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        hf, cache, norms = facts.hf, facts.layers[index], dict[str, HeadLayerNorm]()
        if hf.get("qk_layernorm"):
            for name, heads in (("q_norm", hf["num_attention_heads"]), ("k_norm", cache.kv_heads)):
                norms[name] = HeadLayerNorm(heads, cache.head_dim, hf.get("layer_norm_eps", 1e-5), own=True, separate=True)
        return self.attention(facts, index, bias=bool(hf.get("use_qkv_bias")), **norms)

    def make_norm(self, facts: "ModelFacts", size: int | None = None) -> Norm:
        return LayerNorm(size or facts.hidden_size, facts.hf.get("layer_norm_eps", 1e-5))
