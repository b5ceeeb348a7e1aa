"""Bamba: Mamba 2 with an attention layer now and then."""

from typing import TYPE_CHECKING

from torch import nn

from quire.config.recurrent import mamba2_sizes
from quire.layers.mamba2 import Mamba2, Mamba2Shape
from quire.layers.recurrent import GatedNorm
from quire.models.hybrid import HybridDecoder

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
        shape = Mamba2Shape(*mamba2_sizes(hf))
        return Mamba2(
            facts.hidden_size,
            shape,
            GatedNorm(shape.inner, hf.get("rms_norm_eps", 1e-5), groups=shape.groups),
            bias=bool(hf.get("mamba_proj_bias")),
            conv_bias=bool(hf.get("mamba_conv_bias", True)),
            limits=hf.get("time_step_limit") or (0.0, float("inf")),
        )
