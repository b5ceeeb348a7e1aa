"""Mamba 2's mixer: one projection, a short convolution, the recurrence, a gated norm."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.attn.batch import Batch
from quire.layers.linear import Linear
from quire.layers.parameter import parameter
from quire.layers.recurrent import GatedNorm, Recurrence, ShortConvolution, rows_of
from quire.ops.arguments import TimeSteps
from quire.ops.recurrent import convolve, ssd
from quire.types.cache import StateCache


@dataclass(frozen=True)
class Mamba2Shape:
    heads: int
    head_dim: int
    groups: int
    state: int
    width: int  # of the convolution

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        return self.inner + 2 * self.groups * self.state

    @property
    def cache(self) -> StateCache:
        return StateCache((self.channels, self.width - 1), (self.heads, self.head_dim, self.state))


class Mamba2(nn.Module):
    """`norm`: of what comes out, beside its gate; None = the gate alone. `limits`: of the time steps. `multipliers`: of the
    projection's parts z, x, B, C and dt."""

    fixed = frozenset({"A_log", "dt_bias", "D"})

    def __init__(
        self,
        hidden_size: int,
        shape: Mamba2Shape,
        norm: GatedNorm | None,
        *,
        bias: bool = False,
        out_bias: bool | None = None,
        conv_bias: bool = True,
        limits: Sequence[float] = (0.0, float("inf")),
        multipliers: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        self.shape, self.limits, self.multipliers = shape, (float(limits[0]), float(limits[1])), multipliers
        self.in_proj = Linear(hidden_size, shape.inner + shape.channels + shape.heads, bias=bias)
        self.conv1d = ShortConvolution(shape.channels, shape.width, bias=conv_bias)
        self.A_log = parameter(shape.heads, dtype=torch.float32)
        self.dt_bias = parameter(shape.heads, dtype=torch.float32)
        self.D = parameter(shape.heads, dtype=torch.float32)
        self.norm = norm
        self.out_proj = Linear(shape.inner, hidden_size, bias=bias if out_bias is None else out_bias)
        self.core = Recurrence(shape.cache)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, H] -> [T, H]."""
        shape, rows = self.shape, rows_of(batch)
        conv, state = self.core.bound()
        parts = self.in_proj(x, batch.tokens)
        sizes = [shape.inner, shape.channels, shape.heads]
        if self.multipliers is not None:
            parts = parts * self._scales(parts)
        gate, mixed, dt = torch.split(parts, sizes, -1)
        mixed = convolve(mixed, self.conv1d.weight, self.conv1d.bias, conv, rows, silu=True)
        each = shape.groups * shape.state
        values, key, query = torch.split(mixed, [shape.inner, each, each], -1)
        out = ssd(
            values.view(len(x), shape.heads, shape.head_dim),
            TimeSteps(dt, self.dt_bias, self.A_log, *self.limits),
            key.view(len(x), shape.groups, shape.state),
            query.view(len(x), shape.groups, shape.state),
            self.D,
            state,
            rows,
        ).flatten(1)
        mixed = (out * F.silu(gate.float())).to(x.dtype) if self.norm is None else self.norm(out, gate)
        final: Tensor = self.out_proj(mixed, batch.tokens)
        return final

    def _scales(self, parts: Tensor) -> Tensor:
        shape, each = self.shape, self.shape.groups * self.shape.state
        assert self.multipliers is not None
        sizes = (shape.inner, shape.inner, each, each, shape.heads)
        return torch.cat([parts.new_full((size,), factor) for size, factor in zip(sizes, self.multipliers, strict=True)])
