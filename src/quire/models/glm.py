"""GLM 4: Llama with one matrix for gate and up, and interleaved RoPE on half of each head. GLM 4-0414 also normalizes the
outputs of attention and feed-forward.
"""

from typing import TYPE_CHECKING

from torch import nn

from quire.layers.attention import SelfAttention
from quire.layers.mlp import GatedMLP
from quire.layers.norm import Norm, RMSNorm
from quire.models.blocks import SandwichBlock
from quire.models.decoder import Decoder
from quire.types.errors import ModelError

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts


class Glm(Decoder):
    interleaved = True
    renames: tuple[tuple[str, str | None], ...] = (*Decoder.renames, (r"\.gate_up_proj\.", ".gate_up."))

    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        return self.attention(facts, index, bias=facts.hf.get("attention_bias", True))

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        hf = facts.hf
        return GatedMLP(facts.hidden_size, hf["intermediate_size"], hf.get("hidden_act", "silu"), fused=True)


class Glm4(Glm):
    renames = (
        *Glm.renames,
        (r"\.post_attention_layernorm\.", ".pre_feedforward_layernorm."),
        (r"\.post_self_attn_layernorm\.", ".post_attention_layernorm."),
        (r"\.post_mlp_layernorm\.", ".post_feedforward_layernorm."),
    )

    def make_block(self, facts: "ModelFacts", index: int) -> nn.Module:
        first, second, third, fourth = (self.make_norm(facts) for _ in range(4))
        return SandwichBlock((first, second, third, fourth), self.make_attention(facts, index), self.make_mlp(facts, index))


class ChatGLM(Decoder):
    """GLM 4 and ChatGLM 2 and 3 as first published."""

    renames = (
        (r"^transformer\.", ""),
        (r"rotary_pos_emb\.inv_freq$", None),
        (r"^embedding\.word_embeddings\.", "embed_tokens."),
        (r"^output_layer\.", "lm_head."),
        (r"^encoder\.final_layernorm\.", "norm."),
        (r"^encoder\.", ""),
        (r"\.self_attention\.query_key_value\.", ".self_attn.qkv."),
        (r"\.self_attention\.dense\.", ".self_attn.o_proj."),
        (r"\.mlp\.dense_h_to_4h\.", ".mlp.gate_up."),
        (r"\.mlp\.dense_4h_to_h\.", ".mlp.down_proj."),
    )
    interleaved = True

    def __init__(self, facts: "ModelFacts") -> None:
        required = {
            "rmsnorm": True,
            "post_layer_norm": True,
            "apply_residual_connection_post_layernorm": False,
            "original_rope": True,
        }
        for name, value in required.items():
            if facts.hf.get(name, value) != value:
                raise ModelError(f"{name} must be {str(value).lower()}; got {facts.hf[name]}")
        super().__init__(facts)

    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        everywhere = bool(facts.hf.get("add_bias_linear"))
        return self.attention(
            facts, index, bias=everywhere or bool(facts.hf.get("add_qkv_bias")), out_bias=everywhere, fused=True
        )

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        hf = facts.hf
        return GatedMLP(facts.hidden_size, hf["ffn_hidden_size"], "silu", bias=bool(hf.get("add_bias_linear")), fused=True)

    def make_norm(self, facts: "ModelFacts", size: int | None = None) -> Norm:
        return RMSNorm(size or facts.hidden_size, facts.hf.get("layernorm_epsilon", 1e-5))
