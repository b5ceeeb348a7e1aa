"""Zamba 2: Mamba 2, and before some layers one of a few shared transformer blocks. A shared block reads the residual stream
concatenated with the embedded tokens; every use of it adds its own low-rank matrices.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quire.attn.batch import Batch, Tokens
from quire.layers.attention import SelfAttention, attend_heads, take_final
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP
from quire.layers.norm import Norm
from quire.layers.parameter import Role
from quire.models.hybrid import HybridDecoder, OneMixerBlock, make_mamba2
from quire.ops.activation import gated

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts

MAMBA_NORM_EPS = 1e-5  # of Mamba's output, whatever the other norms have


class Addition(nn.Module):
    """A low-rank addition to sections of a linear layer, divided between ranks as these are."""

    def __init__(self, inputs: int, rank: int, base: Linear, section: slice = slice(None)) -> None:
        super().__init__()
        sizes, cuts = base.sections[section], base.cuts[section]
        self.down = Linear(inputs, rank)
        self.up = Linear(rank, sum(sizes), role=Role.COLUMN, sections=sizes, cuts=cuts)

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        out: Tensor = self.up(self.down(x, tokens), tokens)
        return out


class Use(nn.Module):
    """One use of a shared block: weights and norms are those of the block's first use; KV cache and low-rank additions are its
    own."""

    def __init__(
        self, norm: Norm, attention: SelfAttention, feed_norm: Norm, feed_forward: GatedMLP, rank: int, attends: bool
    ) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = norm, attention
        self.pre_ff_layernorm, self.feed_forward = feed_norm, feed_forward
        qkv, up = attention.qkv, feed_forward.gate_up

        def section(index: int) -> Addition | None:
            return Addition(qkv.all_inputs, rank, qkv, slice(index, index + 1)) if attends else None

        self.q_addition, self.k_addition, self.v_addition = section(0), section(1), section(2)
        self.up_addition = Addition(up.all_inputs, rank, up)

    def forward(self, x: Tensor, start: Tensor, batch: Batch) -> Tensor:
        """Return the output [T, H] for x [T, H] and the embedded tokens `start` [T, H]."""
        x, tokens = self.input_layernorm(torch.cat((x, start), -1)), batch.tokens
        qkv = self.self_attn.qkv(x, tokens)
        three = [part for part in (self.q_addition, self.k_addition, self.v_addition) if part is not None]
        if three:
            qkv = qkv + torch.cat([part(x, tokens) for part in three], -1)
        attended = attend_heads(self.self_attn, qkv, batch)
        x = self.pre_ff_layernorm(self.self_attn.o_proj(attended, tokens))
        mlp = self.feed_forward
        both = mlp.gate_up(x, tokens) + self.up_addition(x, tokens)
        out: Tensor = mlp.down_proj(gated(both, mlp.activation), tokens)
        return out


class SharedBlock(OneMixerBlock):
    """A Mamba layer whose input is the residual stream plus the output of a shared block."""

    def __init__(self, norm: Norm, mixer: nn.Module, use: Use, hidden_size: int) -> None:
        super().__init__(norm, mixer)
        self.use, self.linear = use, Linear(hidden_size, hidden_size)

    def forward_shared(self, x: Tensor, start: Tensor, batch: Batch) -> Tensor:
        seen = x + self.linear(self.use(x, start, batch), batch.tokens)
        out: Tensor = self.mixer(self.norm(seen), batch)
        return out


class Zamba2(HybridDecoder):
    tied = True
    renames = (
        *HybridDecoder.renames,
        (r"^final_layernorm\.", "norm."),
        (r"\.mamba_decoder\.", "."),
        (r"(layers\.\d+)\.input_layernorm\.", r"\1.norm."),
        (r"\.mamba\.", ".mixer."),
    )

    def __init__(self, facts: "ModelFacts") -> None:
        hf = facts.hf
        at = [index for index, kind in enumerate(facts.kinds) if kind == "both"]
        blocks = hf.get("num_mem_blocks") or 1
        self.first = dict[int, Use]()  # of each block
        moved: list[tuple[str, str | None]] = []
        for use, index in enumerate(at):
            owner = at[use % blocks]
            for names in (r"self_attn\.linear_([qkv])_adapter_list", r"feed_forward\.gate_(up)_proj_adapter_list"):
                for place, half in enumerate(("down", "up")):
                    pattern = rf"layers\.{owner}\.shared_transformer\.{names}\.{use}\.{place}\."
                    moved.append((pattern, rf"layers.{index}.use.\1_addition.{half}."))
            if use >= blocks:  # some files store them again
                moved.append((rf"layers\.{index}\.shared_transformer\.", None))
        shared = ((r"\.shared_transformer\.", ".use."), (r"\.gate_up_proj\.", ".gate_up."))
        self.renames = (*moved, *type(self).renames, *shared)
        super().__init__(facts)

    def run_blocks(self, x: Tensor, batch: Batch) -> Tensor:
        start, residual = x, None
        for block in self.layers:
            if isinstance(block, SharedBlock):
                residual = x if residual is None else x + residual
                x = block.forward_shared(residual, start, batch)
            else:
                x, residual = block(x, residual, batch)
        return self.norm.add(take_final(x, batch), None if residual is None else take_final(residual, batch))[0]

    def make_block(self, facts: "ModelFacts", index: int) -> nn.Module:
        norm, mixer = self.make_norm(facts), self.make_mixer(facts, index)
        if facts.kinds[index] != "both":
            return OneMixerBlock(norm, mixer)
        return SharedBlock(norm, mixer, self.make_use(facts, index), facts.hidden_size)

    def make_use(self, facts: "ModelFacts", index: int) -> Use:
        hf, among = facts.hf, sum(kind == "both" for kind in facts.kinds[:index])
        hidden, rank, bias = facts.hidden_size, hf.get("adapter_rank", 128), bool(hf.get("add_bias_linear"))
        block, attends = among % (hf.get("num_mem_blocks") or 1), bool(hf.get("use_shared_attention_adapter"))
        cache = facts.layers[among]
        rope = self.rope(facts, among) if hf.get("use_mem_rope") else None
        options: dict[str, Any] = {"rope": rope, "scale": (cache.head_dim / 2) ** -0.5}
        attention = SelfAttention(2 * hidden, hf["num_attention_heads"], cache, **options)
        first = self.first.get(block)
        if first is not None:
            attention.qkv, attention.o_proj = first.self_attn.qkv, first.self_attn.o_proj
            return Use(first.input_layernorm, attention, first.pre_ff_layernorm, first.feed_forward, rank, attends)
        out = attention.o_proj
        attention.o_proj = Linear(out.all_inputs, hidden, role=Role.ROW, cuts=out.cuts)
        mlp = GatedMLP(hidden, hf["intermediate_size"], hf["hidden_act"], bias=bias, fused=True)
        self.first[block] = use = Use(self.make_norm(facts, 2 * hidden), attention, self.make_norm(facts), mlp, rank, attends)
        return use

    def make_mixer(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        hf = facts.hf
        limits = hf.get("time_step_min", 0.001), float("inf")
        return make_mamba2(facts, MAMBA_NORM_EPS, bias=bool(hf.get("add_bias_linear")), limits=limits)
