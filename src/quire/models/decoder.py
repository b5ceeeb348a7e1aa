"""The skeleton of every decoder: embedding, blocks, final norm, head.

A family subclasses `Decoder` and overrides the makers whose product differs. Its modules carry the names Hugging Face
checkpoints use, so that the loader needs only a few `renames`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from quire.attn.batch import Batch, Tokens
from quire.layers.attention import Attention, SelfAttention
from quire.layers.embedding import Embedding, Head
from quire.layers.mlp import GatedMLP
from quire.layers.norm import Norm, RMSNorm
from quire.layers.recurrent import Recurrence
from quire.layers.rope import Rope, rope_parameters
from quire.models.blocks import Block

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts

Body = Callable[[Tensor, Batch], Tensor]  # embedded tokens [T, H] -> hidden states [K, H] of the final ones


class Decoder(nn.Module):
    """Llama's architecture, except what a family's `make_*` methods change. They are called once per layer."""

    # (pattern, replacement) applied in order to each checkpoint name with re.sub; a replacement of None = do not read it
    renames: tuple[tuple[str, str | None], ...] = ((r"^model\.", ""), (r"rotary_emb\.inv_freq$", None))
    tied: ClassVar[bool] = False  # default of tie_word_embeddings
    interleaved: ClassVar[bool] = False  # RoPE rotates neighbouring dimensions instead of halves
    recordable: ClassVar[bool] = True  # its kernel launches depend on the batch's shape alone: CUDA graphs can record them
    keeps_context: ClassVar[bool] = True  # in a KV cache or recurrent state; False: every prompt is whole in one step
    deep_levels = 0  # first blocks after which embeddings of an encoder are added (deep stack)

    def __init__(self, facts: "ModelFacts") -> None:
        super().__init__()
        self.ropes: dict[str | None, Rope] = {}
        self.embed_tokens = self.make_embedding(facts)
        self.layers = nn.ModuleList(self.make_block(facts, index) for index in range(self.count_blocks(facts)))
        self.norm: Norm = self.make_norm(facts)
        self.lm_head = self.make_head(facts)
        self.attentions: list[Attention] = [module for module in self.modules() if isinstance(module, Attention)]
        self.recurrents: list[Recurrence] = [module for module in self.modules() if isinstance(module, Recurrence)]
        self.body: Body = self.run_blocks  # a device may replace it with a compiled one

    def count_blocks(self, facts: "ModelFacts") -> int:
        return len(facts.layers)

    def forward(self, batch: Batch) -> Tensor:
        """Return the hidden states [K, H] of the final tokens."""
        return self.body(self.embed(batch), batch)

    def run_blocks(self, x: Tensor, batch: Batch) -> Tensor:
        """Run the blocks on embedded tokens x [T, H]."""
        residual = None
        for index, block in enumerate(self.layers):
            x, residual = block(x, residual, batch)
            if index < self.deep_levels:
                x = add_level(x, batch, index + 1)
        return self.norm.add(x, residual)[0]

    def embed(self, batch: Batch) -> Tensor:
        """Return the input of the first block [T, H]."""
        return self.look_up(batch)

    def look_up(self, batch: Batch) -> Tensor:
        """Return the embeddings of all tokens: those of an encoder, where the batch has them, else those of their ids."""
        media = batch.media
        if media is None:
            x: Tensor = self.embed_tokens(batch.ids, batch.tokens)
            return x
        x = self.embed_tokens(batch.ids.index_fill(0, media.index, 0), batch.tokens)
        return x.index_copy(0, media.index, media.level(0, x.shape[1]))

    def logits(self, hidden: Tensor, tokens: Tokens) -> Tensor:
        """Return the logits [P, V] float32 of hidden [P, H]."""
        out: Tensor = self.lm_head(hidden, tokens)
        return out

    def make_embedding(self, facts: "ModelFacts") -> Embedding:
        return Embedding(facts.vocab_size, facts.hidden_size)

    def make_block(self, facts: "ModelFacts", index: int) -> nn.Module:
        return Block(
            self.make_norm(facts), self.make_attention(facts, index), self.make_norm(facts), self.make_mlp(facts, index)
        )

    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        return self.attention(facts, index)

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        hf = facts.hf
        return GatedMLP(facts.hidden_size, hf["intermediate_size"], hf["hidden_act"], bias=bool(hf.get("mlp_bias")))

    def make_norm(self, facts: "ModelFacts", size: int | None = None) -> Norm:
        return RMSNorm(size or facts.hidden_size, facts.hf.get("rms_norm_eps", 1e-6))

    def make_head(self, facts: "ModelFacts") -> Head:
        tied = facts.hf.get("tie_word_embeddings", self.tied)
        return Head(facts.vocab_size, facts.hidden_size, tied=self.embed_tokens if tied else None)

    def attention(self, facts: "ModelFacts", index: int, **differences: Any) -> SelfAttention:
        """Return the attention of layer `index`; `differences` override arguments of SelfAttention."""
        options = dict(differences)
        if "heads" not in options:
            options["heads"] = facts.hf["num_attention_heads"]
        if "rope" not in options:
            options["rope"] = self.rope(facts, index)
        last = index == len(facts.layers) - 1
        return SelfAttention(facts.hidden_size, cache=facts.layers[index], last=last, **options)

    def rope(self, facts: "ModelFacts", index: int, layer_type: str | None = None) -> Rope:
        """Return the RoPE of layer `index`; layers of one type share one table."""
        if layer_type not in self.ropes:
            parameters = rope_parameters(facts.hf, layer_type)
            self.ropes[layer_type] = Rope(
                facts.layers[index].head_dim, facts.max_position, facts.hf, parameters, interleaved=self.interleaved
            )
        return self.ropes[layer_type]


def add_level(x: Tensor, batch: Batch, level: int) -> Tensor:
    """Add a level of the encoder's embeddings to the hidden states x [T, H], or [K, H] of the final tokens. Overridable by
    __torch_function__.
    """
    if has_torch_function_unary(x):
        return handle_torch_function(add_level, (x,), x, batch, level)
    media = (batch if len(x) == len(batch.ids) else batch.final).media
    return x if media is None else x.index_add(0, media.index, media.level(level, x.shape[1]))
