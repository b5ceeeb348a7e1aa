"""The bridge: the only two values that cross between the deciding half and the executing half.

Request ids stay on the deciding side; the device knows slots. Arrays are numpy so that a plan can be sent as bytes.
"""

from dataclasses import dataclass, field
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt

from quire.types.prompts import NO_EXTRAS, Extras
from quire.types.sampling import SamplingParams

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]


NOTHING: Ints = np.empty(0, np.int32)
FEW = 8  # for which lists are quicker than arrays


def _none() -> Ints:
    return NOTHING


def spans(first: npt.NDArray[np.integer], lengths: npt.NDArray[np.integer]) -> Ints:
    """lengths[i] integers from first[i] on, end to end: [7, 2], [1, 3] -> [7, 2, 3, 4]."""
    if len(lengths) <= FEW:
        each = zip(first.tolist(), lengths.tolist(), strict=True)
        return np.array([begin + i for begin, length in each for i in range(length)], np.int32)
    begins = np.cumsum(lengths) - lengths
    values: Ints = (np.arange(int(lengths.sum())) + np.repeat(first - begins, lengths)).astype(np.int32)
    return values


@dataclass(frozen=True)
class Admission:
    """A slot gets a new tenant: all tokens known so far, of which the first `start` are already in the cache."""

    slot: int
    tokens: Ints  # [known]
    prompt_length: int
    start: int
    params: SamplingParams
    seed: int  # 64 bits, resolved: never None on the device
    stop_ids: tuple[int, ...]  # suppressed until min_tokens are out
    bad_words: tuple[tuple[int, ...], ...]  # token sequences that must not be completed
    extras: Extras = NO_EXTRAS


@dataclass(frozen=True)
class Outputs:
    """Those of a step's tokens that something is wanted of, by what it is: indices among all tokens of the step, rising."""

    draw: Ints  # [draws] the next token is drawn; of a row with drafts, behind its last known token and behind each draft
    prompt_logprobs: Ints = field(default_factory=_none)  # logprobs of the prompt token that follows
    pool: Ints = field(default_factory=_none)  # the hidden state itself, for pooling

    @classmethod
    def last(cls, count: npt.NDArray[np.integer], draws: npt.NDArray[np.integer]) -> "Outputs":
        """Draws behind the last draws[r] tokens of each row, and nothing else."""
        return cls(spans(np.cumsum(count) - draws, draws))


@dataclass(frozen=True, eq=False)
class RowShapes:
    """How long rows are and what is wanted of them, whosever they are. Most steps have the shapes of the step before, so plans
    share them: what follows from them is worked out once, and found by what they are (`is`)."""

    count: Ints  # [rows]
    drafts: Ints  # [rows] of those tokens, the last
    outputs: Outputs

    @cached_property
    def tokens(self) -> int:
        return int(self.count.sum())

    @cached_property
    def drafted(self) -> int:
        """All drafts together."""
        return int(self.drafts.sum())

    @cached_property
    def each(self) -> list[tuple[bool, int]]:
        """[rows] does it draw, and its drafts; for loops, in which numbers are quicker than arrays."""
        return list(zip(self.sample.tolist(), self.drafts.tolist(), strict=True))

    @cached_property
    def draft_places(self) -> tuple[Longs, Longs]:
        """[drafted] the row of each draft, and where it is behind that row's end: a number below 0."""
        row = np.arange(len(self.drafts)).repeat(self.drafts)
        return row, spans(-self.drafts, self.drafts).astype(np.int64)

    def rows_of(self, tokens: Ints) -> Ints:
        """The rows to which these of the step's tokens belong."""
        if self.tokens == len(self.count):  # most steps: the rows have one token each
            return tokens
        return np.searchsorted(np.cumsum(self.count), tokens, side="right").astype(np.int32)

    @cached_property
    def draw_row(self) -> Ints:
        """[draws] the row of each draw."""
        return self.rows_of(self.outputs.draw)

    @cached_property
    def first_draw(self) -> Ints:
        """[rows] where their draws begin."""
        draws = np.where(self.sample, 1 + self.drafts, 0)
        first: Ints = draws.cumsum(dtype=np.int32) - draws.astype(np.int32)
        return first

    @cached_property
    def all_draw(self) -> bool:
        return bool(self.sample.all())

    @cached_property
    def sample(self) -> Bools:
        """[rows] which of them draw."""
        if len(self.outputs.draw) == self.tokens:  # most steps: something is drawn behind every token
            return np.ones(len(self.count), np.bool_)
        sample = np.zeros(len(self.count), np.bool_)
        sample[self.draw_row] = True
        return sample


