"""GPT-J: attention and feed-forward beside each other behind one norm, neighbouring components that turn together. CodeGen."""

from typing import TYPE_CHECKING

from torch import nn

from quire.layers.attention import SelfAttention
from quire.layers.embedding import Head
from quire.layers.linear import BlockedLinear
from quire.layers.mlp import MLP
from quire.layers.norm import LayerNorm, Norm
from quire.models.blocks import ParallelBlock
from quire.models.decoder import Decoder

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts


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
    """q, k and v in one matrix, which was made for four devices."""

    renames = (
        *GPTJ.renames,
        (r"\.self_attn\.causal_mask$", None),
        (r"\.self_attn\.qkv_proj\.", ".self_attn.qkv."),
    )

    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        attention = self.attention(facts, index, heads=facts.hf["n_head"], fused=True)
        attention.qkv = BlockedLinear(facts.hidden_size, attention.division, blocks=4)
        return attention
