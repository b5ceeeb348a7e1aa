"""Decoders of Mamba and attention: Bamba, Granite 4, Falcon-H1, Jamba."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quire.attn.batch import Batch, Tokens
from quire.config.layer_patterns import mamba2_sizes, mamba_sizes
from quire.layers.attention import SelfAttention, attend_heads
from quire.layers.embedding import Embedding, Head
from quire.layers.mamba import Mamba, Mamba2, Mamba2Shape, MambaShape
from quire.layers.mlp import GatedMLP
from quire.layers.moe import MoE, RoutedMoE
from quire.layers.norm import Norm, RMSNorm
from quire.layers.recurrent import GatedNorm
from quire.models.granite import Granite, GraniteMoE
from quire.models.hybrid import HybridDecoder, MixerBlock, make_mamba2
from quire.types.errors import ModelError

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts


class Bamba(HybridDecoder):
    renames = (
        *HybridDecoder.renames,
        (r"^final_layernorm\.", "norm."),
        (r"\.(mamba|self_attn)\.", ".mixer."),
        (r"\.input_layernorm\.", ".norm."),
        (r"\.pre_ff_layernorm\.", ".feed_norm."),
    )

    def make_mixer(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        hf = facts.hf
        return make_mamba2(
            facts,
            hf.get("rms_norm_eps", 1e-5),
            bias=bool(hf.get("mamba_proj_bias")),
            conv_bias=bool(hf.get("mamba_conv_bias", True)),
            limits=hf.get("time_step_limit") or (0.0, float("inf")),
        )


class GraniteHybrid(Bamba):
    """Granite 4: Granite's multipliers; experts and a shared expert, or a dense feed-forward."""

    renames = (
        *HybridDecoder.renames,
        (r"\.(mamba|self_attn)\.", ".mixer."),
        (r"\.input_layernorm\.", ".norm."),
        (r"\.post_attention_layernorm\.", ".feed_norm."),
        *GraniteMoE.renames[-5:],
        (r"\.mlp\.", ".feed_forward."),
    )
    make_embedding, make_head = Granite.make_embedding, Granite.make_head

    def __init__(self, facts: "ModelFacts") -> None:
        if not facts.hf.get("num_local_experts", 8):
            alone = ((r"\.feed_forward\.shared_expert\.", ".feed_forward."),)
            self.renames = (*type(self).renames, *alone)
        super().__init__(facts)

    def make_block(self, facts: "ModelFacts", index: int) -> nn.Module:
        block = super().make_block(facts, index)
        assert isinstance(block, MixerBlock)
        block.scale = facts.hf.get("residual_multiplier", 1.0)
        return block

    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        hf = facts.hf
        bias, scale = bool(hf.get("attention_bias")), hf.get("attention_multiplier", 1.0)
        more: dict[str, Any] = {} if hf.get("position_embedding_type") == "rope" else {"rope": None}
        return self.attend(facts, index, bias=bias, out_bias=bias, scale=scale, **more)

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        hf = facts.hf
        shared = GatedMLP(facts.hidden_size, hf["shared_intermediate_size"], hf["hidden_act"], fused=True)
        if not hf.get("num_local_experts", 8):
            return shared
        return RoutedMoE(
            facts.hidden_size,
            hf["intermediate_size"],
            hf["hidden_act"],
            experts=hf.get("num_local_experts", 8),
            top_k=hf.get("num_experts_per_tok", 2),
            renormalize=True,
            shared=shared,
        )


class ScaledMLP(GatedMLP):
    """Gated feed-forward whose gate and output are multiplied by `scales`."""

    def __init__(self, hidden_size: int, inner_size: int, activation: str, *, bias: bool, scales: tuple[float, float]) -> None:
        super().__init__(hidden_size, inner_size, activation, bias=bias)
        self.scales = scales

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        gate, up = self.gate_up(x, tokens).chunk(2, -1)
        out: Tensor = self.down_proj(torch.nn.functional.silu(gate * self.scales[0]) * up, tokens)
        return out * self.scales[1]


class ScaledKeys(SelfAttention):
    """Attention whose keys are multiplied by `key_scale` before RoPE."""

    key_scale = 1.0

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        qkv, spec = self.qkv(x, batch.tokens), self.core.spec
        if self.key_scale != 1.0:
            first = spec.heads * spec.head_dim
            qkv[:, first : first + spec.kv_heads * spec.head_dim] *= self.key_scale
        out: Tensor = self.o_proj(attend_heads(self, qkv, batch), batch.tokens)
        return out


