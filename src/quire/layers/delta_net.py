"""Gated delta rule: Gated DeltaNet and Kimi Delta Attention."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from quire.attn.batch import Batch
from quire.dist.mesh import HeadDivision, Position, recurrent_heads
from quire.layers.linear import KeyHeadLinear, Linear, MergedLinear
from quire.layers.parameter import CheckpointTensor, Destination, Role, WeightSlices, parameter, rows_of
from quire.layers.recurrent import GatedNorm, Mixer, ShortConvolution, state_rows
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
        state = self.heads, self.key_dim, self.value_dim
        return StateCache((2 * self.keys + self.values, self.width - 1), state, self.key_heads, 2 * self.key_dim)

    @property
    def division(self) -> HeadDivision:
        return recurrent_heads(self.heads, self.key_heads, self.value_dim)

    def share(self, position: Position) -> "DeltaShape":
        """Return the shape of a rank's heads."""
        heads, key_heads = self.division.share(position)
        return replace(self, heads=len(heads), key_heads=len(key_heads))


Stored = Literal["by head", "merged", "separate"]


class DeltaNet(Mixer):
    """Gated DeltaNet. Ranks divide the value heads; with more ranks than key heads, several have q and k of a key head.

    stored: how the checkpoint stores the projections: "by head" (q, k, v and z in one matrix, grouped by key head, and b and a
        in another), "merged" (q, k and v concatenated, the rest separate) or "separate" (all separate, the convolutions too).
    reach: factor of the delta rule's correction.
    """

    by_head = ("A_log", "dt_bias")
    fixed = frozenset(by_head)

    def __init__(self, hidden_size: int, shape: DeltaShape, eps: float, *, stored: Stored, reach: float = 1.0) -> None:
        super().__init__(shape.cache)
        self.shape, self.grouped, self.reach = shape, stored == "by head", reach
        division, sizes = shape.division, (shape.keys, shape.keys, shape.values)
        keys, values = replace(division, size=shape.key_dim).cut_keys, division.cut_queries
        heads = replace(division, size=1).cut_queries
        if self.grouped:
            each = shape.value_dim
            self.in_proj_qkvz = KeyHeadLinear(hidden_size, division, (shape.key_dim,) * 2, (each, each))
            self.in_proj_ba = KeyHeadLinear(hidden_size, division, (), (1, 1))
        else:
            three: dict[str, int | tuple[int, ...]] = {"in_proj_qkv": sizes}
            if stored == "separate":
                three = dict(zip(("in_proj_q", "in_proj_k", "in_proj_v"), sizes, strict=True))
            parts = {**three, "in_proj_z": shape.values, "in_proj_b": shape.heads, "in_proj_a": shape.heads}
            cuts = keys, keys, values, values, heads, heads
            self.in_proj = MergedLinear(hidden_size, parts, role=Role.COLUMN, cuts=cuts)
        kernels = ("q_conv1d", "k_conv1d", "v_conv1d") if stored == "separate" else None
        self.conv1d = ShortConvolution(sizes, (keys, keys, values), shape.width, bias=False, parts=kernels)
        self.A_log = parameter(shape.heads, dtype=torch.float32)
        self.dt_bias = parameter(shape.heads, dtype=torch.float32)
        self.norm = GatedNorm(division, eps, per_head=True, norm_first=True)
        self.out_proj = Linear(shape.values, hidden_size, role=Role.ROW, cuts=(values,))

    def shard_heads(self, position: Position) -> None:
        super().shard_heads(position)
        self.shape = self.shape.share(position)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, H] -> [T, H]."""
        shape, rows, count = self.shape, state_rows(batch), len(x)
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
        if not self.grouped:
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


class KimiDelta(Mixer):
    """Kimi Delta Attention: the decay per key dimension and the output gate come from low-rank projections."""

    by_head = ("A_log", "dt_bias")
    fixed = frozenset(by_head)

    def __init__(self, hidden_size: int, shape: DeltaShape, eps: float) -> None:
        super().__init__(shape.cache)
        self.shape, size, wide = shape, shape.key_dim, shape.values
        division, three = shape.division, (shape.values,) * 3
        cut, heads = division.cut_queries, replace(division, size=1).cut_queries
        parts = {"q_proj": wide, "k_proj": wide, "v_proj": wide, "f_a_proj": size, "g_a_proj": size, "b_proj": shape.heads}
        cuts = cut, cut, cut, lambda _: range(size), lambda _: range(size), heads
        self.in_proj = MergedLinear(hidden_size, parts, role=Role.COLUMN, cuts=cuts)
        self.f_b_proj = Linear(size, wide, role=Role.COLUMN, cuts=(cut,))
        self.g_b_proj = Linear(size, wide, role=Role.COLUMN, cuts=(cut,))
        kernels = ("q_conv1d", "k_conv1d", "v_conv1d")
        self.conv1d = ShortConvolution(three, (cut,) * 3, shape.width, bias=False, parts=kernels)
        self.A_log = parameter(shape.heads, dtype=torch.float32)
        self.dt_bias = parameter(shape.heads, size, dtype=torch.float32)
        self.o_norm = GatedNorm(division, eps, per_head=True, norm_first=True, act="sigmoid")
        self.o_proj = Linear(wide, hidden_size, role=Role.ROW, cuts=(cut,))

    def shard_heads(self, position: Position) -> None:
        super().shard_heads(position)
        self.shape = self.shape.share(position)

    def weight_slices(self, path: str) -> WeightSlices:
        heads, size, local = self.core.whole.units, self.shape.key_dim, self.local
        rates = Destination(self.A_log.data.view(1, 1, -1, 1), ((0, 1), (0, 1), (local.start, local.stop), (0, 1)))
        bias = self.dt_bias.data.view(-1), range(local.start * size, local.stop * size)
        return {
            f"{path}.A_log": CheckpointTensor((1, 1, heads, 1), (rates,)).simple,
            f"{path}.dt_bias": rows_of((heads * size,), [bias]),
        }

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, H] -> [T, H]."""
        shape, rows, heads = self.shape, state_rows(batch), (len(x), self.shape.heads, self.shape.key_dim)
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
