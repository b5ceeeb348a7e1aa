"""Granite 3: Llama with multipliers on embeddings, attention scores, the outputs of attention and feed-forward, and logits;
also with experts.
"""

from typing import TYPE_CHECKING

from torch import nn

from quire.layers.attention import SelfAttention
from quire.layers.embedding import Embedding, Head
from quire.layers.mlp import GatedMLP
from quire.layers.moe import RoutedMoE
from quire.models.blocks import SandwichBlock, ScaledBlock
from quire.models.decoder import Decoder
from quire.models.llama import local_experts

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts


class Granite(Decoder):
    def make_embedding(self, facts: "ModelFacts") -> Embedding:
        return Embedding(facts.vocab_size, facts.hidden_size, scale=facts.hf.get("embedding_multiplier", 1.0))

    def make_block(self, facts: "ModelFacts", index: int) -> nn.Module:
        norms, scale = (self.make_norm(facts), self.make_norm(facts)), facts.hf.get("residual_multiplier", 1.0)
        return ScaledBlock(norms[0], self.make_attention(facts, index), norms[1], self.make_mlp(facts, index), scale)

    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        bias = bool(facts.hf.get("attention_bias"))
        return self.attention(facts, index, bias=bias, out_bias=bias, scale=facts.hf.get("attention_multiplier", 1.0))

    def make_head(self, facts: "ModelFacts") -> Head:
        tied = self.embed_tokens if facts.hf.get("tie_word_embeddings", self.tied) else None
        return Head(facts.vocab_size, facts.hidden_size, tied=tied, scale=1.0 / facts.hf.get("logits_scaling", 1.0))


class GraniteMoE(Granite):
    """Granite with experts; some models also have a shared expert."""

    renames = (
        *Granite.renames,
        (r"\.block_sparse_moe\.input_linear\.weight$", ".mlp.experts.gate_up_proj"),
        (r"\.block_sparse_moe\.output_linear\.weight$", ".mlp.experts.down_proj"),
        (r"\.block_sparse_moe\.router\.layer\.", ".mlp.gate."),
        (r"\.shared_mlp\.input_linear\.", ".mlp.shared_expert.gate_up."),
        (r"\.shared_mlp\.output_linear\.", ".mlp.shared_expert.down_proj."),
    )

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        hf = facts.hf
        size = hf.get("shared_intermediate_size")
        shared = GatedMLP(facts.hidden_size, size, hf["hidden_act"], fused=True) if size else None
        return local_experts(RoutedMoE, facts, renormalize=True, shared=shared)


class MiniCPM(Granite):
    """MiniCPM: Granite's multipliers under other names (`config/families/`)."""


class HyperCLOVAX(Granite):
    """HyperCLOVA X: the outputs of attention and feed-forward are normalized; logits are multiplied."""

    def __init__(self, facts: "ModelFacts") -> None:
        super().__init__(facts)
        if facts.hf.get("use_post_norm", True):
            self.renames = (
                *self.renames,
                (r"\.post_attention_layernorm\.", ".pre_feedforward_layernorm."),
                (r"\.post_norm1\.", ".post_attention_layernorm."),
                (r"\.post_norm2\.", ".post_feedforward_layernorm."),
            )

    def make_block(self, facts: "ModelFacts", index: int) -> nn.Module:
        if not facts.hf.get("use_post_norm", True):
            return super().make_block(facts, index)
        first, second, third, fourth = (self.make_norm(facts) for _ in range(4))
        attention, mlp = self.make_attention(facts, index), self.make_mlp(facts, index)
        return SandwichBlock((first, second, third, fourth), attention, mlp, facts.hf.get("residual_multiplier", 1.0))

    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        bias, scale = bool(facts.hf.get("attention_bias")), facts.hf.get("attention_multiplier")
        return self.attention(facts, index, bias=bias, out_bias=bias, scale=scale)

    def make_head(self, facts: "ModelFacts") -> Head:
        tied = self.embed_tokens if facts.hf.get("tie_word_embeddings", self.tied) else None
        return Head(facts.vocab_size, facts.hidden_size, tied=tied, scale=facts.hf.get("logits_scaling", 1.0))
