"""Arguments of operators other than tensors, shared by callers, references and kernels."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

GROUP, CHUNK = 128, 2048  # tokens that share a maximum, and tokens that one program scans

GOOD, BROKEN, NOTHING_ALLOWED = 0, 1, 2  # what a row's logits can be

FARTHEST = 1e36  # where a penalty takes a logit at most: it can still be divided by a temperature


@dataclass(frozen=True)
class RowInputs:
    """What a model reads of R rows with T tokens."""

    ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    kv_lengths: Tensor  # [R] int32
    tables: Tensor  # [G, R, P] int32; entries beyond a row's own pages are left as they are
    write: Tensor  # [G, T] int64


@dataclass(frozen=True)
class StateRows:
    """Whose recurrent states a step's R rows go on from, and leave theirs in."""

    entries: Tensor  # [R] int64; below 0 = nobody's: nothing is read, and nothing written
    starts: Tensor  # [R + 1] int32 where rows begin among the tokens
    ends: Tensor  # [R] int32 positions; a row that begins at 0 goes on from nothing
    rows: tuple[tuple[int, int, int, int], ...]  # the same on the host: first token, count, first position, entry
    single: bool  # each of them has one token; where that is not so the host may not know them

    def begun(self, state: Tensor) -> "tuple[Tensor, Tensor, Tensor] | None":
        """Of the rows of one token, if there are any: [n] int64 which tokens they are, [n] int64 their entries of
        state [entries, ...], and [n, ...] what these hold, or nothing for who begins."""
        ones = [row for row in self.rows if row[1] == 1]
        if not ones:
            return None
        at = torch.tensor([first for first, *_ in ones], device=state.device)
        own = torch.tensor([entry for *_, entry in ones], device=state.device)
        fresh = torch.tensor([begin == 0 for _, _, begin, _ in ones], device=state.device)
        return at, own, state[own].masked_fill(fresh.view(-1, *[1] * (state.dim() - 1)), 0)


@dataclass(frozen=True)
class TimeSteps:
    """How far each head's state moves with a token: dt = softplus(raw + bias) in limits; it decays by exp(-dt e^rate_log).
    Where numbers are those of a head, they may be those of each of its keys, as operators say."""

    raw: Tensor  # [T, heads], or [T, heads, keys]
    bias: Tensor  # [heads] float32, or [heads, keys]
    rate_log: Tensor  # [heads] float32
    low: float = 0.0
    high: float = float("inf")


@dataclass(frozen=True)
class ClampedSwiglu:
    """Of a gate of at most `limit` and an up within ± limit: gate * sigmoid(alpha * gate) * (up + 1)."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class Ungated:
    """An activation by its name, of all that there is: nothing is a gate."""

    name: str


Gated = str | ClampedSwiglu  # an activation of gate and up: by its name, or that
Inner = Gated | Ungated  # what is between an expert's matrices


@dataclass(frozen=True)
class AdapterTiles:
    """Tokens by their adapters, for kernels: those of one stand together, and no tile has two adapters' tokens."""

    order: Tensor  # [T] int32 tokens
    tiles: Tensor  # [N, 3] int32 place of the adapter, first token in the order, count; 0 tokens = there is nothing to do


ADAPTER_BLOCK = 128  # outputs of a program that adds what adapters do


@dataclass(frozen=True)
class AdapterTable:
    """Where kernels find what adapters have for a layer. It stays where it is while adapters come and go."""

    # [...] int64, at place * stride + 5 * part: addresses of down [rank, inputs] and up [rank, width], the rank, addresses of
    # gain [width] and bias [width]; 0 = it has none
    entries: Tensor
    stride: int
    ranks: int  # no rank is larger
    blocks: Tensor  # [M, 4] int32: part; in units: first output, first output of the part, width of the part
    unit: int
    parts: int


class ExpertBiases(NamedTuple):
    up: Tensor  # [E, 2I] gate before up
    down: Tensor | None  # [E, H]; None = another rank adds them


@dataclass(frozen=True)
class HeadNorms:
    """Root-mean-square norms of every query head and of every key head."""

    query: Tensor  # [head_dim]
    key: Tensor  # [head_dim]
    eps: float
    offset: float  # added to both weights


