"""EAGLE-3 heads: the states of several layers of the model become one, and the first layer attends over it beside the next
token's embedding. They may have a smaller vocabulary of their own."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from quire.attn.batch import PLAIN, Batch
from quire.config.draft_heads import DraftHead
from quire.layers.linear import Linear
from quire.layers.role import Role
from quire.models.decoder import Decoder
from quire.runner.draft.eagle import layer_maker
from quire.runner.draft.head import HeadLayers


class FirstLayer(nn.Module):
    def __init__(self, head: DraftHead, maker: Decoder) -> None:
        super().__init__()
        facts = head.facts
        self.input_layernorm, self.hidden_norm = maker.make_norm(facts), maker.make_norm(facts)
        attention = maker.make_attention(replace(facts, hidden_size=2 * facts.hidden_size), 0)
        out = attention.o_proj
        attention.o_proj = Linear(out.all_inputs, facts.hidden_size, bias=out.biased, role=Role.ROW, cuts=out.cuts)
        self.self_attn = attention
        self.post_attention_layernorm, self.mlp = maker.make_norm(facts), maker.make_mlp(facts, 0)
        self.norm_before_residual = bool(facts.hf.get("norm_before_residual"))

    def forward(self, embedded: Tensor, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        normed = self.hidden_norm(hidden)
        x = self.self_attn(torch.cat((self.input_layernorm(embedded), normed), -1), batch)
        x, residual = self.post_attention_layernorm.add(x, normed if self.norm_before_residual else hidden)
        return self.mlp(x, self.self_attn.tokens_after(batch)), residual


class Eagle3Layers(HeadLayers):
    renames = (
        (r"^model\.", ""),
        (r"^(t2d|mask_hidden|rotary_emb|(midlayer|layers\.\d+)\.self_attn\.rotary_emb)", None),
        (r"^midlayer\.", "layers.0."),
    )

    def __init__(self, head: DraftHead) -> None:
        facts, hf = head.facts, head.facts.hf
        super().__init__(head, facts.hidden_size)
        maker, count = layer_maker(head), len(head.taps)
        states = int(hf.get("target_hidden_size") or facts.hidden_size)
        self.fc = Linear(count * states, facts.hidden_size, bias=head.has("fc.bias"))
        self.input_norm = maker.make_norm(facts, count * states) if head.has("input_norm.weight") else None
        each = range(count) if head.has("fc_norm.0.weight") else ()
        norms: list[Any] = [maker.make_norm(facts, states) for _ in each]
        self.fc_norm = nn.ModuleList(norms)
        more = [maker.make_block(facts, index) for index in range(1, len(facts.layers))]
        self.layers = nn.ModuleList([FirstLayer(head, maker), *more])
        self.norm = maker.make_norm(facts)
        self.norm_output = bool(hf.get("norm_output"))

    def combine(self, states: list[Tensor]) -> Tensor:
        if self.fc_norm:
            states = [norm(state) for norm, state in zip(self.fc_norm, states, strict=True)]
        x = torch.cat(states, -1)
        return self.fc(x if self.input_norm is None else self.input_norm(x), PLAIN)

    def forward(self, embedded: Tensor, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        x, residual = self.layers[0](embedded, hidden, batch)
        for block in self.layers[1:]:
            x, residual = block(x, residual, batch)
        normed, total = self.norm.add(x, residual)
        return normed, normed if self.norm_output else total
