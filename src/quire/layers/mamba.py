"""Mamba's mixer: a projection, a short convolution, and a recurrence whose steps are made of its outputs."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.attn.batch import Batch
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.parameter import parameter
from quire.layers.recurrent import Recurrence, ShortConvolution, rows_of
from quire.ops.recurrent import convolve, selective_scan
from quire.types.cache import StateCache


@dataclass(frozen=True)
class MambaShape:
    inner: int
    state: int
    rank: int  # of the time steps
    width: int  # of the convolution

    @property
    def cache(self) -> StateCache:
        return StateCache((self.inner, self.width - 1), (self.inner, self.state))


class Mamba(nn.Module):
    """`norms`: of the time steps, keys and queries before they are used, with weights or without, and their epsilon."""

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
        self.core = Recurrence(shape.cache)

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
        if not self.plain:
            return part.contiguous()
        wide = part.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(part.dtype)