class StepRows(msgspec.Struct, frozen=True, eq=False):
    """The ragged batch to run."""

    slot: Ints  # [rows]
    end: Ints  # [rows] position after the row's last token, at most: its key length
    shapes: RowShapes

    @property
    def count(self) -> Ints:
        return self.shapes.count

    @property
    def drafts(self) -> Ints:
        return self.shapes.drafts

    @property
    def outputs(self) -> Outputs:
        return self.shapes.outputs

    @property
    def tokens(self) -> int:
        return self.shapes.tokens

    @property
    def draw_row(self) -> Ints:
        return self.shapes.draw_row

    @property
    def sample(self) -> Bools:
        return self.shapes.sample


class StepPlan(StepRows, frozen=True, eq=False, dict=True):
    """One step: who came and went, which pages changed hands, and the rows.

    Order of effects on the device: retire, admit, given tokens, tables, copies, states that are loaded, then the rows, then
    states that are saved. Recurrent states lie in entries: those of the slots first, snapshots of prefixes behind them.

    A row is "`count` more tokens of `slot`", of which the last `drafts` are what host or device expects to come. A row that
    reaches the last known token draws: there, and behind every draft. The drafts that were drawn are accepted, up to the first
    that was not; so a row brings 1 to 1 + drafts tokens, and where the next row begins is known to the device first. `end` is
    what it is at most.

    Of the draws, those `masked` are restricted to what a mask allows. Masks depend on tokens of the step before, so they are
    not part of the plan: the step is started without them, and draws when it gets them.
    """

    step: int
    retired: Ints = NOTHING  # [retired] slots whose tenant left
    admitted: tuple[Admission, ...] = ()
    # page-table entries to write: table[group][slot, index] = page
    entry_group: Ints = NOTHING  # [entries]
    entry_slot: Ints = NOTHING  # [entries]
    entry_index: Ints = NOTHING  # [entries]
    entry_page: Ints = NOTHING  # [entries]
    # pages to duplicate before anything is written in this step (copy on write)
    copy_from: Ints = NOTHING  # [copies]
    copy_to: Ints = NOTHING  # [copies]
    masked: Ints = NOTHING  # [masked] indices among the draws, rising
    # tokens that were not drawn: tokens[slot, position] = token, in order, each after the slot's last
    given_slot: Ints = NOTHING  # [given]
    given_position: Ints = NOTHING  # [given]
    given_token: Ints = NOTHING  # [given]
    # [sum of drafts] where the host expects them, row by row; none = the device does
    draft_token: Ints = NOTHING
    load_entry: Ints = NOTHING  # [loads] state[load_slot] = state[load_entry]
    load_slot: Ints = NOTHING  # [loads]
    save_slot: Ints = NOTHING  # [saves] state[save_entry] = state[save_slot], behind the rows
    save_entry: Ints = NOTHING  # [saves]
    guesses: Ints = NOTHING  # [rows] tokens that a drafter with weights guesses behind the draws of each

    @cached_property
    def ahead(self) -> int:
        """The most of them."""
        return int(self.guesses.max(initial=0))


@dataclass(frozen=True)
class TopLogprobs:
    """For each position: column 0 is the chosen token, the others the most likely ones in falling order."""

    ids: Ints  # [positions, 1 + k]
    values: Floats  # [positions, 1 + k]
    rank: Ints  # [positions] 1-based rank of the chosen token


class StepResult(msgspec.Struct, frozen=True, eq=False):
    """`lengths[i]` tokens came of row i: none of a chunk, one of most rows, up to 1 + drafts of a row with drafts."""

    step: int
    lengths: Ints  # [rows]
    ids: Ints  # [sum of lengths] row by row
    logprobs: dict[int, TopLogprobs] = {}  # row -> of its tokens
    prompt_logprobs: dict[int, TopLogprobs] = {}  # row -> of the prompt tokens that were asked for
    pooled: dict[int, Floats] = {}  # row -> [n, size] what was pooled of its tokens, if that is complete
    drafts: dict[int, Ints] = {}  # row with masked draws -> what the device expects behind its tokens
    failed: dict[int, str] = {}  # row -> why, behind the tokens it brought; the other rows are good


MOST_ROWS = 512  # requests in a recorded step
MOST_TOKENS = 2048  # more keep the device busy while they are launched one by one
TOKEN_BUCKETS = (16, 32, *range(64, 1024, 64), *range(1024, MOST_TOKENS + 1, 256))


def recorded_width(tokens: int) -> int:
    """Return the recorded size that runs this many tokens."""
    return next((width for width in TOKEN_BUCKETS if width >= tokens), tokens)
