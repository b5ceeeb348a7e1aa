"""Recurrent layers: what they share, the short convolution and lightning attention."""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.attn.batch import Batch
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.parameter import CheckpointTensor, Destination, WeightSlices, parameter
from quire.ops.arguments import StateRows, TimeSteps
from quire.ops.recurrent import convolve, gated_norm, ssd
from quire.types.cache import StateCache
from quire.types.errors import EngineError


class Recurrence(nn.Module):
    """The layer's recurrent states: an entry per slot, and one per snapshot of a prefix."""

    def __init__(self, cache: StateCache) -> None:
        super().__init__()
        self.cache = cache
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


def rows_of(batch: Batch) -> StateRows:
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


class ShortConvolution(nn.Module):
    """Causal depthwise convolution over each channel's last inputs.

    The checkpoint has `path.weight` [channels, 1, width], or sibling tensors `parts` (name: channels). transformers 5 saves
    OLMo Hybrid's parts in equal shares of all channels instead, in the same order.
    """

    def __init__(self, channels: int, width: int, *, bias: bool, parts: Mapping[str, int] | None = None) -> None:
        super().__init__()
        self.parts = parts
        self.weight = parameter(channels, width)
        self.bias = parameter(channels) if bias else None

    def weight_slices(self, path: str) -> WeightSlices:
        channels, width = self.weight.shape
        taken: WeightSlices = {}
        first, above = 0, path.rpartition(".")[0]
        parts = self.parts or {path.rpartition(".")[2]: channels}
        shares = self.weight.data.unsqueeze(1).chunk(len(parts))
        for share, (name, size) in zip(shares, parts.items(), strict=True):
            view = self.weight.data[first : first + size].unsqueeze(1)
            equal = CheckpointTensor(tuple(share.shape), (Destination(share),))
            taken[f"{above}.{name}.weight"] = CheckpointTensor((size, 1, width), (Destination(view),), equal)
            first += size
        if self.bias is not None:
            taken[f"{path}.bias"] = CheckpointTensor((channels,), (Destination(self.bias.data),))
        return taken


class GatedNorm(nn.Module):
    """RMSNorm of each of `groups` equal parts, in float32, with a gate before or after it. `act`: the gate's activation, silu
    or sigmoid.
    """

    def __init__(self, size: int, eps: float, *, groups: int = 1, norm_first: bool = False, act: str = "silu") -> None:
        super().__init__()
        self.eps, self.groups, self.norm_first, self.act = eps, groups, norm_first, act
        self.weight = parameter(size)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return the gated norm [T, n] of x and gate [T, n]."""
        return gated_norm(x, gate, self.weight, self.eps, self.groups, self.norm_first, self.act)


class ShortConv(nn.Module):
    """Gated short convolution of LFM2."""

    def __init__(self, hidden_size: int, width: int, *, bias: bool) -> None:
        super().__init__()
        self.in_proj = Linear(hidden_size, 3 * hidden_size, bias=bias)
        self.conv = ShortConvolution(hidden_size, width, bias=bias)
        self.out_proj = Linear(hidden_size, hidden_size, bias=bias)
        self.core = Recurrence(StateCache((hidden_size, width - 1)))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, H] -> [T, H]."""
        conv, _ = self.core.bound()
        gate_in, gate_out, values = self.in_proj(x, batch.tokens).chunk(3, -1)
        mixed = convolve(gate_in * values, self.conv.weight, self.conv.bias, conv, rows_of(batch), silu=False)
        out: Tensor = self.out_proj(gate_out * mixed, batch.tokens)
        return out


class LightningAttention(nn.Module):
    """Lightning attention. `depth`: position among the model's layers, 0 to 1; states of deeper layers decay more slowly."""

    def __init__(self, hidden_size: int, heads: int, head_dim: int, depth: float) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.qkv_proj = Linear(hidden_size, 3 * heads * head_dim)
        self.norm = RMSNorm(heads * head_dim, 1e-6)
        self.output_gate = Linear(hidden_size, heads * head_dim)
        self.out_proj = Linear(heads * head_dim, hidden_size)
        self.core = Recurrence(StateCache(state=(heads, head_dim, head_dim)))
        slow = 1 - depth + 1e-5
        self.rates = [math.log(2.0 ** (-8 * (head + 1) / heads) * slow) for head in range(heads)]
        self.rate_log = self.bias = torch.empty(0)  # [heads]

    def finish(self, device: torch.device) -> None:
        self.rate_log = torch.tensor(self.rates, dtype=torch.float32, device=device)
        self.bias = torch.zeros_like(self.rate_log)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, H] -> [T, H]."""
        _, state = self.core.bound()
        parts = F.silu(self.qkv_proj(x, batch.tokens)).view(len(x), self.heads, 3, self.head_dim)
        query, key, value = (part.contiguous() for part in parts.unbind(2))
        steps = TimeSteps(x.new_zeros(len(x), self.heads), self.bias, self.rate_log, 1.0, 1.0)
        mixed = self.norm(ssd(value, steps, key, query, None, state, rows_of(batch)).flatten(1).to(x.dtype))
        out: Tensor = self.out_proj(torch.sigmoid(self.output_gate(x, batch.tokens)) * mixed, batch.tokens)
        return out
