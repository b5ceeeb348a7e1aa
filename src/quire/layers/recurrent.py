"""Recurrent layers: what they share, the short convolution and lightning attention."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.attn.batch import Batch
from quire.dist.collectives import Group, join_parts
from quire.dist.mesh import ALONE, Cut, HeadDivision, Position, channels_of, recurrent_heads, share_state
from quire.layers.linear import Linear
from quire.layers.norm import WidthNorm
from quire.layers.parameter import CheckpointTensor, Role, WeightSlices, parameter, rows_of
from quire.ops.arguments import StateRows, TimeSteps
from quire.ops.recurrent import convolve, gated_norm, reference_gated_norm, ssd
from quire.types.cache import StateCache
from quire.types.errors import EngineError


class Recurrence(nn.Module):
    """The layer's recurrent states: an entry per slot, and one per snapshot of a prefix."""

    def __init__(self, cache: StateCache) -> None:
        super().__init__()
        self.cache = self.whole = cache  # cache: of this rank
        self.conv: Tensor | None = None  # [entries, channels, inputs]
        self.state: Tensor | None = None  # [entries, ...] float32

    def bind(self, conv: Tensor, state: Tensor) -> None:
        if conv.shape[1:] != self.cache.conv or state.shape[1:] != self.cache.state:
            raise EngineError(f"recurrent states must fit {self.cache}; got shapes {list(conv.shape)} and {list(state.shape)}")
        self.conv, self.state = conv, state

    def bound(self) -> tuple[Tensor, Tensor]:
        if self.conv is None or self.state is None:
            raise EngineError("a recurrent layer was run before it was bound to its states")
        return self.conv, self.state


def state_rows(batch: Batch) -> StateRows:
    """Return the rows' state entries; cached per step."""
    found = batch.plans.get(StateRows)
    if found is None:
        if batch.entries is None:
            raise EngineError("a recurrent layer requires a batch with state entries")
        single = bool(batch.rows) and all(count == 1 for _, count, _ in batch.rows)
        known = tuple(
            (first, count, length - count, entry)
            for (first, count, length), entry in zip(batch.rows, batch.entry_list, strict=False)
        )
        found = batch.plans[StateRows] = StateRows(batch.entries, batch.row_starts, batch.kv_lengths, known, single)
    rows: StateRows = found
    return rows


class Mixer(nn.Module):
    """A recurrent mixer. With several ranks each has some of its heads, or of its channels."""

    by_head: ClassVar[tuple[str, ...]] = ()  # names of parameters with a row for each head, or channel

    def __init__(self, cache: StateCache) -> None:
        super().__init__()
        self.core = Recurrence(cache)
        self.local = range(cache.units)

    def shard_heads(self, position: Position) -> None:
        """Hold only a rank's heads or channels; the layers inside are sharded separately. Before loading."""
        cache = self.core.cache
        division = recurrent_heads(cache.units, cache.keys, 1) if cache.keys else None
        self.local = channels_of(cache.units)(position) if division is None else division.cut_queries(position)
        for name in self.by_head:
            whole = getattr(self, name)
            setattr(self, name, parameter(len(self.local), *whole.shape[1:], dtype=whole.dtype))
        self.core.cache = share_state(cache, position)

    def weight_slices(self, path: str) -> WeightSlices:
        return {f"{path}.{name}": self.rows_by_head(name) for name in self.by_head}

    def rows_by_head(self, name: str) -> CheckpointTensor:
        """Return the rows of this rank's heads."""
        value = getattr(self, name).data
        return rows_of((self.core.whole.units, *value.shape[1:]), [(value, self.local)])


