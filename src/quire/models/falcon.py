"""Falcon, three generations: one matrix for queries, keys and values, parallel attention and feed-forward."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from quire.layers.attention import SelfAttention
from quire.layers.mlp import MLP
from quire.layers.norm import LayerNorm, Norm
from quire.models.alibi import alibi_slopes
from quire.models.blocks import ParallelBlock
from quire.models.decoder import Decoder

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts


class Falcon(Decoder):
    tied = True
    renames = (
        (r"^transformer\.", ""),
        (r"\.rotary(_emb)?\.inv_freq$|\.maybe_rotary\.inv_freq$", None),
        (r"^word_embeddings\.", "embed_tokens."),
        (r"^h\.", "layers."),
        (r"^ln_f\.", "norm."),
        (r"\.ln_attn\.", ".input_layernorm."),
        (r"\.ln_mlp\.", ".post_attention_layernorm."),
        (r"\.self_attention\.query_key_value\.", ".self_attn.qkv."),
        (r"\.self_attention\.dense\.", ".self_attn.o_proj."),
        (r"\.mlp\.dense_h_to_4h\.", ".mlp.up_proj."),
        (r"\.mlp\.dense_4h_to_h\.", ".mlp.down_proj."),
    )

    def make_block(self, facts: "ModelFacts", index: int) -> nn.Module:
        hf = facts.hf
        newest = bool(hf.get("new_decoder_architecture"))
        if not newest and not hf.get("parallel_attn", True):
            return super().make_block(facts, index)
        norms = hf.get("num_ln_in_parallel_attn") or (2 if newest else 1)
        second = self.make_norm(facts) if norms == 2 else None
        return ParallelBlock(self.make_norm(facts), self.make_attention(facts, index), self.make_mlp(facts, index), second)

    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        bias, heads, positions = bool(facts.hf.get("bias")), facts.hf["num_attention_heads"], dict[str, Any]()
        if facts.hf.get("alibi"):  # ALiBi is scaled with the scores here; slopes were rounded in training
            scale = facts.layers[index].head_dim ** -0.5
            slopes = torch.tensor(alibi_slopes(heads), device="cpu").bfloat16().float().tolist()
            positions = {"rope": None, "slopes": [slope * scale for slope in slopes]}
        return self.attention(facts, index, bias=bias, out_bias=bias, fused="by key head", **positions)

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        hf = facts.hf
        inner = hf.get("ffn_hidden_size") or 4 * facts.hidden_size
        return MLP(facts.hidden_size, inner, hf.get("activation") or "gelu", bias=bool(hf.get("bias")))

    def make_norm(self, facts: "ModelFacts", size: int | None = None) -> Norm:
        return LayerNorm(size or facts.hidden_size, facts.hf.get("layer_norm_epsilon", 1e-5))
