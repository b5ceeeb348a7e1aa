"""Encoders with BERT's blocks: BERT, RoBERTa and XLM-R, DistilBERT, MPNet, Jina v2."""

from typing import TYPE_CHECKING

from torch import nn

from quire.layers.embedding import PositionEmbedding
from quire.layers.mlp import GatedMLP
from quire.layers.packed_attention import ALiBi, RelativeBias
from quire.models.alibi import alibi_slopes
from quire.models.encoder import NO_POOLER, Classifier, Encoder, Renames, count_labels
from quire.types.errors import ModelError

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts

_EMBEDDINGS = (
    (r"^embeddings\.position_ids$", None),
    (r"\.gamma$", ".weight"),  # names of the first checkpoints
    (r"\.beta$", ".bias"),
    (r"^embeddings\.word_embeddings\.", "embed_tokens."),
    (r"^embeddings\.position_embeddings\.", "embed_positions."),
    (r"^embeddings\.token_type_embeddings\.", "embed_types."),
    (r"^embeddings\.LayerNorm\.", "embed_norm."),
)
_BLOCKS = (
    (r"^encoder\.layer\.", "layers."),
    (r"\.attention\.self\.query\.", ".self_attn.q_proj."),
    (r"\.attention\.self\.key\.", ".self_attn.k_proj."),
    (r"\.attention\.self\.value\.", ".self_attn.v_proj."),
    (r"\.attention\.output\.dense\.", ".self_attn.o_proj."),
    (r"\.attention\.output\.LayerNorm\.", ".attn_norm."),
    (r"\.intermediate\.dense\.", ".mlp.up_proj."),
    (r"\.output\.dense\.", ".mlp.down_proj."),
    (r"\.output\.LayerNorm\.", ".mlp_norm."),
)
POOLER = ((r"^classifier\.(?=weight|bias)", "classifier.out_proj."), (r"^pooler\.dense\.", "classifier.dense."))


class BERT(Encoder):
    """Sequence classification has the pooler: a dense layer with tanh on the first token's state."""

    renames: Renames = ((r"^(bert|new)\.", ""), (r"^cls\.", None), *_EMBEDDINGS, *_BLOCKS, *POOLER)

    def __init__(self, facts: "ModelFacts") -> None:
        kind = facts.hf.get("position_embedding_type") or self.positions
        if kind != self.positions:
            raise ModelError(f"position_embedding_type {kind!r} is not supported; {self.positions} is")
        super().__init__(facts)
        self.skip_unused_pooler()
        if facts.architecture == "HF_ColBERT":  # the projection belongs to pooling
            self.renames = ((r"^linear\.", None), *self.renames)

    positions = "absolute"


class Roberta(BERT):
    """Learned positions begin after that of the padding token; the pooler is never used."""

    padding = 1
    renames: Renames = (
        (r"^roberta\.", ""), NO_POOLER, (r"^lm_head\.", None), *_EMBEDDINGS, *_BLOCKS,
        (r"^classifier\.(?=weight|bias)", "classifier.out_proj."),
    )  # fmt: skip


class DistilBERT(Encoder):
    renames: Renames = (
        (r"^distilbert\.", ""),
        (r"^vocab_(transform|layer_norm|projector)\.", None),
        *_EMBEDDINGS,
        (r"^transformer\.layer\.", "layers."),
        (r"\.attention\.([qkv])_lin\.", r".self_attn.\1_proj."),
        (r"\.attention\.out_lin\.", ".self_attn.o_proj."),
        (r"\.sa_layer_norm\.", ".attn_norm."),
        (r"\.output_layer_norm\.", ".mlp_norm."),
        (r"\.ffn\.lin1\.", ".mlp.up_proj."),
        (r"\.ffn\.lin2\.", ".mlp.down_proj."),
        (r"^classifier\.(?=weight|bias)", "classifier.out_proj."),
        (r"^pre_classifier\.", "classifier.dense."),
    )

    def make_head_of(self, facts: "ModelFacts", *, dense: bool) -> Classifier:
        return Classifier(facts.hidden_size, count_labels(facts), "relu" if dense else None)


class MPNet(Encoder):
    """A learned bias for each head and distance, shared by all layers."""

    padding = 1
    renames: Renames = (
        (r"^mpnet\.", ""), NO_POOLER, (r"^lm_head\.", None), *_EMBEDDINGS,
        (r"^encoder\.relative_attention_bias\.", "position_bias."),
        (r"\.attention\.attn\.([qkvo])\.", r".self_attn.\1_proj."),
        (r"\.attention\.LayerNorm\.", ".attn_norm."),
        *_BLOCKS,
        (r"^classifier\.(?=weight|bias)", "classifier.out_proj."),
    )  # fmt: skip

    def make_position_bias(self, facts: "ModelFacts") -> RelativeBias:
        hf = facts.hf
        return RelativeBias(hf["relative_attention_num_buckets"], hf["num_attention_heads"], facts.max_position)


class JinaV2(BERT):
    """ALiBi in both directions and a gated feed-forward."""

    positions = "alibi"
    renames: Renames = (
        *BERT.renames[:-2],
        (r"\.mlp\.gated_layers\.", ".mlp.gate_up."),
        (r"\.mlp\.wo\.", ".mlp.down_proj."),
        (r"\.mlp\.layernorm\.", ".mlp_norm."),
        *POOLER,
    )

    def make_positions(self, facts: "ModelFacts") -> PositionEmbedding | None:  # noqa: ARG002
        return None

    def make_position_bias(self, facts: "ModelFacts") -> ALiBi:
        return ALiBi(alibi_slopes(facts.hf["num_attention_heads"]), facts.max_position)

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        kinds = {"geglu": "gelu", "reglu": "relu"}
        kind = facts.hf.get("feed_forward_type")
        if kind not in kinds:
            raise ModelError(f"feed_forward_type {kind!r} is not supported; {', '.join(kinds)} are")
        return GatedMLP(facts.hidden_size, facts.hf["intermediate_size"], kinds[kind], bias=False, down_bias=True, fused=True)
