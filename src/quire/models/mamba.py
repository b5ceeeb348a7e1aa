"""Mamba, Falcon-Mamba and Mamba 2: only recurrent layers."""

from typing import TYPE_CHECKING

from torch import nn

from quire.config.layer_patterns import mamba_sizes
from quire.layers.mamba import Mamba as MambaMixer
from quire.layers.mamba import MambaShape
from quire.layers.norm import Norm, RMSNorm
from quire.models.hybrid import HybridDecoder, OneMixerBlock, make_mamba2

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts


class Mamba2(HybridDecoder):
    recordable = False  # CUDA graphs are planned by attention layers
    renames: tuple[tuple[str, str | None], ...] = (
        (r"^backbone\.", ""),
        (r"^embeddings?\.", "embed_tokens."),
        (r"^norm_f\.", "norm."),
    )

    def make_norm(self, facts: "ModelFacts", size: int | None = None) -> Norm:
        return RMSNorm(size or facts.hidden_size, facts.hf.get("layer_norm_epsilon", 1e-5))

    def make_block(self, facts: "ModelFacts", index: int) -> nn.Module:
        return OneMixerBlock(self.make_norm(facts), self.make_mixer(facts, index))

    def make_mixer(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        hf = facts.hf
        return make_mamba2(
            facts,
            hf.get("layer_norm_epsilon", 1e-5),
            bias=bool(hf.get("use_bias")),
            conv_bias=bool(hf.get("use_conv_bias", True)),
            limits=hf.get("time_step_limit") or (0.0, float("inf")),
        )


class Mamba(Mamba2):
    tied = True

    def make_mixer(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        return self.mix(facts)

    def mix(self, facts: "ModelFacts", **norms: object) -> nn.Module:
        hf = facts.hf
        bias, conv_bias = bool(hf.get("use_bias")), bool(hf.get("use_conv_bias", True))
        return MambaMixer(facts.hidden_size, MambaShape(*mamba_sizes(hf)), bias=bias, conv_bias=conv_bias, **norms)  # type: ignore[arg-type]


class FalconMamba(Mamba):
    renames = (*Mamba.renames, (r"\.(dt|b|c)_layernorm\.weight$", None))

    def make_mixer(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        return self.mix(facts, norms="plain", eps=facts.hf.get("mixer_rms_eps", 1e-6))