class ShortConvolution(nn.Module):
    """Causal depthwise convolution over each channel's last inputs. `sections` of channels, and how ranks divide each.

    The checkpoint has `path.weight` [channels, 1, width], or a sibling tensor for each section (`parts`). transformers 5 saves
    OLMo Hybrid's parts in equal shares of all channels instead, in the same order.
    """

    def __init__(
        self,
        sections: Sequence[int],
        cuts: Sequence[Cut],
        width: int,
        *,
        bias: bool,
        parts: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self.sections, self.cuts, self.width, self.parts, self.biased = tuple(sections), tuple(cuts), width, parts, bias
        self.shard([range(size) for size in self.sections])

    def shard(self, local: Sequence[range]) -> None:
        """Hold only these channels of each section. Before loading."""
        firsts = accumulate(self.sections, initial=0)
        self.local = [range(first + some.start, first + some.stop) for first, some in zip(firsts, local)]  # noqa: B905
        channels = sum(map(len, local))
        self.weight = parameter(channels, self.width)
        self.bias = parameter(channels) if self.biased else None

    def weight_slices(self, path: str) -> WeightSlices:
        channels, above, names = sum(self.sections), path.rpartition(".")[0], self.parts
        if names is None:
            taken: WeightSlices = {f"{path}.weight": self._weights(range(channels))}
        else:
            edges = [*accumulate(self.sections, initial=0)]
            equal = [*range(0, channels, -(-channels // len(names))), channels]  # as torch.chunk divides
            taken = {
                f"{above}.{name}.weight": replace(
                    self._weights(range(*edges[i : i + 2])), otherwise=self._weights(range(*equal[i : i + 2]))
                )
                for i, name in enumerate(names)
            }
        if self.bias is not None:
            taken[f"{path}.bias"] = rows_of((channels,), self._held(self.bias.data, range(channels)))
        return taken

    def _weights(self, stored: range) -> CheckpointTensor:
        """Return what this rank holds of a tensor with the weights of these channels."""
        return rows_of((len(stored), 1, self.width), self._held(self.weight.data.unsqueeze(1), stored))

    def _held(self, own: Tensor, stored: range) -> Iterator[tuple[Tensor, range]]:
        """Yield the parts of `own`, and the indices of their channels among those that are stored."""
        at = 0
        for some in self.local:
            first, last = max(some.start, stored.start), min(some.stop, stored.stop)
            if first < last:
                start = at + first - some.start
                yield own[start : start + last - first], range(first - stored.start, last - stored.start)
            at += len(some)


class GatedNorm(nn.Module):
    """RMSNorm of each part of the heads that has one key head, in float32, with a gate before or after it.

    division: heads and key heads
    per_head: normalize each head instead, all with one weight
    act: the gate's activation, silu or sigmoid

    Ranks that hold heads of the same key head all-reduce their sums of squares.
    """

    group: Group | None = None  # ranks that hold the other heads of a part

    def __init__(
        self, division: HeadDivision, eps: float, *, per_head: bool = False, norm_first: bool = False, act: str = "silu"
    ) -> None:
        super().__init__()
        self.division, self.eps, self.per_head, self.norm_first, self.act = division, eps, per_head, norm_first, act
        self.shard_heads(ALONE, None)

    def shard_heads(self, position: Position, group: Group | None) -> None:
        """Hold only a rank's heads. Before loading."""
        heads, self.keys = self.division.share(position)
        if self.per_head:
            self.groups, self.local, self.total = len(heads), range(self.division.size), self.division.size
        else:
            self.groups, self.local = len(self.keys), self.division.cut_queries(position)
            self.total = self.division.queries * self.division.size
            self.group = group if position.size > self.division.keys else None
        self.weight = parameter(len(self.local))

    def weight_slices(self, path: str) -> WeightSlices:
        return {f"{path}.weight": rows_of((self.total,), [(self.weight.data, self.local)])}

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return the gated norm [T, n] of x and gate [T, n]."""
        if self.group is None:
            return gated_norm(x, gate, self.weight, self.eps, self.groups, self.norm_first, self.act)
        return reference_gated_norm(
            x, gate, self.weight, self.eps, self.groups, self.norm_first, self.act, self._mean_square_of_ranks
        )

    def _mean_square_of_ranks(self, parts: Tensor) -> Tensor:
        assert self.group is not None
        squares = join_parts(parts.square().sum(-1), self.group, self.keys, self.division.keys)
        return squares[:, self.keys.start : self.keys.stop].unsqueeze(-1) / (self.total // self.division.keys)


class ShortConv(Mixer):
    """Gated short convolution of LFM2."""

    def __init__(self, hidden_size: int, width: int, *, bias: bool) -> None:
        super().__init__(StateCache((hidden_size, width - 1)))
        cut, three = channels_of(hidden_size), (hidden_size,) * 3
        self.in_proj = Linear(hidden_size, sum(three), bias=bias, role=Role.COLUMN, sections=three, cuts=(cut,) * 3)
        self.conv = ShortConvolution((hidden_size,), (cut,), width, bias=bias)
        self.out_proj = Linear(hidden_size, hidden_size, bias=bias, role=Role.ROW, cuts=(cut,))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, H] -> [T, H]."""
        conv, _ = self.core.bound()
        gate_in, gate_out, values = self.in_proj(x, batch.tokens).chunk(3, -1)
        mixed = convolve(gate_in * values, self.conv.weight, self.conv.bias, conv, state_rows(batch), silu=False)
        out: Tensor = self.out_proj(gate_out * mixed, batch.tokens)
        return out


class LightningAttention(Mixer):
    """Lightning attention. `depth`: position among the model's layers, 0 to 1; states of deeper layers decay more slowly."""

    def __init__(self, hidden_size: int, heads: int, head_dim: int, depth: float) -> None:
        super().__init__(StateCache(state=(heads, head_dim, head_dim), keys=heads))
        self.head_dim = head_dim
        three, division = recurrent_heads(heads, heads, 3 * head_dim), recurrent_heads(heads, heads, head_dim)
        cut = division.cut_queries
        self.qkv_proj = Linear(hidden_size, 3 * heads * head_dim, role=Role.COLUMN, cuts=(three.cut_queries,))
        self.norm = WidthNorm(division, 1e-6)
        self.output_gate = Linear(hidden_size, heads * head_dim, role=Role.COLUMN, cuts=(cut,))
        self.out_proj = Linear(heads * head_dim, hidden_size, role=Role.ROW, cuts=(cut,))
        slow = 1 - depth + 1e-5
        self.rates = [math.log(2.0 ** (-8 * (head + 1) / heads) * slow) for head in range(heads)]
        self.rate_log = self.bias = torch.empty(0)  # [heads]

    def finish(self, device: torch.device) -> None:
        rates = self.rates[self.local.start : self.local.stop]
        self.rate_log = torch.tensor(rates, dtype=torch.float32, device=device)
        self.bias = torch.zeros_like(self.rate_log)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, H] -> [T, H]."""
        _, state = self.core.bound()
        parts = F.silu(self.qkv_proj(x, batch.tokens)).view(len(x), len(self.local), 3, self.head_dim)
        query, key, value = (part.contiguous() for part in parts.unbind(2))
        steps = TimeSteps(x.new_zeros(len(x), len(self.local)), self.bias, self.rate_log, 1.0, 1.0)
        mixed = self.norm(ssd(value, steps, key, query, None, state, state_rows(batch)).flatten(1).to(x.dtype))
        out: Tensor = self.out_proj(torch.sigmoid(self.output_gate(x, batch.tokens)) * mixed, batch.tokens)
        return out
