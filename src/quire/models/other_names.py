"""Llama-like architectures whose code is in model repositories. That code is never run."""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from quire.layers.attention import SelfAttention
from quire.layers.embedding import Head
from quire.layers.mlp import GatedMLP
from quire.layers.norm import LayerNorm, Norm
from quire.models.alibi import alibi_slopes
from quire.models.decoder import Decoder
from quire.models.llama import Llama

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts

NORMED_HEAD_VOCABULARY = 125696  # of Baichuan 2, whose head is normalized


class InternLM2(Decoder):
    renames = (
        *Decoder.renames,
        (r"^tok_embeddings\.", "embed_tokens."),
        (r"^output\.", "lm_head."),
        (r"\.attention_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".post_attention_layernorm."),
        (r"\.attention\.wqkv\.", ".self_attn.qkv."),
        (r"\.attention\.wo\.", ".self_attn.o_proj."),
        (r"\.feed_forward\.w1\.", ".mlp.gate_proj."),
        (r"\.feed_forward\.w2\.", ".mlp.down_proj."),
        (r"\.feed_forward\.w3\.", ".mlp.up_proj."),
    )

    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        bias = bool(facts.hf.get("bias"))
        return self.attention(facts, index, bias=bias, out_bias=bias, fused="by key head")


class InternLM3(Decoder):
    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        return self.attention(facts, index, bias=bool(facts.hf.get("qkv_bias")), out_bias=bool(facts.hf.get("bias")))

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        hf = facts.hf
        return GatedMLP(facts.hidden_size, hf["intermediate_size"], hf["hidden_act"], bias=bool(hf.get("bias")))


class InternLM(Decoder):
    """InternLM 1 and openPangu (PanguEmbedded)."""

    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        bias = bool(facts.hf.get("bias", True))
        return self.attention(facts, index, bias=bias, out_bias=bias)


class Orion(Llama):
    def make_norm(self, facts: "ModelFacts", size: int | None = None) -> Norm:
        return LayerNorm(size or facts.hidden_size, facts.hf.get("rms_norm_eps", 1e-5))


class QWen(Decoder):
    """Qwen 1, up to its training length. Its attention for longer texts is not supported."""

    renames = (
        (r"^transformer\.", ""),
        (r"rotary_emb\.inv_freq$", None),
        (r"^wte\.", "embed_tokens."),
        (r"^ln_f\.", "norm."),
        (r"^h\.", "layers."),
        (r"\.ln_1\.", ".input_layernorm."),
        (r"\.ln_2\.", ".post_attention_layernorm."),
        (r"\.attn\.c_attn\.", ".self_attn.qkv."),
        (r"\.attn\.c_proj\.", ".self_attn.o_proj."),
        (r"\.mlp\.w1\.", ".mlp.up_proj."),
        (r"\.mlp\.w2\.", ".mlp.gate_proj."),
        (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
    )

    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        return self.attention(facts, index, bias=True, out_bias=not facts.hf.get("no_bias", True), fused=True)


class NormedHead(Head):
    """A head whose rows are normalized to length 1."""

    def finish(self, device: torch.device) -> None:
        if self.weight is not None:
            self.weight.data = F.normalize(self.weight.data.float()).to(self.weight.dtype)
        super().finish(device)


class Baichuan(Decoder):
    """Baichuan: 7B has RoPE, 13B ALiBi."""

    renames = (*Decoder.renames, (r"\.self_attn\.W_pack\.", ".self_attn.qkv."))

    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        if "max_position_embeddings" in facts.hf:
            return self.attention(facts, index, fused=True)
        return self.attention(facts, index, fused=True, rope=None, slopes=alibi_slopes(facts.hf["num_attention_heads"]))

    def make_head(self, facts: "ModelFacts") -> Head:
        if facts.vocab_size == NORMED_HEAD_VOCABULARY:
            return NormedHead(facts.vocab_size, facts.hidden_size)
        return super().make_head(facts)
