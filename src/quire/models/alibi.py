"""Families with ALiBi, an attention bias by distance: Bloom and MPT."""

from typing import TYPE_CHECKING

from torch import Tensor, nn

from quire.attn.batch import Batch
from quire.layers.attention import SelfAttention
from quire.layers.mlp import MLP
from quire.layers.norm import LayerNorm, Norm
from quire.models.decoder import Decoder
from quire.types.errors import ModelError

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts


def alibi_slopes(heads: int) -> list[float]:
    """Return the ALiBi slope of each head: powers of one base for the largest power of two of heads, odd powers of its root for
    the rest.
    """
    most = 1 << (heads.bit_length() - 1)
    base, root = 2.0 ** (-8.0 / most), 2.0 ** (-4.0 / most)
    return [base ** (i + 1) for i in range(most)] + [root ** (2 * i + 1) for i in range(heads - most)]


class Bloom(Decoder):
    tied = True
    renames = (
        (r"^transformer\.", ""),
        (r"^word_embeddings\.", "embed_tokens."),
        (r"^word_embeddings_layernorm\.", "embed_norm."),
        (r"^h\.", "layers."),
        (r"^ln_f\.", "norm."),
        (r"\.self_attention\.query_key_value\.", ".self_attn.qkv."),
        (r"\.self_attention\.dense\.", ".self_attn.o_proj."),
        (r"\.mlp\.dense_h_to_4h\.", ".mlp.up_proj."),
        (r"\.mlp\.dense_4h_to_h\.", ".mlp.down_proj."),
    )

    def __init__(self, facts: "ModelFacts") -> None:
        if facts.hf.get("apply_residual_connection_post_layernorm"):
            raise ModelError("apply_residual_connection_post_layernorm is not supported; it must be false")
        super().__init__(facts)
        self.embed_norm = self.make_norm(facts)

    def embed(self, batch: Batch) -> Tensor:
        return self.embed_norm(super().embed(batch))

    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        heads = facts.hf["n_head"] if "n_head" in facts.hf else facts.hf["num_attention_heads"]
        return self.attention(
            facts, index, heads=heads, rope=None, bias=True, out_bias=True, fused="by key head", slopes=alibi_slopes(heads)
        )

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        return MLP(facts.hidden_size, 4 * facts.hidden_size, "gelu_pytorch_tanh")

    def make_norm(self, facts: "ModelFacts", size: int | None = None) -> Norm:
        return LayerNorm(size or facts.hidden_size, facts.hf.get("layer_norm_epsilon", 1e-5))


class MPT(Decoder):
    tied = True
    renames = (
        (r"^transformer\.", ""),
        (r"^wte\.", "embed_tokens."),
        (r"^blocks\.", "layers."),
        (r"^norm_f\.", "norm."),
        (r"\.norm_1\.", ".input_layernorm."),
        (r"\.norm_2\.", ".post_attention_layernorm."),
        (r"\.attn\.Wqkv\.", ".self_attn.qkv."),
        (r"\.attn\.out_proj\.", ".self_attn.o_proj."),
        (r"\.ffn\.", ".mlp."),
    )

    def __init__(self, facts: "ModelFacts") -> None:
        attention = facts.hf.get("attn_config") or {}
        if (
            not facts.hf.get("no_bias", True)
            or attention.get("qk_ln")
            or attention.get("prefix_lm")
            or not attention.get("alibi", True)
        ):
            raise ModelError("MPT requires no_bias, no qk_ln, no prefix_lm, and alibi")
        super().__init__(facts)

    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        heads, attention = facts.hf["n_heads"], facts.hf.get("attn_config") or {}
        slopes, most = alibi_slopes(heads), attention.get("alibi_bias_max", 8)
        if most != 8:
            slopes = [slope ** (most / 8) for slope in slopes]
        return self.attention(
            facts, index, heads=heads, rope=None, fused=True, slopes=slopes, clip=attention.get("clip_qkv") or None,
            scale=attention.get("softmax_scale"),
        )  # fmt: skip

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        return MLP(facts.hidden_size, facts.hf.get("expansion_ratio", 4) * facts.hidden_size, "gelu", bias=False)

    def make_norm(self, facts: "ModelFacts", size: int | None = None) -> Norm:
        return LayerNorm(size or facts.hidden_size, facts.hf.get("layer_norm_epsilon", 1e-5), bias=False)