class ParallelMixer(nn.Module):
    """The sum of a Mamba 2 mixer and attention. `scales`: factors of Mamba's input and output, and of attention's."""

    def __init__(self, mamba: Mamba2, self_attn: SelfAttention, scales: tuple[float, float, float, float]) -> None:
        super().__init__()
        self.mamba, self.self_attn, self.scales = mamba, self_attn, scales

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        mamba_in, mamba_out, attention_in, attention_out = self.scales
        recurrent: Tensor = self.mamba(x * mamba_in, batch) * mamba_out
        attended: Tensor = self.self_attn(x * attention_in, batch) * attention_out
        return recurrent + attended


class FalconH1(HybridDecoder):
    renames = (
        *HybridDecoder.renames,
        (r"^final_layernorm\.", "norm."),
        (r"\.(mamba|self_attn)\.", r".mixer.\1."),
        (r"\.input_layernorm\.", ".norm."),
        (r"\.pre_ff_layernorm\.", ".feed_norm."),
        (r"\.mup_vector$", None),
    )

    def make_embedding(self, facts: "ModelFacts") -> Embedding:
        return Embedding(facts.vocab_size, facts.hidden_size, scale=facts.hf.get("embedding_multiplier", 1.0))

    def make_head(self, facts: "ModelFacts") -> Head:
        tied = self.embed_tokens if facts.hf.get("tie_word_embeddings", self.tied) else None
        return Head(facts.vocab_size, facts.hidden_size, tied=tied, scale=facts.hf.get("lm_head_multiplier", 1.0))

    def make_block(self, facts: "ModelFacts", index: int) -> nn.Module:
        return MixerBlock(
            self.make_norm(facts), self.make_mixer(facts, index), self.make_norm(facts), self.make_mlp(facts, index)
        )

    def make_mixer(self, facts: "ModelFacts", index: int) -> nn.Module:
        hf = facts.hf
        shape = Mamba2Shape(*mamba2_sizes(hf))
        first = bool(hf.get("mamba_norm_before_gate", True))
        eps = hf.get("rms_norm_eps", 1e-5)
        mamba = Mamba2(
            facts.hidden_size,
            shape,
            GatedNorm(shape.division, eps, norm_first=first) if hf.get("mamba_rms_norm") else None,
            bias=bool(hf.get("mamba_proj_bias")),
            out_bias=bool(hf.get("projectors_bias")),
            conv_bias=bool(hf.get("mamba_conv_bias", True)),
            limits=hf.get("time_step_limit") or (0.0, float("inf")),
            multipliers=hf.get("ssm_multipliers"),
        )
        bias = bool(hf.get("attention_bias"))
        attention = self.attend(facts, index, kind=ScaledKeys, bias=bias, out_bias=bias)
        assert isinstance(attention, ScaledKeys)
        attention.key_scale = hf.get("key_multiplier", 1.0)
        names = ("ssm_in_multiplier", "ssm_out_multiplier", "attention_in_multiplier", "attention_out_multiplier")
        scales = tuple(float(hf.get(name, 1.0)) for name in names)
        mamba_in, mamba_out, attention_in, attention_out = scales
        return ParallelMixer(mamba, attention, (mamba_in, mamba_out, attention_in, attention_out))

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        hf = facts.hf
        gate, down = hf.get("mlp_multipliers") or (1.0, 1.0)
        return ScaledMLP(
            facts.hidden_size, hf["intermediate_size"], hf["hidden_act"], bias=bool(hf.get("mlp_bias")), scales=(gate, down)
        )


class Jamba(Bamba):
    """Jamba: Mamba 1 with inner norms, attention without RoPE, experts in some layers."""

    renames = (*Bamba.renames, (r"\.feed_forward\.router\.", ".feed_forward.gate."))

    def make_norm(self, facts: "ModelFacts", size: int | None = None) -> Norm:
        return RMSNorm(size or facts.hidden_size, facts.hf.get("rms_norm_eps", 1e-6))

    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        return self.attend(facts, index, rope=None)

    def make_mixer(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        hf = facts.hf
        return Mamba(
            facts.hidden_size,
            MambaShape(*mamba_sizes(hf)),
            bias=bool(hf.get("mamba_proj_bias")),
            conv_bias=bool(hf.get("mamba_conv_bias", True)),
            norms="weighted",
            eps=hf.get("rms_norm_eps", 1e-6),
        )

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:
        hf = facts.hf
        period, offset, experts = (
            hf.get("expert_layer_period", 2),
            hf.get("expert_layer_offset", 1),
            hf.get("num_experts", 16),
        )
        if not isinstance(period, int) or period < 1:
            raise ModelError(f"expert_layer_period must be a positive integer; got {period!r}")
        if experts < 2 or index % period != offset:
            return super().make_mlp(facts, index)
        top_k = hf.get("num_experts_per_tok", 2)
        return MoE(
            facts.hidden_size, hf["intermediate_size"], hf["hidden_act"], experts=experts, top_k=top_k, renormalize=False
        )
