"""OLMo: version 1 has LayerNorms without parameters; later ones normalize all queries and all keys of a token together, and the
outputs of attention and feed-forward instead of their inputs. OLMo 3 scales RoPE in layers without a window only. OLMo Hybrid
alternates Gated DeltaNet with attention.
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from quire.attn.batch import Batch
from quire.config.layer_patterns import delta_sizes
from quire.layers.attention import SelfAttention
from quire.layers.delta_net import DeltaNet, DeltaShape
from quire.layers.norm import LayerNorm, Norm
from quire.models.blocks import PostNormBlock
from quire.models.decoder import Decoder
from quire.models.hybrid import HybridDecoder

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


DELTA_NORM_EPS = 1e-5  # of the output of DeltaNets, whatever the other norms have


class PostNormMixerBlock(nn.Module):
    """Norms after attention and feed-forward, none before."""

    def __init__(self, mixer: nn.Module, feed_norm: Norm, feed_forward: nn.Module, last_norm: Norm) -> None:
        super().__init__()
        self.mixer, self.feed_norm, self.feed_forward, self.last_norm = mixer, feed_norm, feed_forward, last_norm

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        total = x if residual is None else x + residual
        total = total + self.feed_norm(self.mixer(total, batch))
        return self.last_norm(self.feed_forward(total, batch.tokens)), total


class OlmoHybrid(HybridDecoder):
    renames = (
        *HybridDecoder.renames,
        (r"\.linear_attn\.([qkvab])_proj\.", r".mixer.in_proj_\1."),
        (r"\.linear_attn\.g_proj\.", ".mixer.in_proj_z."),
        (r"\.linear_attn\.o_(proj|norm)\.", r".mixer.out_\1."),
        (r"\.mixer\.out_norm\.", ".mixer.norm."),
        (r"\.(linear_attn|self_attn)\.", ".mixer."),
        (r"\.(input_layernorm|attention_layer_norm)\.", ".norm."),
        (r"\.(post_attention_layernorm|feedforward_layer_norm)\.", ".feed_norm."),
        (r"\.post_feedforward_layernorm\.", ".last_norm."),
        (r"\.mlp\.", ".feed_forward."),
    )

    def make_block(self, facts: "ModelFacts", index: int) -> nn.Module:
        if facts.kinds[index] != "attention":
            return super().make_block(facts, index)
        hf = facts.hf
        bias, has_rope = bool(hf.get("attention_bias")), (hf.get("rope_parameters") or {}).get("rope_theta") is not None
        eps = hf.get("rms_norm_eps", 1e-6)
        no_rope: dict[str, Any] = {} if has_rope else {"rope": None}
        attention = self.attend(facts, index, bias=bias, out_bias=bias, width_norm=eps, **no_rope)
        return PostNormMixerBlock(attention, self.make_norm(facts), self.make_mlp(facts, index), self.make_norm(facts))

    def make_mixer(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        reach = 2.0 if facts.hf.get("linear_allow_neg_eigval", True) else 1.0
        return DeltaNet(facts.hidden_size, DeltaShape(*delta_sizes(facts.hf)), DELTA_NORM_EPS, stored="separate", reach=reach)
