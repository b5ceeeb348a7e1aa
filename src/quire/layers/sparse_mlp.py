"""A gated feed-forward most of whose gates are closed."""

from statistics import NormalDist

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.attn.batch import Tokens
from quire.dist.collectives import Group
from quire.layers.mlp import GatedMLP
from quire.ops.activation import activate


class Cutoff(nn.Module):
    """Of each token's gates the part that would lie highest if they were normally distributed: what they have above the cutoff.
    Ranks that have some gates each add up their sums."""

    group: Group | None = None  # of those ranks

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
    """`share`: of the gates, that are closed."""

    def __init__(self, hidden_size: int, inner_size: int, activation: str, share: float) -> None:
        super().__init__(hidden_size, inner_size, activation)
        self.cutoff = Cutoff(inner_size, share)

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        gate, up = self.gate_up(x, tokens).chunk(2, dim=-1)
        out: Tensor = self.down_proj(activate(self.cutoff(gate), self.activation) * up, tokens)
        return out
