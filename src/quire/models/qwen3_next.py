"""Qwen3-Next and Qwen3.5: Gated DeltaNet, and gated attention in every fourth layer."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quire.attn.batch import Batch
from quire.config.layer_patterns import delta_sizes
from quire.dist.mesh import HeadDivision
from quire.layers.attention import SelfAttention, attend_heads
from quire.layers.delta_net import DeltaNet, DeltaShape, Stored
from quire.layers.linear import MergedLinear
from quire.layers.norm import Norm, RMSNorm
from quire.layers.parameter import Role
from quire.models.hybrid import HybridDecoder
from quire.models.mixtures import is_dense, with_shared_expert
from quire.types.cache import LayerCache

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts


class GatedAttention(SelfAttention):
    """Attention whose query projection also has a gate for each head's output."""

    def __init__(self, hidden_size: int, heads: int, cache: LayerCache, rope: Any, *, bias: bool = False, **more: Any) -> None:
        super().__init__(hidden_size, heads, cache, rope, bias=bias, **more)
        keys = cache.kv_heads * cache.head_dim
        sizes = {"q_proj": 2 * heads * cache.head_dim, "k_proj": keys, "v_proj": keys}
        pairs = HeadDivision(heads, cache.kv_heads, 2 * cache.head_dim)
        cuts = pairs.cut_queries, self.division.cut_keys, self.division.cut_keys
        self.qkv = MergedLinear(hidden_size, sizes, bias=bias, role=Role.COLUMN, cuts=cuts)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        spec, parts = self.core.spec, self.qkv(x, batch.tokens)
        width = spec.heads * spec.head_dim
        query, gate = parts[:, : 2 * width].reshape(len(x), spec.heads, 2, spec.head_dim).unbind(2)
        qkv = torch.cat((query.flatten(1), parts[:, 2 * width :]), 1)
        attended = attend_heads(self, qkv, batch) * torch.sigmoid(gate.flatten(1))
        out: Tensor = self.o_proj(attended, batch.tokens)
        return out


class Qwen35(HybridDecoder):
    renames = (
        *HybridDecoder.renames,
        (r"^language_model\.", ""),
        (r"^mtp\.", None),
        (r"\.(linear_attn|self_attn)\.", ".mixer."),
        (r"\.input_layernorm\.", ".norm."),
        (r"\.post_attention_layernorm\.", ".feed_norm."),
        (r"\.mlp\.", ".feed_forward."),
    )
    stored: Stored = "merged"

    def make_norm(self, facts: "ModelFacts", size: int | None = None) -> Norm:
        return RMSNorm(size or facts.hidden_size, facts.hf.get("rms_norm_eps", 1e-6), offset=1.0)

    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        size, bias = facts.layers[0].head_dim, bool(facts.hf.get("attention_bias"))
        norms = {"q_norm": self.make_norm(facts, size), "k_norm": self.make_norm(facts, size)}
        return self.attend(facts, index, kind=GatedAttention, bias=bias, out_bias=bias, **norms)

    def make_mixer(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        shape = DeltaShape(*delta_sizes(facts.hf))
        return DeltaNet(facts.hidden_size, shape, facts.hf.get("rms_norm_eps", 1e-6), stored=self.stored)


class Qwen35MoE(Qwen35):
    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:
        return super().make_mlp(facts, index) if is_dense(facts, index) else with_shared_expert(facts, renormalize=True)


class Qwen3Next(Qwen35MoE):
    stored = "by head"
