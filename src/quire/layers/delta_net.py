"""Gated delta rule: Gated DeltaNet and Kimi Delta Attention."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from quire.attn.batch import Batch
from quire.layers.linear import Linear, MergedLinear
from quire.layers.parameter import CheckpointTensor, Destination, WeightSlices, parameter
from quire.layers.recurrent import GatedNorm, Recurrence, ShortConvolution, rows_of
from quire.ops.arguments import TimeSteps
from quire.ops.recurrent import convolve, delta_rule
from quire.types.cache import StateCache


@dataclass(frozen=True)
class DeltaShape:
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    width: int  # kernel width of the convolution

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.heads * self.value_dim

    @property
    def cache(self) -> StateCache:
        return StateCache((2 * self.keys + self.values, self.width - 1), (self.heads, self.key_dim, self.value_dim))


Stored = Literal["by head", "merged", "separate"]


class DeltaNet(nn.Module):
    """Gated DeltaNet.

    stored: how the checkpoint stores the projections: "by head" (q, k, v and z in one matrix, grouped by key head, and b and a
        in another), "merged" (q, k and v concatenated, the rest separate) or "separate" (all separate, the convolutions too).
    reach: factor of the delta rule's correction.
    """

    fixed = frozenset({"A_log", "dt_bias"})

    def __init__(self, hidden_size: int, shape: DeltaShape, eps: float, *, stored: Stored, reach: float = 1.0) -> None:
        super().__init__()
        self.shape, self.by_head, self.reach = shape, stored == "by head", reach
        kernels: dict[str, int] | None = None
        if stored == "by head":
            self.in_proj_qkvz = Linear(hidden_size, 2 * shape.keys + 2 * shape.values)
            self.in_proj_ba = Linear(hidden_size, 2 * shape.heads)
        else:
            three = {"in_proj_qkv": 2 * shape.keys + shape.values}
            if stored == "separate":
                three = {"in_proj_q": shape.keys, "in_proj_k": shape.keys, "in_proj_v": shape.values}
                kernels = {"q_conv1d": shape.keys, "k_conv1d": shape.keys, "v_conv1d": shape.values}
            parts = {**three, "in_proj_z": shape.values, "in_proj_b": shape.heads, "in_proj_a": shape.heads}
            self.in_proj = MergedLinear(hidden_size, parts)
        self.conv1d = ShortConvolution(2 * shape.keys + shape.values, shape.width, bias=False, parts=kernels)
        self.A_log = parameter(shape.heads, dtype=torch.float32)
        self.dt_bias = parameter(shape.heads, dtype=torch.float32)
        self.norm = GatedNorm(shape.value_dim, eps, groups=shape.heads, norm_first=True)
        self.out_proj = Linear(shape.values, hidden_size)
        self.core = Recurrence(shape.cache)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, H] -> [T, H]."""
        shape, rows, count = self.shape, rows_of(batch), len(x)
        conv, state = self.core.bound()
        mixed, gate, beta, steps = self._project(x, batch)
        mixed = convolve(mixed, self.conv1d.weight, None, conv, rows, silu=True)
        query, key, value = torch.split(mixed, [shape.keys, shape.keys, shape.values], -1)
        out = delta_rule(
            query.view(count, shape.key_heads, shape.key_dim),
            key.view(count, shape.key_heads, shape.key_dim),
            value.view(count, shape.heads, shape.value_dim),
            TimeSteps(steps, self.dt_bias, self.A_log),
            beta,
            state,
            rows,
            self.reach,
        )
        final: Tensor = self.out_proj(self.norm(out.flatten(1), gate), batch.tokens)
        return final

    def _project(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q, k and v concatenated; z; b; a."""
        shape = self.shape
        if not self.by_head:
            sizes = [2 * shape.keys + shape.values, shape.values, shape.heads, shape.heads]
            mixed, gate, beta, steps = torch.split(self.in_proj(x, batch.tokens), sizes, -1)
            return mixed, gate, beta, steps
        each = shape.heads // shape.key_heads
        wide = each * shape.value_dim
        parts = self.in_proj_qkvz(x, batch.tokens).view(len(x), shape.key_heads, -1)
        *three, gate = torch.split(parts, [shape.key_dim, shape.key_dim, wide, wide], -1)
        beta, steps = self.in_proj_ba(x, batch.tokens).view(len(x), shape.key_heads, 2, each).unbind(2)
        mixed = torch.cat([part.flatten(1) for part in three], -1)
        return mixed, gate.flatten(1), beta.flatten(1), steps.flatten(1)


class KimiDelta(nn.Module):
    """Kimi Delta Attention: the decay per key dimension and the output gate come from low-rank projections."""

    fixed = frozenset({"A_log", "dt_bias"})

    def __init__(self, hidden_size: int, shape: DeltaShape, eps: float) -> None:
        super().__init__()
        self.shape, size, wide = shape, shape.key_dim, shape.values
        parts = {"q_proj": wide, "k_proj": wide, "v_proj": wide, "f_a_proj": size, "g_a_proj": size, "b_proj": shape.heads}
        self.in_proj = MergedLinear(hidden_size, parts)
        self.f_b_proj = Linear(size, wide)
        self.g_b_proj = Linear(size, wide)
        kernels = {"q_conv1d": wide, "k_conv1d": wide, "v_conv1d": wide}
        self.conv1d = ShortConvolution(3 * wide, shape.width, bias=False, parts=kernels)
        self.A_log = parameter(shape.heads, dtype=torch.float32)
        self.dt_bias = parameter(shape.heads, size, dtype=torch.float32)
        self.o_norm = GatedNorm(size, eps, groups=shape.heads, norm_first=True, act="sigmoid")
        self.o_proj = Linear(wide, hidden_size)
        self.core = Recurrence(shape.cache)

    def weight_slices(self, path: str) -> WeightSlices:
        heads = self.shape.heads
        return {
            f"{path}.A_log": CheckpointTensor((1, 1, heads, 1), (Destination(self.A_log.data.view(1, 1, -1, 1)),)),
            f"{path}.dt_bias": CheckpointTensor((self.shape.values,), (Destination(self.dt_bias.data.view(-1)),)),
        }

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, H] -> [T, H]."""
        shape, rows, heads = self.shape, rows_of(batch), (len(x), self.shape.heads, self.shape.key_dim)
        conv, state = self.core.bound()
        sizes = [3 * shape.values, shape.key_dim, shape.key_dim, shape.heads]
        mixed, steps, gate, beta = torch.split(self.in_proj(x, batch.tokens), sizes, -1)
        mixed = convolve(mixed, self.conv1d.weight, None, conv, rows, silu=True)
        query, key, value = (part.view(heads) for part in mixed.chunk(3, -1))
        raw = self.f_b_proj(steps.contiguous(), batch.tokens).view(heads)
        out = delta_rule(query, key, value, TimeSteps(raw, self.dt_bias, self.A_log), beta, state, rows)
        opened = self.g_b_proj(gate.contiguous(), batch.tokens)
        final: Tensor = self.o_proj(self.o_norm(out.flatten(1), opened), batch.tokens)
        return final
