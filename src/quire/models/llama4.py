"""Llama 4: most layers have RoPE and attend within chunks; the others attend to everything, without RoPE, and scale queries by
position. Experts get the token multiplied by its score.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from quire.attn.batch import Batch, Tokens
from quire.layers.attention import SelfAttention, cut_rows
from quire.layers.mlp import GatedMLP
from quire.layers.moe import MoE
from quire.layers.rope import Rope
from quire.models.decoder import Decoder
from quire.ops.norm import rms_norm
from quire.ops.qkv import turn
from quire.types.cache import LayerCache

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts


class Llama4Attention(SelfAttention):
    """Attention with RoPE before weightless norms, which kernels do not fuse.

    rotation: RoPE; None: none
    norm: epsilon of the norm
    query_scale: (floor_scale, attn_scale), see `SelfAttention`
    chunk: tokens that attend to each other
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        cache: LayerCache,
        *,
        rotation: Rope | None,
        norm: float | None,
        query_scale: tuple[float, float] | None,
        chunk: int | None,
        **options: Any,
    ) -> None:
        super().__init__(hidden_size, heads, cache, None, **options)
        self.rotation, self.norm, self.query_scale, self.chunk = rotation, norm, query_scale, chunk

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        out = attend_in_chunks(self, self.qkv(x, batch.tokens), batch)
        back: Tensor = self.o_proj(out, self.tokens_after(batch))
        return back


def attend_in_chunks(attention: Llama4Attention, qkv: Tensor, batch: Batch) -> Tensor:
    """Return attention's output, as `attend_heads` does. Overridable by __torch_function__."""
    if has_torch_function_unary(qkv):
        return handle_torch_function(attend_in_chunks, (qkv,), attention, qkv, batch)
    core, backend = attention.core, attention.core.backend
    assert backend is not None
    spec, kv = core.spec, core.bound()
    heads = qkv.view(len(qkv), -1, spec.head_dim)[:, : spec.heads + spec.kv_heads]
    if attention.rotation is not None:
        table = attention.rotation.table
        turn(heads, *table.rows(batch.positions), table.interleaved)
    if attention.norm is not None:
        heads.copy_(rms_norm(heads, torch.ones_like(heads[0, 0]), attention.norm))
    if attention.query_scale is not None:
        every, weight = attention.query_scale
        sharper = torch.log1p(torch.floor((batch.positions.float() + 1.0) / every)) * weight + 1.0
        heads[:, : spec.heads].mul_(sharper[:, None, None].to(heads.dtype))
    if attention.chunk is None:
        return backend.run_heads(spec, attention.heads, qkv, kv, batch, core.group, attention.last)
    cut = cut_rows(batch, core.group, attention.chunk, kv.shape[3])
    out = backend.run_heads(spec, attention.heads, qkv, kv, cut, core.group, False)
    return attention.select_residual(out, batch)


class Llama4MoE(MoE):
    """An expert's input is the token times the sigmoid of its score."""

    def __init__(self, *args: Any, shared: nn.Module, **options: Any) -> None:
        super().__init__(*args, renormalize=False, **options)
        self.shared_expert = shared

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        scores, chosen = self.gate(x, tokens).topk(self.top_k, dim=-1)
        shares = scores.float().sigmoid()
        out: Tensor = self.shared_expert(x, tokens)
        whole = torch.ones_like(shares[:, :1])
        for i in range(self.top_k):
            out = out + self.experts((x * shares[:, i : i + 1]).to(x.dtype), whole, chosen[:, i : i + 1], tokens)
        return out


class Llama4(Decoder):
    interleaved = True
    recordable = False  # which chunks a step's rows cross is only known on the host
    renames = (*Decoder.renames, (r"\.feed_forward\.", ".mlp."), (r"\.mlp\.router\.", ".mlp.gate."))

    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        hf, cache = facts.hf, facts.layers[index]
        bias, has_rope = bool(hf.get("attention_bias")), bool(hf["no_rope_layers"][index])
        scaled = bool(hf.get("attn_temperature_tuning", True)) and not has_rope
        return Llama4Attention(
            facts.hidden_size,
            hf["num_attention_heads"],
            cache,
            rotation=self.rope(facts, index) if has_rope else None,
            norm=hf.get("rms_norm_eps", 1e-5) if has_rope and hf.get("use_qk_norm", True) else None,
            query_scale=(hf.get("floor_scale", 8192), hf.get("attn_scale", 0.1)) if scaled else None,
            chunk=cache.window,
            bias=bias,
            out_bias=bias,
            last=index == len(facts.layers) - 1,
        )

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:
        hf = facts.hf
        if index not in hf["moe_layers"]:
            return GatedMLP(facts.hidden_size, hf["intermediate_size_mlp"], hf["hidden_act"])
        return Llama4MoE(
            facts.hidden_size,
            hf["intermediate_size"],
            hf["hidden_act"],
            experts=hf["num_local_experts"],
            top_k=hf["num_experts_per_tok"],
            shared=GatedMLP(facts.hidden_size, hf["intermediate_size"], hf["hidden_act"]),
        )
