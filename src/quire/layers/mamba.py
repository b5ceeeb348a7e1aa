"""Mamba and Mamba-2 mixers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.attn.batch import Batch
from quire.dist.mesh import HeadDivision, Position, channels_of, recurrent_heads
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.parameter import Role, parameter
from quire.layers.recurrent import GatedNorm, Mixer, ShortConvolution, state_rows
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


class Mamba(Mixer):
    """Mamba 1 mixer. `norms`: RMSNorm of time steps, B and C, with or without weights; eps: its epsilon.

    Ranks divide the channels. Time steps, B and C come from all of them: their projection is all-reduced.
    """

    by_head = ("A_log", "D")
    fixed = frozenset(by_head)

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
        super().__init__(shape.cache)
        self.shape, self.eps, self.plain = shape, eps, norms == "plain"
        cut, two = channels_of(shape.inner), (shape.inner,) * 2
        self.in_proj = Linear(hidden_size, sum(two), bias=bias, role=Role.COLUMN, sections=two, cuts=(cut,) * 2)
        self.conv1d = ShortConvolution((shape.inner,), (cut,), shape.width, bias=conv_bias)
        self.x_proj = Linear(shape.inner, shape.rank + 2 * shape.state, role=Role.ROW, cuts=(cut,))
        self.dt_proj = Linear(shape.rank, shape.inner, bias=True, role=Role.COLUMN, cuts=(cut,))
        self.A_log = parameter(shape.inner, shape.state, dtype=torch.float32)
        self.D = parameter(shape.inner, dtype=torch.float32)
        self.out_proj = Linear(shape.inner, hidden_size, bias=bias, role=Role.ROW, cuts=(cut,))
        weighted = norms == "weighted"
        self.dt_layernorm = RMSNorm(shape.rank, eps) if weighted else None
        self.b_layernorm = RMSNorm(shape.state, eps) if weighted else None
        self.c_layernorm = RMSNorm(shape.state, eps) if weighted else None
        self.ones = torch.empty(0)

    def finish(self, device: torch.device) -> None:
        self.ones = torch.ones(max(self.shape.rank, self.shape.state), device=device)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, H] -> [T, H]."""
        shape, rows = self.shape, state_rows(batch)
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
        state = self.heads, self.head_dim, self.state
        return StateCache((self.channels, self.width - 1), state, self.groups, 2 * self.state)

    @property
    def division(self) -> HeadDivision:
        return recurrent_heads(self.heads, self.groups, self.head_dim)


class Mamba2(Mixer):
    """Mamba 2 mixer. Ranks divide the heads; with more ranks than groups, several have the B and C of a group.

    norm: gated norm of the output; None: the gate alone
    limits: bounds of the time steps
    multipliers: factors of the projection's parts z, x, B, C and dt
    """

    by_head = ("A_log", "dt_bias", "D")
    fixed = frozenset(by_head)

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
        super().__init__(shape.cache)
        self.shape, self.limits, self.multipliers = shape, (float(limits[0]), float(limits[1])), multipliers
        values, groups = shape.division.cut_queries, replace(shape.division, size=shape.state).cut_keys
        sections, cuts = self._sections(), (values, values, groups, groups, replace(shape.division, size=1).cut_queries)
        self.in_proj = Linear(hidden_size, sum(sections), bias=bias, role=Role.COLUMN, sections=sections, cuts=cuts)
        self.conv1d = ShortConvolution(sections[1:4], cuts[1:4], shape.width, bias=conv_bias)
        self.A_log = parameter(shape.heads, dtype=torch.float32)
        self.dt_bias = parameter(shape.heads, dtype=torch.float32)
        self.D = parameter(shape.heads, dtype=torch.float32)
        self.norm = norm
        out_bias = bias if out_bias is None else out_bias
        self.out_proj = Linear(shape.inner, hidden_size, bias=out_bias, role=Role.ROW, cuts=(values,))

    def shard_heads(self, position: Position) -> None:
        super().shard_heads(position)
        heads, groups = self.shape.division.share(position)
        self.shape = replace(self.shape, heads=len(heads), groups=len(groups))

    def _sections(self) -> tuple[int, ...]:
        """Return the sizes of z, x, B, C and dt."""
        each = self.shape.groups * self.shape.state
        return self.shape.inner, self.shape.inner, each, each, self.shape.heads

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, H] -> [T, H]."""
        shape, rows = self.shape, state_rows(batch)
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
        assert self.multipliers is not None
        both = zip(self._sections(), self.multipliers, strict=True)
        return torch.cat([parts.new_full((size,), factor) for size, factor in both])
