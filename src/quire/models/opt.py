"""OPT: learned positions that begin at 2, LayerNorms before or after attention and feed-forward, a narrower embedding."""

from typing import TYPE_CHECKING

from torch import Tensor, nn

from quire.attn.batch import Batch, Tokens
from quire.layers.attention import SelfAttention
from quire.layers.embedding import Embedding, Head, PositionEmbedding
from quire.layers.linear import Linear
from quire.layers.mlp import MLP
from quire.layers.norm import LayerNorm, NoNorm, Norm
from quire.models.blocks import Block
from quire.models.decoder import Decoder

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts

FIRST_POSITION = 2


class NormAfterBlock(Block):
    """A block with norms after the residual sums; it returns no residual."""

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor | None]:
        assert residual is None
        x, _ = self.input_layernorm.add(self.self_attn(x, batch), self.self_attn.select_residual(x, batch))
        x, _ = self.post_attention_layernorm.add(self.mlp(x, self.self_attn.tokens_after(batch)), x)
        return x, None


class OPT(Decoder):
    tied = True
    renames = (
        (r"^(model\.)?decoder\.", ""),
        (r"^final_layer_norm\.", "norm."),
        (r"\.self_attn_layer_norm\.", ".input_layernorm."),
        (r"\.final_layer_norm\.", ".post_attention_layernorm."),
        (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
        (r"\.fc1\.", ".mlp.up_proj."),
        (r"\.fc2\.", ".mlp.down_proj."),
    )

    def __init__(self, facts: "ModelFacts") -> None:
        super().__init__(facts)
        hf, width, narrow = facts.hf, facts.hidden_size, embedding_size(facts)
        self.embed_positions = PositionEmbedding(hf["max_position_embeddings"] + FIRST_POSITION, width)
        if not hf.get("do_layer_norm_before", True) or hf.get("_remove_final_layer_norm"):
            self.norm = NoNorm()
        self.project_in = Linear(narrow, width) if narrow != width else None
        self.project_out = Linear(width, narrow) if narrow != width else None

    def embed(self, batch: Batch) -> Tensor:
        x = self.look_up(batch)
        if self.project_in is not None:
            x = self.project_in(x, batch.tokens)
        return x + self.embed_positions(batch.positions + FIRST_POSITION, batch.tokens)

    def logits(self, hidden: Tensor, tokens: Tokens) -> Tensor:
        return super().logits(hidden if self.project_out is None else self.project_out(hidden, tokens), tokens)

    def make_embedding(self, facts: "ModelFacts") -> Embedding:
        return Embedding(facts.vocab_size, embedding_size(facts))

    def make_head(self, facts: "ModelFacts") -> Head:
        tied = self.embed_tokens if facts.hf.get("tie_word_embeddings", self.tied) else None
        return Head(facts.vocab_size, embedding_size(facts), tied=tied)

    def make_block(self, facts: "ModelFacts", index: int) -> nn.Module:
        kind = Block if facts.hf.get("do_layer_norm_before", True) else NormAfterBlock
        return kind(
            self.make_norm(facts), self.make_attention(facts, index), self.make_norm(facts), self.make_mlp(facts, index)
        )

    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        bias = facts.hf.get("enable_bias", True)
        return self.attention(facts, index, rope=None, bias=bias, out_bias=bias)

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        hf = facts.hf
        return MLP(facts.hidden_size, hf["ffn_dim"], hf.get("activation_function", "relu"), bias=hf.get("enable_bias", True))

    def make_norm(self, facts: "ModelFacts", size: int | None = None) -> Norm:
        affine = facts.hf.get("layer_norm_elementwise_affine", True)
        return LayerNorm(size or facts.hidden_size, 1e-5, bias=affine, weight=affine)


def embedding_size(facts: "ModelFacts") -> int:
    return int(facts.hf.get("word_embed_proj_dim") or facts.hidden_size)
