"""Norms: RMSNorm, LayerNorm, and norms of the queries and keys of all heads."""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.dist.collectives import Group
from quire.dist.mesh import HeadDivision, Position
from quire.files.reading import shown
from quire.layers.parameter import WeightSlices, parameter, rows_of
from quire.ops.norm import add_rms_norm, rms_norm, rounded_norm
from quire.ops.quantized_layouts import RoundedRows, Rounding
from quire.types.errors import ModelError


class Norm(Protocol):
    def __call__(self, x: Tensor) -> Tensor: ...

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the norm of x + residual, and that sum; residual None: x is the sum."""
        ...


def check_epsilon(value: float) -> float:
    """Return a norm's epsilon from the configuration, or raise ModelError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ModelError(f"the epsilon of norms must be at least 0 and below 1; got {shown(value)}")
    return float(value)


class RMSNorm(nn.Module):
    """RMSNorm. `offset` is added to the stored weight."""

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.eps, self.offset = check_epsilon(eps), offset
        self.weight = parameter(size)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.offset)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:
            return self(x), x
        return add_rms_norm(x, residual, self.weight, self.eps, self.offset)

    def add_rounded(self, x: Tensor, residual: Tensor | None, rounding: Rounding) -> tuple[RoundedRows, Tensor]:
        """Return the same as `add`, with the norm quantized as its only reader would do it."""
        return rounded_norm(x, residual, self.weight, self.eps, self.offset, rounding)


class LayerNorm(nn.Module):
    """LayerNorm. `offset` is added to the weight at load."""

    def __init__(self, size: int, eps: float, bias: bool = True, weight: bool = True, offset: float = 0.0) -> None:
        super().__init__()
        self.size, self.eps, self.offset = size, check_epsilon(eps), offset
        self.weight = parameter(size) if weight else None
        self.bias = parameter(size) if bias else None

    def finish(self, device: torch.device) -> None:  # noqa: ARG002
        if self.weight is not None and self.offset:
            self.weight.data += self.offset

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.size,), self.weight, self.bias, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        total = x if residual is None else x + residual
        return self(total), total


class NoNorm(nn.Module):
    """No norm; the residual connection remains."""

    def forward(self, x: Tensor) -> Tensor:
        return x

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        total = x if residual is None else x + residual
        return total, total


class WidthNorm(RMSNorm):
    """RMSNorm over all heads of a token. Ranks that each hold some heads all-reduce their sums of squares."""

    group: Group | None = None  # ranks that hold the other heads

    def __init__(self, division: HeadDivision, eps: float) -> None:
        super().__init__(division.queries * division.size, eps)
        self.division, self.local = division, range(division.queries * division.size)

    def shard_heads(self, position: Position, group: Group) -> None:
        """Hold only a rank's heads. Before loading."""
        self.local, self.group = self.division.cut_queries(position), group
        self.weight = parameter(len(self.local))

    def weight_slices(self, path: str) -> WeightSlices:
        return {f"{path}.weight": rows_of((self.division.queries * self.division.size,), [(self.weight.data, self.local)])}

    def forward(self, x: Tensor) -> Tensor:
        if self.group is None:
            return super().forward(x)
        wide = x.float()
        mean = self.group.add(wide.square().sum(-1, keepdim=True)) / (self.division.queries * self.division.size)
        return (wide * (mean + self.eps).rsqrt() * self.weight.float()).to(x.dtype)


class WidthNorms(nn.Module):
    """RMSNorms over all queries and over all keys of a token. At `a.width_norms` they load `a.q_norm.weight` and
    `a.k_norm.weight`.

    Ranks that each hold some heads all-reduce their sums of squares.
    """

    group: Group | None = None  # ranks that hold the other heads
    holders = 1  # ranks that hold the same key heads

    def __init__(self, division: HeadDivision, eps: float) -> None:
        super().__init__()
        self.division, self.eps = division, check_epsilon(eps)
        self.shard_heads(range(division.queries), range(division.keys))

    def shard_heads(self, queries: range, keys: range) -> None:
        """Hold only these heads. Before loading."""
        self.local = queries, keys
        self.query = parameter(len(queries) * self.division.size)
        self.key = parameter(len(keys) * self.division.size)

    def weight_slices(self, path: str) -> WeightSlices:
        taken: WeightSlices = {}
        above = path.rpartition(".")[0]
        whole = self.division.queries, self.division.keys
        for name, weight, heads, some in zip("qk", (self.query, self.key), whole, self.local, strict=True):
            rows = range(some.start * self.division.size, some.stop * self.division.size)
            taken[f"{above}.{name}_norm.weight"] = rows_of((heads * self.division.size,), [(weight.data, rows)])
        return taken

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return normalized query [T, heads * head_dim] and key [T, kv_heads * head_dim] of this rank."""
        if self.group is None:
            return rms_norm(query, self.query, self.eps), rms_norm(key, self.key, self.eps)
        wide = query.float(), key.float()
        shares = self.division.queries, self.division.keys * self.holders
        parts = [x.square().sum(-1) / (heads * self.division.size) for x, heads in zip(wide, shares, strict=True)]
        mean = self.group.add(torch.stack(parts, dim=-1))  # [T, 2]
        factors = (mean + self.eps).rsqrt().unsqueeze(-1).unbind(1)  # each [T, 1]
        normed = [x * factor * weight.float() for x, factor, weight in zip(wide, factors, (self.query, self.key), strict=True)]
        return normed[0].to(query.dtype), normed[1].to(key.dtype)


class HeadLayerNorm(nn.Module):
    """LayerNorm of each head. `own`: each head has its own weight; `separate`: each weight is its own checkpoint tensor."""

    def __init__(
        self, heads: int, size: int, eps: float, *, own: bool = False, separate: bool = False, bias: bool = False
    ) -> None:
        super().__init__()
        self.heads, self.size, self.eps, self.own, self.separate = heads, size, check_epsilon(eps), own, separate
        self.bias = parameter(size) if bias else None
        self.shard_heads(range(heads))

    def shard_heads(self, heads: range) -> None:
        """Hold only these heads. Before loading."""
        self.local = heads
        self.weight = parameter(len(heads), self.size) if self.own else parameter(self.size)

    def weight_slices(self, path: str) -> WeightSlices:
        if not self.own:
            shared = {"weight": self.weight, "bias": self.bias}
            return {
                f"{path}.{n}": rows_of((self.size,), [(p.data, range(self.size))]) for n, p in shared.items() if p is not None
            }
        if not self.separate:
            return {f"{path}.weight": rows_of((self.heads, self.size), [(self.weight.data, self.local)])}
        taken: WeightSlices = {f"{path}.norms.{head}.weight": None for head in range(self.heads)}
        for row, head in zip(self.weight.data, self.local, strict=True):
            taken[f"{path}.norms.{head}.weight"] = rows_of((self.size,), [(row, range(self.size))])
        return taken

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized heads x [T, heads, size]."""
        if self.own:
            return F.layer_norm(x, (self.size,), None, None, self.eps) * self.weight
        return F.layer_norm(x, (self.size,), self.weight, self.bias, self.eps)
