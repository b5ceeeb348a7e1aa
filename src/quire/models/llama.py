"""Llama and the families that differ from it by a bias, a norm, a merged matrix or experts in every block."""

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from quire.attn.batch import Batch
from quire.files.reading import shown
from quire.layers.attention import SelfAttention
from quire.layers.mlp import MLP, GatedMLP
from quire.layers.moe import MoE
from quire.layers.norm import LayerNorm, Norm
from quire.models.decoder import Decoder
from quire.types.errors import ModelError

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts


class Llama(Decoder):
    """Llama and Mistral: a layer's sliding window is a property of its cache."""

    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        bias = bool(facts.hf.get("attention_bias"))
        return self.attention(facts, index, bias=bias, out_bias=bias)


class Qwen2(Decoder):
    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        return self.attention(facts, index, bias=True)


class MiMo(Qwen2):
    """MiMo. Its additional layers are draft layers."""

    renames = (*Qwen2.renames, (r"^mtp_layers\.", None))


class Ministral3(Llama):
    """Ministral 3: queries are scaled up beyond the context length of pre-training."""

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
        bias, rope_layers = bool(hf.get("attention_bias")), hf.get("no_rope_layers")
        has_rope = rope_layers[index] if rope_layers else (index + 1) % hf.get("no_rope_layer_interval", 4)
        return self.attention(facts, index, bias=bias, out_bias=bias, **({} if has_rope else {"rope": None}))


class Solar(Llama):
    """Solar Pro: Llama with skip connections.

    The input of the layers in `bskcn_1` and `bskcn_2` is saved. The input of the layers in `bskcn_3` and `bskcn_4` is mixed
    with the latest saved one; the second value of `bskcn_tv` is the share of the saved one (the first is for training).
    """

    def __init__(self, facts: "ModelFacts") -> None:
        super().__init__(facts)
        places = [facts.hf[f"bskcn_{number}"] for number in (1, 2, 3, 4)]
        for number, layers in enumerate(places, 1):
            if not isinstance(layers, list) or not all(layer in range(len(facts.layers)) for layer in layers):
                raise ModelError(f"bskcn_{number} must be a list of layers; got {shown(layers)}")
        for saved, mixed in ((0, 2), (1, 3)):
            if places[mixed] and (not places[saved] or min(places[saved]) > min(places[mixed])):
                raise ModelError(f"bskcn_{mixed + 1} must not start before bskcn_{saved + 1}")
        self.skips = tuple((frozenset(places[saved]), frozenset(places[mixed])) for saved, mixed in ((0, 2), (1, 3)))
        self.share = float(facts.hf["bskcn_tv"][1])

    def run_blocks(self, x: Tensor, batch: Batch) -> Tensor:
        residual: Tensor | None = None
        saved: list[Tensor] = [x, x]
        for index, block in enumerate(self.layers):
            for number, (saving, _) in enumerate(self.skips):
                if index in saving:
                    saved[number] = x if residual is None else x + residual
            for number, (_, mixing) in enumerate(self.skips):
                if index in mixing:
                    now = x if residual is None else x + residual
                    x, residual = saved[number] * self.share + now * (1.0 - self.share), None
            x, residual = block(x, residual, batch)
        return self.norm.add(x, residual)[0]


def local_experts(kind: type[nn.Module], facts: "ModelFacts", **more: Any) -> nn.Module:
    """Return experts with sizes as in Mixtral's configuration; more: further arguments of `kind`."""
    hf = facts.hf
    sizes = {"experts": hf["num_local_experts"], "top_k": hf["num_experts_per_tok"]}
    return kind(facts.hidden_size, hf["intermediate_size"], hf["hidden_act"], **sizes, **more)


class Mixtral(Decoder):
    renames = (
        *Decoder.renames,
        (r"\.block_sparse_moe\.", ".mlp."),
        (r"\.w1\.", ".gate_proj."),
        (r"\.w2\.", ".down_proj."),
        (r"\.w3\.", ".up_proj."),
    )

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        return local_experts(MoE, facts, renormalize=True)


class Qwen3MoE(Qwen3):
    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:
        hf = facts.hf
        experts = hf["num_local_experts"] if "num_local_experts" in hf else hf["num_experts"]
        every = hf.get("decoder_sparse_step", 1)
        if index in (hf.get("mlp_only_layers") or ()) or not experts or (index + 1) % every:
            return super().make_mlp(facts, index)
        return MoE(
            facts.hidden_size,
            hf["moe_intermediate_size"],
            hf["hidden_act"],
            experts=experts,
            top_k=hf["num_experts_per_tok"],
            renormalize=bool(hf.get("norm_topk_prob")),
        )