@dataclass
class Rotation:
    cos: Tensor  # [max_position, rotary_dim / 2] float32
    sin: Tensor  # [max_position, rotary_dim / 2] float32
    interleaved: bool = False  # components 2i and 2i + 1 turn together; otherwise i and i + rotary_dim / 2
    _latest: tuple[Tensor, Tensor, Tensor] | None = None  # positions, and `rows` of them: the layers of a step ask for the same

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T] -> two of [T, 1, rotary_dim] float32: cosines, and sines with the sign each component takes."""
        latest = self._latest
        if latest is None or latest[0] is not positions:
            cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
            join = self._interleave if self.interleaved else torch.cat
            self._latest = latest = positions, join((cos, cos), dim=-1), join((-sin, sin), dim=-1)
        return latest[1:]

    @staticmethod
    def _interleave(two: tuple[Tensor, Tensor], dim: int) -> Tensor:
        return torch.stack(two, dim).flatten(-2)


@dataclass(frozen=True)
class DrawColumns:
    """How each slot draws. These stay where they are: recorded launches read them."""

    temperature: Tensor  # [S] float32; 0 = greedy
    top_k: Tensor  # [S] int64; the vocabulary's size = all
    top_p: Tensor  # [S] float32; 1 = all
    min_p: Tensor  # [S] float32; 0 = all
    seed: Tensor  # [S] int64


class DrawScratch:
    """Memory for one draw after the other, of at most `rows` rows."""

    def __init__(self, rows: int, vocabulary: int, device: torch.device) -> None:
        chunks, groups = -(-vocabulary // CHUNK), -(-vocabulary // GROUP)
        self.peaks, self.noisy_peaks, self.masses = torch.zeros(3, rows, chunks, dtype=torch.float32, device=device).unbind()
        self.places, self.noisy_places = torch.zeros(2, rows, chunks, dtype=torch.int32, device=device).unbind()
        self.groups = torch.zeros(rows, groups, dtype=torch.float32, device=device)
        self.members = torch.zeros(rows, groups, dtype=torch.int32, device=device)
        self.unedited = torch.full((rows,), -1, dtype=torch.int32, device=device)
        self.out = torch.zeros(2, rows, dtype=torch.int32, device=device)  # ids and faults of the latest draw


class Factors(NamedTuple):
    """How much is taken from each slot's logits."""

    repetition: Tensor  # [S] float32, of whatever is in the prompt or the output
    frequency: Tensor  # [S] float32, of the output, for each time
    presence: Tensor  # [S] float32, of the output


MOVED_ROWS, MOVED_COLUMNS = 16, 256  # of a matrix, per program that copies an uploaded adapter
SCANNED_VALUES = 8192  # per program that scans an uploaded adapter
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Moves:
    """What of an uploaded LoRA adapter is scanned and copied where, by the programs of one launch each.

    spans: [S, 2] first value and number of values of each tensor in the file
    copies: [C, 6] of each matrix: first value, rows and columns in the flat destination; first value, row stride and column
        stride in the file
    """

    spans: Integers
    copies: Integers
    device: torch.device

    @cached_property
    def looked(self) -> Tensor:
        """Return [n, 3] int64 of each scanning program: span, first value, number of values."""
        programs = -(-self.spans[:, 1] // SCANNED_VALUES)
        owner = np.repeat(np.arange(len(self.spans)), programs)
        within = SCANNED_VALUES * _counted(programs)
        first, count = self.spans[owner].T
        return self._on_device(np.stack([owner, first + within, np.minimum(count - within, SCANNED_VALUES)], 1))

    @cached_property
    def moved(self) -> Tensor:
        """Return [n, 3] int64 of each copying program: copy, first row, first column."""
        down, across = -(-self.copies[:, 1] // MOVED_ROWS), -(-self.copies[:, 2] // MOVED_COLUMNS)
        owner = np.repeat(np.arange(len(self.copies)), down * across)
        row, column = np.divmod(_counted(down * across), across[owner])
        return self._on_device(np.stack([owner, row * MOVED_ROWS, column * MOVED_COLUMNS], 1))

    @cached_property
    def table(self) -> Tensor:
        return self._on_device(self.copies)

    def _on_device(self, values: Integers) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, np.int64)).to(self.device)


def _counted(sizes: Integers) -> Integers:
    """Return 0, 1, ..., size - 1 for each of the sizes."""
    ends = np.cumsum(sizes)
    counted: Integers = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - sizes, sizes)
    return counted
