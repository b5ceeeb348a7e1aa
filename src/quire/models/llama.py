"""Llama and the families that differ from it by a bias, a norm or a merged matrix."""

from typing import TYPE_CHECKING

from torch import nn

from quire.layers.attention import SelfAttention
from quire.layers.mlp import MLP, GatedMLP
from quire.layers.norm import LayerNorm, Norm
from quire.models.decoder import Decoder

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts


class Llama(Decoder):
    """Also Mistral: its windows are a fact of each layer's cache."""

    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        bias = bool(facts.hf.get("attention_bias"))
        return self.attention(facts, index, bias=bias, out_bias=bias)


class Qwen2(Decoder):
    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        return self.attention(facts, index, bias=True)


class MiMo(Qwen2):
    """Layers beside the others are for drafts."""

    renames = (*Qwen2.renames, (r"^mtp_layers\.", None))


class Ministral3(Llama):
    """Queries are sharpened as a text grows longer than those it was first trained with."""

    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        rope = facts.hf["rope_parameters"]
        weight, every = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
        return self.attention(facts, index, query_scale=(every, weight) if weight and every else None)


class Qwen3(Decoder):
    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        bias = bool(facts.hf.get("attention_bias"))
        head_dim = facts.layers[index].head_dim
        q_norm, k_norm = self.make_norm(facts, head_dim), self.make_norm(facts, head_dim)
        return self.attention(facts, index, bias=bias, out_bias=bias, q_norm=q_norm, k_norm=k_norm)


class Phi3(Decoder):
    renames = (*Decoder.renames, (r"\.qkv_proj\.", ".qkv."), (r"\.gate_up_proj\.", ".gate_up."))

    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        return self.attention(facts, index, fused=True)

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        return GatedMLP(facts.hidden_size, facts.hf["intermediate_size"], facts.hf["hidden_act"], fused=True)


class Arcee(Llama):
    """Its feed-forward has no gate."""

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        hf = facts.hf
        return MLP(facts.hidden_size, hf["intermediate_size"], hf.get("hidden_act", "relu2"), bias=bool(hf.get("mlp_bias")))


class Jais2(Arcee):
    def make_norm(self, facts: "ModelFacts", size: int | None = None) -> Norm:
        return LayerNorm(size or facts.hidden_size, facts.hf.get("layer_norm_eps", 1e-5))


class Ernie45(Decoder):
    interleaved = True
    tied = True

    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        bias = bool(facts.hf.get("use_bias"))
        return self.attention(facts, index, bias=bias, out_bias=bias)

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        hf = facts.hf
        return GatedMLP(facts.hidden_size, hf["intermediate_size"], hf["hidden_act"], bias=bool(hf.get("use_bias")))


class Helium(Decoder):
    interleaved = True

    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        return self.attention(facts, index, bias=bool(facts.hf.get("attention_bias")))


class SeedOss(Decoder):
    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        hf = facts.hf
        return self.attention(facts, index, bias=hf.get("attention_bias", True), out_bias=bool(hf.get("attention_out_bias")))


class SmolLM3(Decoder):
    """Some layers know nothing of positions."""

    tied = True

    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        hf = facts.hf
        bias, turned = bool(hf.get("attention_bias")), hf.get("no_rope_layers")
        turns = turned[index] if turned else (index + 1) % hf.get("no_rope_layer_interval", 4)
        return self.attention(facts, index, bias=bias, out_bias=bias, **({} if turns else {"rope": None}))
