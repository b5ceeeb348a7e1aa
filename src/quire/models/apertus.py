"""Apertus: normalized queries and keys, and a feed-forward without a gate with a learned activation (xIELU)."""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.attn.batch import Tokens
from quire.layers.linear import Linear
from quire.layers.mlp import MLP
from quire.layers.parameter import Role, parameter
from quire.models.llama import Qwen3

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts


class LearnedActivation(nn.Module):
    """xIELU: alpha_p * x * x + beta * x for x > 0, otherwise alpha_n * (exp(x) - 1 - x) + beta * x."""

    fixed = frozenset({"alpha_p", "alpha_n", "beta", "eps"})

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p, self.alpha_n = parameter(1, dtype=torch.float32), parameter(1, dtype=torch.float32)
        self.beta, self.eps = parameter(dtype=torch.float32), parameter(dtype=torch.float32)

    def finish(self, device: torch.device) -> None:  # noqa: ARG002
        self.alpha_p.data = F.softplus(self.alpha_p.data)
        self.alpha_n.data = self.beta.data + F.softplus(self.alpha_n.data)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        below = (torch.expm1(torch.minimum(wide, self.eps)) - wide) * self.alpha_n
        return (torch.where(wide > 0, self.alpha_p * wide * wide, below) + self.beta * wide).to(x.dtype)


class LearnedMLP(nn.Module):
    """Feed-forward without a gate: down(activation(up(x)))."""

    def __init__(self, hidden_size: int, inner_size: int) -> None:
        super().__init__()
        self.up_proj = Linear(hidden_size, inner_size, role=Role.COLUMN)
        self.act_fn = LearnedActivation()
        self.down_proj = Linear(inner_size, hidden_size, role=Role.ROW)

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        out: Tensor = self.down_proj(self.act_fn(self.up_proj(x, tokens)), tokens)
        return out


class Apertus(Qwen3):
    renames = (
        *Qwen3.renames,
        (r"\.attention_layernorm\.", ".input_layernorm."),
        (r"\.feedforward_layernorm\.", ".post_attention_layernorm."),
    )

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        hf = facts.hf
        if hf["hidden_act"] != "xielu":
            return MLP(facts.hidden_size, hf["intermediate_size"], hf["hidden_act"], bias=False)
        return LearnedMLP(facts.hidden_size, hf["intermediate_size"])
