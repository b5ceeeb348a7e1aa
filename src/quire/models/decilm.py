"""DeciLM (Nemotron NAS): Llama with attention and feed-forward of each block resized, linear or omitted."""

from typing import TYPE_CHECKING

from torch import Tensor, nn

from quire.attn.batch import Batch, Tokens
from quire.config.layer_patterns import block_half
from quire.layers.attention import SelfAttention
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP
from quire.layers.norm import Norm
from quire.models.llama import Llama
from quire.types.errors import ModelError

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts

INNER_SIZE_MULTIPLE = 256


class OneMatrix(nn.Module):
    """A linear layer instead of attention or feed-forward, under its own name."""

    def __init__(self, name: str, size: int) -> None:
        super().__init__()
        self.name = name
        setattr(self, name, Linear(size, size))

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        out: Tensor = getattr(self, self.name)(x, tokens)
        return out


class PartialBlock(nn.Module):
    """A block with attention, feed-forward or both.

    after_attention: the block comes after the last attention layer, so it only sees the batch's final tokens
    """

    def __init__(
        self,
        attention: tuple[Norm, SelfAttention | OneMatrix] | None,
        mlp: tuple[Norm, nn.Module] | None,
        after_attention: bool,
    ) -> None:
        super().__init__()
        self.input_layernorm: Norm | None = None if attention is None else attention[0]
        self.self_attn: SelfAttention | OneMatrix | None = None if attention is None else attention[1]
        self.post_attention_layernorm: Norm | None = None if mlp is None else mlp[0]
        self.mlp: nn.Module | None = None if mlp is None else mlp[1]
        self.after_attention = after_attention

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor | None]:
        tokens = (batch.final if self.after_attention else batch).tokens
        if self.input_layernorm is not None and self.self_attn is not None:
            x, residual = self.input_layernorm.add(x, residual)
            if isinstance(self.self_attn, SelfAttention):
                x, residual = self.self_attn(x, batch), self.self_attn.select_residual(residual, batch)
                tokens = self.self_attn.tokens_after(batch)
            else:
                x = self.self_attn(x, tokens)
        if self.post_attention_layernorm is not None and self.mlp is not None:
            x, residual = self.post_attention_layernorm.add(x, residual)
            x = self.mlp(x, tokens)
        return x, residual


class DeciLM(Llama):
    def count_blocks(self, facts: "ModelFacts") -> int:
        return len(facts.hf["layer_shapes"])

    def make_block(self, facts: "ModelFacts", index: int) -> nn.Module:
        shapes, size = facts.hf["layer_shapes"], facts.hidden_size
        before = sum(shape is not None for shape in shapes[:index])
        attention: SelfAttention | OneMatrix | None = None
        if shapes[index] is not None:
            attention = self.make_attention(facts, before)
        elif block_half(facts.hf, index, "attention").get("replace_with_linear"):
            attention = OneMatrix("linear_attn", size)
        feed = block_half(facts.hf, index, "ffn")
        mlp: nn.Module | None = None
        if feed.get("replace_with_linear"):
            mlp = OneMatrix("linear_mlp", size)
        elif not feed.get("no_op"):
            mlp = self.make_mlp(facts, index)
        return PartialBlock(
            None if attention is None else (self.make_norm(facts), attention),
            None if mlp is None else (self.make_norm(facts), mlp),
            after_attention=before == len(facts.layers),
        )

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:
        hf, feed = facts.hf, block_half(facts.hf, index, "ffn")
        inner = feed.get("intermediate_size") or hf.get("intermediate_size")
        if (multiplier := feed.get("ffn_mult")) is not None:
            inner = -(-int(2 * multiplier * facts.hidden_size / 3) // INNER_SIZE_MULTIPLE) * INNER_SIZE_MULTIPLE
        if not inner:
            raise ModelError(f"block_configs: the feed-forward of layer {index} requires ffn_mult or intermediate_size")
        activation = feed.get("hidden_act") or hf["hidden_act"]
        return GatedMLP(facts.hidden_size, inner, activation, bias=bool(hf.get("mlp_bias")))
