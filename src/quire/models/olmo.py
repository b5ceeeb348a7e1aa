"""OLMo: the first has layer norms without parameters; later ones norm all queries and all keys of a token together, and what
attention and feed-forward give, not what they are given. OLMo 3 stretches the rotation of layers without a window only.
"""

from typing import TYPE_CHECKING, Any

from torch import nn

from quire.layers.attention import SelfAttention
from quire.layers.norm import LayerNorm, Norm
from quire.models.blocks import PostNormBlock
from quire.models.decoder import Decoder

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts


class Olmo(Decoder):
    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        bias = bool(facts.hf.get("attention_bias"))
        return self.attention(facts, index, bias=bias, out_bias=bias, clip=facts.hf.get("clip_qkv"))

    def make_norm(self, facts: "ModelFacts", size: int | None = None) -> Norm:
        return LayerNorm(size or facts.hidden_size, 1e-5, bias=False, weight=False)


class Olmo2(Decoder):
    def make_block(self, facts: "ModelFacts", index: int) -> nn.Module:
        attention, mlp = self.make_attention(facts, index), self.make_mlp(facts, index)
        return PostNormBlock(attention, self.make_norm(facts), mlp, self.make_norm(facts))

    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        return self.attention(facts, index, **self.differences(facts, index))

    def differences(self, facts: "ModelFacts", index: int) -> dict[str, Any]:  # noqa: ARG002
        bias = bool(facts.hf.get("attention_bias"))
        return {"bias": bias, "out_bias": bias, "width_norm": facts.hf.get("rms_norm_eps", 1e-5)}


class Olmo3(Olmo2):
    def differences(self, facts: "ModelFacts", index: int) -> dict[str, Any]:
        kind = "full_attention" if facts.layers[index].window is None else "sliding_attention"
        return super().differences(facts, index) | {"rope": self.rope(facts, index, kind)}
