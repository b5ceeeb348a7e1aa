"""Families with attention and feed-forward in parallel: GPT-NeoX, Pythia, GPT-J, CodeGen, Phi 1 to 2."""

from typing import TYPE_CHECKING

from torch import nn

from quire.layers.attention import SelfAttention
from quire.layers.embedding import Head
from quire.layers.linear import BlockedLinear
from quire.layers.mlp import MLP
from quire.layers.norm import HeadLayerNorm, LayerNorm, Norm
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


class GPTJ(Decoder):
    interleaved = True
    renames: tuple[tuple[str, str | None], ...] = (
        (r"^transformer\.", ""),
        (r"\.attn\.(bias|masked_bias|embed_positions)$", None),
        (r"^wte\.", "embed_tokens."),
        (r"^h\.", "layers."),
        (r"^ln_f\.", "norm."),
        (r"\.ln_1\.", ".input_layernorm."),
        (r"\.attn\.out_proj\.", ".self_attn.o_proj."),
        (r"\.attn\.", ".self_attn."),
        (r"\.mlp\.fc_in\.", ".mlp.up_proj."),
        (r"\.mlp\.fc_out\.", ".mlp.down_proj."),
    )

    def make_block(self, facts: "ModelFacts", index: int) -> nn.Module:
        return ParallelBlock(self.make_norm(facts), self.make_attention(facts, index), self.make_mlp(facts, index))

    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        return self.attention(facts, index, heads=facts.hf["n_head"])

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        inner = facts.hf.get("n_inner") or 4 * facts.hidden_size
        return MLP(facts.hidden_size, inner, facts.hf.get("activation_function", "gelu_new"))

    def make_norm(self, facts: "ModelFacts", size: int | None = None) -> Norm:
        return LayerNorm(size or facts.hidden_size, facts.hf.get("layer_norm_epsilon", 1e-5))

    def make_head(self, facts: "ModelFacts") -> Head:
        tied = self.embed_tokens if facts.hf.get("tie_word_embeddings", self.tied) else None
        return Head(facts.vocab_size, facts.hidden_size, tied=tied, bias=True)


class CodeGen(GPTJ):
    """CodeGen: q, k and v in one matrix that is laid out for four devices."""

    renames = (
        *GPTJ.renames,
        (r"\.self_attn\.causal_mask$", None),
        (r"\.self_attn\.qkv_proj\.", ".self_attn.qkv."),
    )

    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        attention = self.attention(facts, index, heads=facts.hf["n_head"], fused=True)
        attention.qkv = BlockedLinear(facts.hidden_size, attention.division, blocks=4)
        return attention


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
