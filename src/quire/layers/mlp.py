"""Feed-forward layers: gated, plain and sparsely gated."""

from statistics import NormalDist
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.attn.batch import Tokens
from quire.dist.collectives import Group
from quire.files.reading import shown
from quire.layers.linear import FusedLinear, Linear, MergedLinear
from quire.layers.parameter import Role
from quire.ops.activation import activate, check_activation
from quire.types.errors import ModelError


class GatedMLP(nn.Module):
    """Gated feed-forward: down(activation(gate(x)) * up(x)). `fused`: the checkpoint stores gate and up at `<path>.gate_up`."""

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        activation: str,
        *,
        bias: bool = False,
        down_bias: bool | None = None,
        fused: bool = False,
    ) -> None:
        """down_bias: None: as `bias`."""
        super().__init__()
        if type(inner_size) is not int:  # null, or a list with one size per layer: some families have that
            raise ModelError(f"intermediate_size must be a positive integer; got {shown(inner_size)}")
        self.activation = check_activation(activation)
        parts = {"gate_proj": inner_size, "up_proj": inner_size}
        self.gate_up = (FusedLinear if fused else MergedLinear)(hidden_size, parts, bias=bias, role=Role.COLUMN)
        self.down_proj = Linear(inner_size, hidden_size, bias=bias if down_bias is None else down_bias, role=Role.ROW)

    def forward(self, x: Any, tokens: Tokens) -> Tensor:
        """Return the output [..., hidden_size] of Rows x [..., hidden_size]."""
        inner = self.gate_up.gated(x, self.activation, tokens, reader=self.down_proj)
        out: Tensor = self.down_proj(inner, tokens)
        return out


class MLP(nn.Module):
    """Feed-forward without a gate: down(activation(up(x)))."""

    def __init__(
        self, hidden_size: int, inner_size: int, activation: str, *, bias: bool = True, transposed: bool = False
    ) -> None:
        super().__init__()
        self.activation = check_activation(activation)
        self.up_proj = Linear(hidden_size, inner_size, bias=bias, transposed=transposed, role=Role.COLUMN)
        self.down_proj = Linear(inner_size, hidden_size, bias=bias, transposed=transposed, role=Role.ROW)

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        out: Tensor = self.down_proj(activate(self.up_proj(x, tokens), self.activation), tokens)
        return out


class Cutoff(nn.Module):
    """Zero the gates below a cutoff: mean + z * standard deviation, where a share of a normal distribution lies below.

    Ranks that each hold some gates all-reduce their sums.
    """

    group: Group | None = None  # ranks that hold the other gates

    def __init__(self, total: int, share: float) -> None:
        super().__init__()
        self.total, self.deviations = total, NormalDist().inv_cdf(share)

    def forward(self, gates: Tensor) -> Tensor:
        if self.group is None:
            mean, deviation = gates.mean(-1, keepdim=True), gates.std(-1, keepdim=True, unbiased=False)
        else:
            wide = gates.float()
            sums = self.group.add(torch.stack((wide.sum(-1), wide.square().sum(-1)), -1)) / self.total
            mean = sums[:, :1].to(gates.dtype)
            deviation = (sums[:, 1:] - sums[:, :1].square()).clamp_(min=0.0).sqrt().to(gates.dtype)
        return F.relu(gates - (mean + deviation * self.deviations))


class SparseGatedMLP(GatedMLP):
    """Gated feed-forward with sparse gates; `share`: fraction of the gates that are zeroed."""

    def __init__(self, hidden_size: int, inner_size: int, activation: str, share: float) -> None:
        super().__init__(hidden_size, inner_size, activation)
        self.cutoff = Cutoff(inner_size, share)

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        gate, up = self.gate_up(x, tokens).chunk(2, dim=-1)
        out: Tensor = self.down_proj(activate(self.cutoff(gate), self.activation) * up, tokens)
        return out
