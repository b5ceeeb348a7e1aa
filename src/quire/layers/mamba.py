"""Mamba and Mamba-2 mixers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.attn.batch import Batch
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.parameter import parameter
from quire.layers.recurrent import GatedNorm, Recurrence, ShortConvolution, rows_of
from quire.ops.arguments import TimeSteps
from quire.ops.norm import rms_norm
from quire.ops.recurrent import convolve, selective_scan, ssd
from quire.types.cache import StateCache


@dataclass(frozen=True)
class MambaShape:
    inner: int
    state: int
    rank: int  # of the time steps' projection
    width: int  # kernel width of the convolution

    @property
    def cache(self) -> StateCache:
        return StateCache((self.inner, self.width - 1), (self.inner, self.state))


class Mamba(nn.Module):
    """Mamba 1 mixer. `norms`: RMSNorm of time steps, B and C, with or without weights; eps: its epsilon."""

    fixed = frozenset({"A_log", "D"})

    def __init__(
        self,
        hidden_size: int,
        shape: MambaShape,
        *,
        bias: bool,
        conv_bias: bool,
        norms: Literal["weighted", "plain"] | None = None,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.shape, self.eps, self.plain = shape, eps, norms == "plain"
        self.in_proj = Linear(hidden_size, 2 * shape.inner, bias=bias)
        self.conv1d = ShortConvolution(shape.inner, shape.width, bias=conv_bias)
        self.x_proj = Linear(shape.inner, shape.rank + 2 * shape.state)
        self.dt_proj = Linear(shape.rank, shape.inner, bias=True)
        self.A_log = parameter(shape.inner, shape.state, dtype=torch.float32)
        self.D = parameter(shape.inner, dtype=torch.float32)
        self.out_proj = Linear(shape.inner, hidden_size, bias=bias)
        weighted = norms == "weighted"
        self.dt_layernorm = RMSNorm(shape.rank, eps) if weighted else None
        self.b_layernorm = RMSNorm(shape.state, eps) if weighted else None
        self.c_layernorm = RMSNorm(shape.state, eps) if weighted else None
        self.ones = torch.empty(0)
        self.core = Recurrence(shape.cache)

    def finish(self, device: torch.device) -> None:
        self.ones = torch.ones(max(self.shape.rank, self.shape.state), device=device)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, H] -> [T, H]."""
        shape, rows = self.shape, rows_of(batch)
        conv, state = self.core.bound()
        mixed, gate = self.in_proj(x, batch.tokens).chunk(2, -1)
        mixed = convolve(mixed, self.conv1d.weight, self.conv1d.bias, conv, rows, silu=True)
        parts = torch.split(self.x_proj(mixed, batch.tokens), [shape.rank, shape.state, shape.state], -1)
        norms = (self.dt_layernorm, self.b_layernorm, self.c_layernorm)
        steps, key, query = (self._normed(part, norm) for part, norm in zip(parts, norms, strict=True))
        dt = F.softplus(self.dt_proj(steps, batch.tokens).float())
        out = selective_scan(mixed.float(), dt, -torch.exp(self.A_log), key.float(), query.float(), self.D, state, rows)
        final: Tensor = self.out_proj((out * F.silu(gate.float())).to(x.dtype), batch.tokens)
        return final

    def _normed(self, part: Tensor, norm: RMSNorm | None) -> Tensor:
        if norm is not None:
            normed: Tensor = norm(part.contiguous())
            return normed
        part = part.contiguous()
        return rms_norm(part, self.ones[: part.shape[1]], self.eps) if self.plain else part


@dataclass(frozen=True)
class Mamba2Shape:
    heads: int
    head_dim: int
    groups: int
    state: int
    width: int  # kernel width of the convolution

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
    """Mamba 2 mixer.

    norm: gated norm of the output; None: the gate alone
    limits: bounds of the time steps
    multipliers: factors of the projection's parts z, x, B, C and dt
    """

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
