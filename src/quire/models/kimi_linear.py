"""Kimi Linear: Kimi Delta Attention, some layers of latent attention without RoPE, and DeepSeek's experts."""

from typing import TYPE_CHECKING

from torch import nn

from quire.config.layer_patterns import kimi_sizes
from quire.layers.delta_net import DeltaShape, KimiDelta
from quire.layers.latent import LatentAttention
from quire.layers.rope import Rope
from quire.models.deepseek import DeepseekV3, SparseDecoder
from quire.models.hybrid import HybridDecoder

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts

NO_ROPE = {"rope_type": "none", "rope_theta": 1e4, "partial_rotary_factor": 1.0}


class KimiLinear(SparseDecoder, HybridDecoder):
    """Kimi Linear. Its config is translated in `config/families/recurrent.py`."""

    renames = (
        *HybridDecoder.renames,
        (r"\.(block_sparse_moe|mlp)\.", ".feed_forward."),
        (r"\.feed_forward\.gate\.e_score_correction_bias$", ".feed_forward.e_score_correction_bias"),
        (r"\.feed_forward\.shared_experts\.", ".feed_forward.shared_expert."),
        (r"\.experts\.(\d+)\.w1\.", r".experts.\1.gate_proj."),
        (r"\.experts\.(\d+)\.w2\.", r".experts.\1.down_proj."),
        (r"\.experts\.(\d+)\.w3\.", r".experts.\1.up_proj."),
        (r"\.self_attn\.(forget_gate\.)?", ".mixer."),
        (r"\.input_layernorm\.", ".norm."),
        (r"\.post_attention_layernorm\.", ".feed_norm."),
    )

    routing = DeepseekV3.routing

    def __init__(self, facts: "ModelFacts") -> None:
        super().__init__(facts)
        self.renames = type(self).renames  # there are no draft layers after the last one

    def make_attention(self, facts: "ModelFacts", index: int) -> LatentAttention:  # type: ignore[override]
        hf = facts.hf
        nope, rotary, heads = hf["qk_nope_head_dim"], hf["qk_rope_head_dim"], hf["num_attention_heads"]
        if None not in self.ropes:
            self.ropes[None] = Rope(rotary, facts.max_position, hf, NO_ROPE)
        return LatentAttention(
            facts.hidden_size,
            heads,
            facts.layers[sum(kind == "attention" for kind in facts.kinds[:index])],
            self.ropes[None],
            nope=nope,
            rotary=rotary,
            values=hf["v_head_dim"],
            query_rank=hf["q_lora_rank"] or None,
            scale=(nope + rotary) ** -0.5,
        )

    def make_mixer(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        return KimiDelta(facts.hidden_size, DeltaShape(*kimi_sizes(facts.hf)), facts.hf["rms_norm_eps"])
