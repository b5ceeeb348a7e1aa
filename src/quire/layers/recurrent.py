"""What recurrent layers have in common: a state of every sequence, and a short convolution before it."""

from collections.abc import Mapping

from torch import Tensor, nn

from quire.attn.batch import Batch
from quire.layers.claims import Claim, Claims, Take
from quire.layers.parameter import parameter
from quire.ops.arguments import StateRows
from quire.ops.recurrent import gated_norm
from quire.types.cache import StateCache
from quire.types.errors import EngineError


class Recurrence(nn.Module):
    """Owns the way to the states: an entry for every slot, and those that are kept of prefixes."""

    def __init__(self, cache: StateCache) -> None:
        super().__init__()
        self.cache = cache
        self.conv: Tensor | None = None  # [entries, channels, inputs]
        self.state: Tensor | None = None  # [entries, ...] float32

    def bind(self, conv: Tensor, state: Tensor) -> None:
        if conv.shape[1:] != self.cache.conv or state.shape[1:] != self.cache.state:
            raise EngineError(f"states of {list(conv.shape)} and {list(state.shape)} do not suit a layer of {self.cache}")
        self.conv, self.state = conv, state

    def bound(self) -> tuple[Tensor, Tensor]:
        if self.conv is None or self.state is None:
            raise EngineError("a recurrent layer was run before it was bound to its states")
        return self.conv, self.state


def rows_of(batch: Batch) -> StateRows:
    """The same for all layers of a step."""
    found = batch.plans.get(StateRows)
    if found is None:
        if batch.entries is None:
            raise EngineError("a recurrent layer was run for a batch that does not say where its states are")
        single = bool(batch.rows) and all(count == 1 for _, count, _ in batch.rows)
        known = tuple(
            (first, count, length - count, entry)
            for (first, count, length), entry in zip(batch.rows, batch.entry_list, strict=False)
        )
        found = batch.plans[StateRows] = StateRows(batch.entries, batch.row_starts, batch.kv_lengths, known, single)
    rows: StateRows = found
    return rows


class ShortConvolution(nn.Module):
    """Each channel is convolved with its own last inputs. At `path` it takes `path.weight` [channels, 1, width]; `parts`:
    names of sibling tensors in the checkpoint -> channels of each. transformers 5 saves the parts of OLMo Hybrid in equal
    shares of all channels instead, in the same order."""

    def __init__(self, channels: int, width: int, *, bias: bool, parts: Mapping[str, int] | None = None) -> None:
        super().__init__()
        self.parts = parts
        self.weight = parameter(channels, width)
        self.bias = parameter(channels) if bias else None

    def claims(self, path: str) -> Claims:
        channels, width = self.weight.shape
        taken: Claims = {}
        first, above = 0, path.rpartition(".")[0]
        parts = self.parts or {path.rpartition(".")[2]: channels}
        shares = self.weight.data.unsqueeze(1).chunk(len(parts))
        for share, (name, size) in zip(shares, parts.items(), strict=True):
            view = self.weight.data[first : first + size].unsqueeze(1)
            equal = Claim(tuple(share.shape), (Take(share),))
            taken[f"{above}.{name}.weight"] = Claim((size, 1, width), (Take(view),), equal)
            first += size
        if self.bias is not None:
            taken[f"{path}.bias"] = Claim((channels,), (Take(self.bias.data),))
        return taken


class GatedNorm(nn.Module):
    """A root-mean-square norm of each of `groups` equal parts, in float32, beside a gate that comes before it, or behind.
    `act`: of the gate, silu or sigmoid."""

    def __init__(self, size: int, eps: float, *, groups: int = 1, norm_first: bool = False, act: str = "silu") -> None:
        super().__init__()
        self.eps, self.groups, self.norm_first, self.act = eps, groups, norm_first, act
        self.weight = parameter(size)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x, gate [T, n] -> [T, n]."""
        return gated_norm(x, gate, self.weight, self.eps, self.groups, self.norm_first, self.act)
