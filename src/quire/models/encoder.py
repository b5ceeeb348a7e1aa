"""The skeleton of encoder-only models: embeddings, blocks with bidirectional attention, a head that classifies.

They have no KV cache and no LM head. A family subclasses `Encoder` and overrides the makers whose product differs from BERT's.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from quire.attn.batch import Batch, Tokens
from quire.layers.class_linear import ClassLinear
from quire.layers.embedding import Embedding, PositionEmbedding
from quire.layers.mlp import MLP
from quire.layers.norm import LayerNorm, Norm
from quire.layers.packed_attention import PackedSelfAttention, PositionBias
from quire.layers.rope import Rope, rope_parameters
from quire.models.decoder import Decoder
from quire.ops.activation import activate, check_activation
from quire.types.errors import ModelError

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts


Renames = tuple[tuple[str, str | None], ...]
NO_POOLER = (r"^pooler\.", None)


class PostNormBlock(nn.Module):
    """A norm after each residual sum."""

    def __init__(self, self_attn: PackedSelfAttention, attn_norm: Norm, mlp: nn.Module, mlp_norm: Norm) -> None:
        super().__init__()
        self.self_attn, self.attn_norm, self.mlp, self.mlp_norm = self_attn, attn_norm, mlp, mlp_norm

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, H] -> [T, H]."""
        x, _ = self.attn_norm.add(self.self_attn(x, batch), x)
        return self.mlp_norm.add(self.mlp(x, batch.tokens), x)[0]


class PreNormBlock(PostNormBlock):
    """A norm before each half of the block; the residual sum is not normalized."""

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        x = x + self.self_attn(self.attn_norm(x), batch)
        out: Tensor = x + self.mlp(self.mlp_norm(x), batch.tokens)
        return out


class Classifier(nn.Module):
    """Class logits of pooled states or of tokens: an optional dense layer with activation and norm, then a linear layer."""

    def __init__(
        self, size: int, labels: int, activation: str | None, *, dense_bias: bool = True, norm: Norm | None = None
    ) -> None:
        """activation: of the dense layer; None: there is no dense layer."""
        super().__init__()
        self.dense = None if activation is None else ClassLinear(size, size, bias=dense_bias)
        self.activation = activation if activation in (None, "tanh") else check_activation(str(activation))
        self.norm = norm
        self.out_proj = ClassLinear(size, labels, bias=True)

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        """x [N, H] -> [N, labels] float32."""
        if self.dense is not None:
            x = self.dense(x, tokens)
            x = torch.tanh(x) if self.activation == "tanh" else activate(x, str(self.activation))
        if self.norm is not None:
            x = self.norm(x)
        return self.out_proj(x, tokens).float()


