"""Gemma 4: layers with a window have other head sizes than those without. Some layers use keys as values, some attend to the
keys and values of an earlier layer; some models have an extra input for every layer, some experts parallel to the feed-forward.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quire.attn.batch import Batch, Tokens
from quire.config.layer_patterns import key_owners
from quire.layers.attention import SelfAttention, SharedAttention, attend_heads, prepare_heads, take_final
from quire.layers.embedding import Embedding
from quire.layers.linear import Linear, MergedLinear
from quire.layers.mlp import GatedMLP
from quire.layers.moe import Experts
from quire.layers.norm import Norm, RMSNorm
from quire.layers.parameter import Role, parameter
from quire.models.gemma import Gemma2
from quire.ops.activation import activate
from quire.ops.moe import route
from quire.ops.norm import rms_norm
from quire.types.cache import LayerCache

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts


class ValuesOfKeys(SelfAttention):
    """Attention whose values are the keys before norm and RoPE."""

    def __init__(self, hidden_size: int, heads: int, cache: LayerCache, rope: Any, *, bias: bool = False, **more: Any) -> None:
        super().__init__(hidden_size, heads, cache, rope, bias=bias, **more)
        sizes = {"q_proj": heads * cache.head_dim, "k_proj": cache.kv_heads * cache.head_dim}
        cuts = self.division.cut_queries, self.division.cut_keys
        self.qkv = MergedLinear(hidden_size, sizes, bias=bias, role=Role.COLUMN, cuts=cuts)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        spec, parts = self.core.spec, self.qkv(x, batch.tokens)
        qkv = torch.cat((parts, parts[:, spec.heads * spec.head_dim :]), 1)
        attended = attend_heads(self, prepare_heads(self, qkv, batch), batch)
        out: Tensor = self.o_proj(attended, self.tokens_after(batch))
        return out


class LayerInputs(nn.Module):
    """Extra inputs of every layer: an embedding of the token plus a projection of its embedded state."""

    def __init__(self, facts: "ModelFacts", norm: Norm, size: int, layers: int) -> None:
        super().__init__()
        self.size, self.layers, self.scale = size, layers, facts.hidden_size**-0.5
        self.rows = facts.hf.get("vocab_size_per_layer_input", facts.vocab_size)
        self.embed_tokens_per_layer = Embedding(self.rows, layers * size, scale=size**0.5)
        self.per_layer_model_projection = Linear(facts.hidden_size, layers * size)
        self.per_layer_projection_norm = norm

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Return the inputs [T, layers, size] for embedded tokens x [T, H]."""
        of_states = (self.per_layer_model_projection(x, batch.tokens) * self.scale).unflatten(1, (self.layers, self.size))
        ids = batch.ids.masked_fill(batch.ids >= self.rows, 0)
        of_tokens = self.embed_tokens_per_layer(ids, batch.tokens).unflatten(1, (self.layers, self.size))  # type: ignore[no-untyped-call]
        out: Tensor = (self.per_layer_projection_norm(of_states) + of_tokens) * 2**-0.5
        return out


# renames of a decoder with LayerInputs at `inputs`
INPUT_RENAMES = ((r"^(embed_tokens_per_layer|per_layer_model_projection|per_layer_projection_norm)\.", r"inputs.\1."),)


class Gate(nn.Module):
    """Add a layer's extra input, gated by the hidden states."""

    def __init__(self, hidden_size: int, size: int, activation: str, norm: Norm) -> None:
        super().__init__()
        self.activation = activation
        self.per_layer_input_gate = Linear(hidden_size, size)
        self.per_layer_projection = Linear(size, hidden_size)
        self.post_per_layer_input_norm = norm

    def forward(self, x: Tensor, given: Tensor, tokens: Tokens) -> Tensor:
        """Return the addition [T, H] for hidden states x [T, H] and the extra input given [T, size]."""
        let_through = activate(self.per_layer_input_gate(x, tokens), self.activation) * given
        out: Tensor = self.post_per_layer_input_norm(self.per_layer_projection(let_through, tokens))
        return out


GATE_RENAMES = ((r"\.(per_layer_input_gate|per_layer_projection|post_per_layer_input_norm)\.", r".gate.\1."),)


class Gemma4Experts(nn.Module):
    """Experts parallel to a feed-forward: tokens are normalized separately for the router and for the experts."""

    def __init__(self, facts: "ModelFacts", activation: str, norms: tuple[Norm, Norm, Norm]) -> None:
        super().__init__()
        hf, size = facts.hf, facts.hidden_size
        self.top_k, self.eps = hf["top_k_experts"], hf.get("rms_norm_eps", 1e-6)
        self.post_feedforward_layernorm_1, self.pre_feedforward_layernorm_2, self.post_feedforward_layernorm_2 = norms
        self.scale, self.per_expert_scale = parameter(size), parameter(hf["num_experts"])
        self.proj = Linear(size, hf["num_experts"])
        self.experts = Experts(hf["num_experts"], size, hf["moe_intermediate_size"], activation)

    def forward(self, fed: Tensor, residual: Tensor, tokens: Tokens) -> Tensor:
        """Return the sum [T, H] of the feed-forward's output `fed` [T, H] and the experts' output."""
        router_input = rms_norm(residual, self.scale, self.eps) * residual.shape[1] ** -0.5
        weights, chosen = route(self.proj(router_input, tokens), self.top_k, True)
        weights = weights * self.per_expert_scale.float()[chosen]
        routed = self.experts(self.pre_feedforward_layernorm_2(residual), weights, chosen, tokens)
        out: Tensor = self.post_feedforward_layernorm_1(fed) + self.post_feedforward_layernorm_2(routed)
        return out


