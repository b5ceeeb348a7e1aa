"""Bamba: Mamba 2 with an attention layer now and then."""

from typing import TYPE_CHECKING

from torch import nn

from quire.models.hybrid import HybridDecoder, make_mamba2

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