class Encoder(Decoder):
    """BERT's architecture, except what a family's `make_*` methods change."""

    keeps_context = False
    padding: int | None = None  # token id without a position of its own: it has this learned position, the others follow
    tokens_have_dense = False  # the head of token classification has the dense layer of sequence classification
    renames: Renames = ()

    def __init__(self, facts: "ModelFacts") -> None:
        nn.Module.__init__(self)
        self.ropes: dict[str | None, Rope] = {}
        self.attentions, self.recurrents = [], []
        self.embed_tokens = self.make_embedding(facts)
        self.embed_positions = self.make_positions(facts)
        types = int(facts.hf.get("type_vocab_size") or 0)
        self.embed_types = PositionEmbedding(types, facts.hidden_size) if types else None
        self.embed_norm = self.make_norm(facts)
        self.position_bias = self.make_position_bias(facts)
        self.layers = nn.ModuleList(self.make_block(facts, index) for index in range(facts.hf["num_hidden_layers"]))
        self.final_norm = self.make_final_norm(facts)
        self.classifier = self.make_classifier(facts)
        self.body = self.run_blocks

    def skip_unused_pooler(self) -> None:
        """Leave the checkpoint's pooler out unless the head has it: it is not part of the vectors."""
        if self.classifier is None or self.classifier.dense is None:
            self.renames = (*self.renames[:1], NO_POOLER, *self.renames[1:])

    def embed(self, batch: Batch) -> Tensor:
        x: Tensor = self.embed_tokens(batch.ids, batch.tokens)
        if self.embed_types is not None:
            types = torch.zeros_like(batch.ids) if batch.token_types is None else batch.token_types
            x = x + self.embed_types(types.clamp(max=self.embed_types.total - 1), batch.tokens)
        if self.embed_positions is not None:
            x = x + self.embed_positions(self.positions_of(batch), batch.tokens)
        return self.embed_norm(x)

    def positions_of(self, batch: Batch) -> Tensor:
        """Return the learned position of each token [T]. With `padding`, only other tokens are counted."""
        if self.padding is None:
            return batch.positions
        counted = (batch.ids != self.padding).long()
        total = counted.cumsum(0)
        first = torch.arange(len(total), device=total.device) - batch.positions  # of the token's sequence
        return (total - total[first] + counted[first]) * counted + self.padding

    def run_blocks(self, x: Tensor, batch: Batch) -> Tensor:
        for block in self.layers:
            x = block(x, batch)
        return batch.take_final(x if self.final_norm is None else self.final_norm(x))

    def logits(self, hidden: Tensor, tokens: Tokens) -> Tensor:  # noqa: ARG002
        """Return zeros: only warm-up and profile runs sample tokens."""
        return torch.zeros(len(hidden), self.embed_tokens.total, device=hidden.device)

    def classify(self, pooled: Tensor, tokens: Tokens) -> Tensor:
        """Return class logits [N, labels] float32 of pooled states or of tokens [N, H]."""
        if self.classifier is None:
            raise ModelError("the model has no head that classifies")
        out: Tensor = self.classifier(pooled, tokens)
        return out

    def make_embedding(self, facts: "ModelFacts") -> Embedding:
        return Embedding(facts.vocab_size, facts.hidden_size)

    def make_positions(self, facts: "ModelFacts") -> PositionEmbedding | None:
        count = facts.hf.get("position_rows") or facts.hf["max_position_embeddings"]
        return PositionEmbedding(count, facts.hidden_size)

    def make_position_bias(self, facts: "ModelFacts") -> PositionBias | None:  # noqa: ARG002
        return None

    def make_block(self, facts: "ModelFacts", index: int) -> nn.Module:
        return PostNormBlock(
            self.make_packed_attention(facts, index), self.make_norm(facts), self.make_mlp(facts, index), self.make_norm(facts)
        )

    def make_packed_attention(self, facts: "ModelFacts", index: int) -> PackedSelfAttention:  # noqa: ARG002
        return PackedSelfAttention(facts.hidden_size, facts.hf["num_attention_heads"], position_bias=self.position_bias)

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        return MLP(facts.hidden_size, facts.hf["intermediate_size"], facts.hf["hidden_act"])

    def make_norm(self, facts: "ModelFacts", size: int | None = None) -> Norm:
        return LayerNorm(size or facts.hidden_size, facts.hf.get("layer_norm_eps", 1e-12))

    def make_final_norm(self, facts: "ModelFacts") -> Norm | None:  # noqa: ARG002
        return None

    def make_classifier(self, facts: "ModelFacts") -> Classifier | None:
        if facts.architecture.endswith("ForSequenceClassification"):
            return self.make_head_of(facts, dense=True)
        if facts.architecture.endswith("ForTokenClassification"):
            return self.make_head_of(facts, dense=self.tokens_have_dense)
        return None

    def make_head_of(self, facts: "ModelFacts", *, dense: bool) -> Classifier:
        dense = dense and facts.hf.get("classifier_dense", True)  # GGUF files may lack it
        return Classifier(facts.hidden_size, count_labels(facts), "tanh" if dense else None)

    def packed_rope(self, facts: "ModelFacts", layer_type: str | None = None) -> Rope:
        """Return the RoPE of layers of one type, which share one table."""
        if layer_type not in self.ropes:
            parameters = rope_parameters(facts.hf, layer_type)
            size = facts.hidden_size // facts.hf["num_attention_heads"]
            self.ropes[layer_type] = Rope(size, facts.max_position, facts.hf, parameters, interleaved=self.interleaved)
        return self.ropes[layer_type]


def count_labels(facts: "ModelFacts") -> int:
    """Return the classes of a checkpoint that classifies: config.json stores the names of labels, or their number."""
    labels = facts.hf.get("id2label")
    count = facts.hf.get("num_labels") or (len(labels) if isinstance(labels, dict) else 2)
    if type(count) is not int or count < 1:
        raise ModelError(f"num_labels must be a positive integer, got {count!r}")
    return count