class Gemma4Block(nn.Module):
    """Gemma 4's block. x [T, H] is the residual stream. The last layer that writes keys and values returns the final tokens
    only."""

    def __init__(
        self,
        norms: tuple[Norm, Norm, Norm, Norm],
        self_attn: SelfAttention,
        mlp: nn.Module,
        moe: Gemma4Experts | None,
        gate: Gate | None,
    ) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = norms[:2]
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norms[2:]
        self.self_attn, self.mlp, self.moe, self.gate = self_attn, mlp, moe, gate
        self.layer_scalar = parameter(1)

    def forward(self, x: Tensor, given: Tensor | None, batch: Batch) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), batch)
        x = self.self_attn.select_residual(x, batch) + self.post_attention_layernorm(attended)
        tokens = self.self_attn.tokens_after(batch)
        fed = self.mlp(self.pre_feedforward_layernorm(x), tokens)
        if self.moe is not None:
            fed = self.moe(fed, x, tokens)
        x = x + self.post_feedforward_layernorm(fed)
        if self.gate is not None and given is not None:
            x = x + self.gate(x, self.self_attn.select_residual(given, batch), tokens)
        return x * self.layer_scalar


class SharingGemma(Gemma2):
    """Gemma whose last layers attend to the keys and values of other layers: they only see the batch's final tokens."""

    def __init__(self, facts: "ModelFacts") -> None:
        self.owners, self.writers = key_owners(facts.hf), len(facts.layers)
        self.written: list[SelfAttention] = []
        super().__init__(facts)
        shared = "|".join(str(index) for index, owner in enumerate(self.owners) if owner != index)
        if shared:  # some files have these weights nevertheless
            self.renames = (*self.renames, (rf"^layers\.({shared})\.self_attn\.[kv]_(proj|norm)\.", None))

    def count_blocks(self, facts: "ModelFacts") -> int:  # noqa: ARG002
        return len(self.owners)

    def make_norm(self, facts: "ModelFacts", size: int | None = None) -> Norm:
        return RMSNorm(size or facts.hidden_size, facts.hf.get("rms_norm_eps", 1e-6))

    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        owner, heads = self.owners[index], facts.hf["num_attention_heads"]
        cache, bias = facts.layers[owner], bool(facts.hf.get("attention_bias"))
        rope = self.rope(facts, owner, "full_attention" if cache.window is None else "sliding_attention")
        q_norm = RMSNorm(cache.head_dim, facts.hf.get("rms_norm_eps", 1e-6))
        options: dict[str, Any] = {"scale": 1.0, "bias": bias, "out_bias": bias}
        if owner != index:
            source = self.written[owner]
            return SharedAttention(facts.hidden_size, heads, cache, rope, source=source, norm=q_norm, **options)
        kind = ValuesOfKeys if facts.hf.get("attention_k_eq_v") and cache.window is None else SelfAttention
        made = kind(
            facts.hidden_size,
            heads,
            cache,
            rope,
            q_norm=q_norm,
            k_norm=RMSNorm(cache.head_dim, q_norm.eps),
            value_norm=q_norm.eps,
            last=index == self.writers - 1,
            **options,
        )
        self.written.append(made)
        return made

    def activation(self, facts: "ModelFacts") -> str:
        return str(facts.hf.get("hidden_activation") or "gelu_pytorch_tanh")


class Gemma4(SharingGemma):
    renames = (
        *Gemma2.renames,
        *INPUT_RENAMES,
        *GATE_RENAMES,
        (r"\.(router|experts)\.", r".moe.\1."),
        (r"\.moe\.router\.", ".moe."),
        (r"\.((pre|post)_feedforward_layernorm_[12])\.", r".moe.\1."),
    )

    def __init__(self, facts: "ModelFacts") -> None:
        super().__init__(facts)
        size = facts.hf.get("hidden_size_per_layer_input")
        self.inputs = LayerInputs(facts, self.make_norm(facts, size), size, len(self.owners)) if size else None

    def run_blocks(self, x: Tensor, batch: Batch) -> Tensor:
        given = None if self.inputs is None else self.inputs(x, batch)
        for index, block in enumerate(self.layers):
            x = block(x, None if given is None else given[:, index], batch)
            if given is not None and index == self.writers - 1:
                given = take_final(given, batch)
        return self.norm(x)

    def make_block(self, facts: "ModelFacts", index: int) -> nn.Module:
        first, second, third, fourth = (self.make_norm(facts) for _ in range(4))
        size, activation, gate, moe = facts.hf.get("hidden_size_per_layer_input"), self.activation(facts), None, None
        if size:
            gate = Gate(facts.hidden_size, size, activation, self.make_norm(facts))
        if facts.hf.get("enable_moe_block"):
            norms = (self.make_norm(facts), self.make_norm(facts), self.make_norm(facts))
            moe = Gemma4Experts(facts, activation, norms)
        attention, mlp = self.make_attention(facts, index), self.make_mlp(facts, index)
        return Gemma4Block((first, second, third, fourth), attention, mlp, moe, gate)

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:
        wide = facts.hf.get("use_double_wide_mlp") and self.owners[index] != index
        inner = facts.hf["intermediate_size"] * (2 if wide else 1)
        return GatedMLP(facts.hidden_size, inner, self.activation(facts))
