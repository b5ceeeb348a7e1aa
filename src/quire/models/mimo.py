"""MiMo V2 Flash: values narrower than keys; layers with a window have more key heads and attention sinks."""

from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, cat

from quire.attn.batch import Batch
from quire.dist.mesh import HeadDivision
from quire.layers.attention import SelfAttention, attend_heads
from quire.layers.linear import Linear, MergedLinear
from quire.layers.parameter import Role
from quire.layers.rope import Rope
from quire.models.mixtures import Glm4MoE
from quire.types.cache import LayerCache
from quire.types.errors import ModelError

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts


class NarrowValues(SelfAttention):
    """Attention with a value head dimension `values`, padded with zeros in the cache to the keys' size. `value_scale`
    multiplies values.
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        cache: LayerCache,
        rope: Rope,
        *,
        values: int,
        value_scale: float,
        bias: bool = False,
        **more: Any,
    ) -> None:
        super().__init__(hidden_size, heads, cache, rope, bias=bias, **more)
        self.values, self.value_scale = values, value_scale
        narrow, keys = HeadDivision(heads, cache.kv_heads, values), cache.kv_heads
        sizes = {"q_proj": heads * cache.head_dim, "k_proj": keys * cache.head_dim, "v_proj": keys * values}
        cuts = self.division.cut_queries, self.division.cut_keys, narrow.cut_keys
        self.qkv = MergedLinear(hidden_size, sizes, bias=bias, role=Role.COLUMN, cuts=cuts)
        self.o_proj = Linear(heads * values, hidden_size, role=Role.ROW, cuts=(narrow.cut_queries,))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        spec, parts = self.core.spec, self.qkv(x, batch.tokens)
        width = (spec.heads + spec.kv_heads) * spec.head_dim
        value = parts[:, width:].view(len(x), spec.kv_heads, self.values) * self.value_scale
        wide = F.pad(value, (0, spec.head_dim - self.values)).flatten(1)
        attended = attend_heads(self, cat((parts[:, :width], wide), 1), batch)
        narrow = attended.view(-1, spec.heads, spec.head_dim)[:, :, : self.values].flatten(1)
        out: Tensor = self.o_proj(narrow, self.tokens_after(batch))
        return out


class MiMoV2Flash(Glm4MoE):
    renames = (
        *Glm4MoE.renames,
        (r"^mtp\.", None),
        (r"\.self_attn\.attention_sink_bias$", ".self_attn.sinks"),
    )

    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        hf, cache = facts.hf, facts.layers[index]
        if hf["v_head_dim"] > cache.head_dim:
            raise ModelError(f"v_head_dim must be at most head_dim ({cache.head_dim}); got {hf['v_head_dim']}")
        scale = hf.get("attention_value_scale")
        return NarrowValues(
            facts.hidden_size,
            hf["num_attention_heads"],
            cache,
            self.rope(facts, index, "full_attention" if cache.window is None else "sliding_attention"),
            values=hf["v_head_dim"],
            value_scale=1.0 if scale is None else scale,
            bias=bool(hf.get("attention_bias")),
            sinks=cache.window is not None,
            last=index == len(facts.layers) - 1,
        )
