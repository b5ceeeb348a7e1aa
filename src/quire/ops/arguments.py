"""Arguments of operators other than tensors, shared by callers, references and kernels."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

GROUP, CHUNK = 128, 2048  # tokens that share a maximum, and tokens that one program scans

GOOD, BROKEN, NOTHING_ALLOWED = 0, 1, 2  # states of a row's logits

MAX_PENALIZED_LOGIT = 1e36  # absolute; it can still be divided by a temperature


@dataclass(frozen=True)
class RowInputs:
    """Inputs of the model for R rows with T tokens."""

    ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    kv_lengths: Tensor  # [R] int32
    tables: Tensor  # [G, R, P] int32; entries beyond a row's own pages are not set
    write: Tensor  # [G, T] int64


@dataclass(frozen=True)
class StateRows:
    """The recurrent states that R rows read and write."""

    entries: Tensor  # [R] int64; negative: no state is read or written
    starts: Tensor  # [R + 1] int32 row starts among the tokens
    ends: Tensor  # [R] int32 end positions; a row that begins at 0 starts from zeros
    rows: tuple[tuple[int, int, int, int], ...]  # the same on the host: first token, token count, first position, entry
    single: bool  # every row has one token; otherwise the host may not know the rows

    def begun(self, state: Tensor) -> "tuple[Tensor, Tensor, Tensor] | None":
        """Return the one-token rows: [n] int64 token indices, [n] int64 entries of state [entries, ...], and the states [n,
        ...] (zeros for rows that begin). None: there are none.
        """
        ones = [row for row in self.rows if row[1] == 1]
        if not ones:
            return None
        at = torch.tensor([first for first, *_ in ones], device=state.device)
        own = torch.tensor([entry for *_, entry in ones], device=state.device)
        fresh = torch.tensor([begin == 0 for _, _, begin, _ in ones], device=state.device)
        return at, own, state[own].masked_fill(fresh.view(-1, *[1] * (state.dim() - 1)), 0)


@dataclass(frozen=True)
class TimeSteps:
    """Time steps of state-space models: dt = softplus(raw + bias), clamped to [low, high]; states decay by exp(-dt *
    e^rate_log).

    Values are per head, or per head and key where an operator supports it.
    """

    raw: Tensor  # [T, heads], or [T, heads, keys]
    bias: Tensor  # [heads] float32, or [heads, keys]
    rate_log: Tensor  # [heads] float32
    low: float = 0.0
    high: float = float("inf")


@dataclass(frozen=True)
class ClampedSwiglu:
    """gpt-oss's activation of a gate clamped to at most `limit` and an up clamped to ±limit: gate * sigmoid(alpha * gate) * (up
    + 1)."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class Ungated:
    """An activation without a gate, by name."""

    name: str


Gated = str | ClampedSwiglu  # activation of gate and up, by name or as an object
Inner = Gated | Ungated  # what is computed between an expert's matrices


@dataclass(frozen=True)
class AdapterTiles:
    """Tokens sorted by adapter, for kernels. A tile has tokens of one adapter only."""

    order: Tensor  # [T] int32 tokens
    tiles: Tensor  # [N, 3] int32 adapter slot, first token in the order, count; 0 tokens: nothing to do


ADAPTER_BLOCK = 128  # outputs per program that applies adapters


@dataclass(frozen=True)
class AdapterTable:
    """Addresses of all adapters' weights for a layer. Its memory is fixed while adapters come and go."""

    # [...] int64, at slot * stride + 5 * part: addresses of down [rank, inputs] and up [rank, width], the rank, addresses of
    # gain [width] and bias [width]; 0: none
    entries: Tensor
    stride: int
    ranks: int  # upper bound of ranks
    blocks: Tensor  # [M, 4] int32: part; in units: first output, first output of the part, width of the part
    unit: int
    parts: int


class ExpertBiases(NamedTuple):
    up: Tensor  # [E, 2I] gate rows first
    down: Tensor | None  # [E, H]; None: another rank adds them


@dataclass(frozen=True)
class HeadNorms:
    """RMSNorms of every query head and every key head."""

    query: Tensor  # [head_dim]
    key: Tensor  # [head_dim]
    eps: float
    offset: float  # added to both weights


@dataclass
class Rotation:
    cos: Tensor  # [max_position, rotary_dim / 2] float32
    sin: Tensor  # [max_position, rotary_dim / 2] float32
    interleaved: bool = False  # dimensions 2i and 2i + 1 rotate together; otherwise i and i + rotary_dim / 2
    _latest: tuple[Tensor, Tensor, Tensor] | None = None  # positions, and their `rows`: all layers of a step use the same

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return two [T, 1, rotary_dim] float32 for positions [T]: cosines, and sines with each dimension's sign."""
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
class SampleColumns:
    """Sampling parameters of each slot. Their memory is fixed: CUDA graphs read it."""

    temperature: Tensor  # [S] float32; 0: greedy
    top_k: Tensor  # [S] int64; the vocabulary's size: all
    top_p: Tensor  # [S] float32; 1: all
    min_p: Tensor  # [S] float32; 0: all
    seed: Tensor  # [S] int64


class SampleScratch:
    """Memory for sampling at most `rows` rows, reused by the next one."""

    def __init__(self, rows: int, vocabulary: int, device: torch.device) -> None:
        chunks, groups = -(-vocabulary // CHUNK), -(-vocabulary // GROUP)
        self.peaks, self.noisy_peaks, self.masses = torch.zeros(3, rows, chunks, dtype=torch.float32, device=device).unbind()
        self.places, self.noisy_places = torch.zeros(2, rows, chunks, dtype=torch.int32, device=device).unbind()
        self.groups = torch.zeros(rows, groups, dtype=torch.float32, device=device)
        self.members = torch.zeros(rows, groups, dtype=torch.int32, device=device)
        self.unedited = torch.full((rows,), -1, dtype=torch.int32, device=device)
        self.out = torch.zeros(2, rows, dtype=torch.int32, device=device)  # ids and faults of the latest call


class Factors(NamedTuple):
    """Penalties of each slot."""

    repetition: Tensor  # [S] float32, for tokens in the prompt or the output
    frequency: Tensor  # [S] float32, per occurrence in the output
    presence: Tensor  # [S] float32, for tokens in the output


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
