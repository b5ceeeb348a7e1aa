"""AFMoE (Arcee Trinity): gated attention output; layers without a window have no RoPE."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quire.attn.batch import Batch
from quire.layers.attention import SelfAttention, attend_heads
from quire.layers.embedding import Embedding
from quire.layers.linear import Linear
from quire.layers.parameter import Role
from quire.layers.rope import Rope
from quire.models.blocks import SandwichBlock
from quire.models.mixtures import Glm4MoE
from quire.types.cache import LayerCache

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts


class GatedOutput(SelfAttention):
    """Attention whose output is multiplied by the sigmoid of a projection of its input, `gate_proj`."""

    def __init__(self, hidden_size: int, heads: int, cache: LayerCache, rope: Rope | None, **more: Any) -> None:
        super().__init__(hidden_size, heads, cache, rope, **more)
        self.gate_proj = Linear(hidden_size, heads * cache.head_dim, role=Role.COLUMN, cuts=(self.division.cut_queries,))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        after = self.tokens_after(batch)
        gate = torch.sigmoid(self.gate_proj(self.select_residual(x, batch), after))
        out: Tensor = self.o_proj(attend_heads(self, self.qkv(x, batch.tokens), batch) * gate, after)
        return out


class AFMoE(Glm4MoE):
    renames = (
        *Glm4MoE.renames,
        (r"\.mlp\.router\.gate\.", ".mlp.gate."),
        (r"\.mlp\.expert_bias$", ".mlp.e_score_correction_bias"),
        (r"\.pre_mlp_layernorm\.", ".pre_feedforward_layernorm."),
        (r"\.post_mlp_layernorm\.", ".post_feedforward_layernorm."),
    )

    def make_embedding(self, facts: "ModelFacts") -> Embedding:
        scale = facts.hidden_size**0.5 if facts.hf.get("mup_enabled") else 1.0
        return Embedding(facts.vocab_size, facts.hidden_size, scale=scale)

    def make_block(self, facts: "ModelFacts", index: int) -> nn.Module:
        first, second, third, fourth = (self.make_norm(facts) for _ in range(4))
        return SandwichBlock((first, second, third, fourth), self.make_attention(facts, index), self.make_mlp(facts, index))

    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        cache, bias = facts.layers[index], bool(facts.hf.get("attention_bias"))
        return GatedOutput(
            facts.hidden_size,
            facts.hf["num_attention_heads"],
            cache,
            None if cache.window is None else self.rope(facts, index),
            bias=bias,
            out_bias=bias,
            q_norm=self.make_norm(facts, cache.head_dim),
            k_norm=self.make_norm(facts, cache.head_dim),
            last=index == len(facts.layers) - 1,
        )
