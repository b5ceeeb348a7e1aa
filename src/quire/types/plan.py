"""StepPlan and StepResult, the only values that pass between the scheduler and the runner.

Request ids stay on the scheduler's side; the device knows slots. Arrays are numpy so that a plan can be sent as bytes.
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
NO_LONGS: Longs = np.empty(0, np.int64)
MAX_LIST_ROWS = 8  # up to which lists are faster than arrays


def _none() -> Ints:
    return NOTHING


def spans(first: npt.NDArray[np.integer], lengths: npt.NDArray[np.integer]) -> Ints:
    """Return the concatenation of lengths[i] integers from first[i] on: [7, 2], [1, 3] -> [7, 2, 3, 4]."""
    if len(lengths) <= MAX_LIST_ROWS:
        each = zip(first.tolist(), lengths.tolist(), strict=True)
        return np.array([begin + i for begin, length in each for i in range(length)], np.int32)
    begins = np.cumsum(lengths) - lengths
    values: Ints = (np.arange(int(lengths.sum())) + np.repeat(first - begins, lengths)).astype(np.int32)
    return values


@dataclass(frozen=True)
class Admission:
    """A request enters a slot with all tokens known so far, of which the first `start` are already in the cache."""

    slot: int
    tokens: Ints  # [known]
    prompt_length: int
    start: int
    params: SamplingParams
    seed: int  # 64 bits, resolved: never None on the device
    stop_ids: tuple[int, ...]  # suppressed until min_tokens are generated
    bad_words: tuple[tuple[int, ...], ...]  # token sequences that must not be completed
    extras: Extras = NO_EXTRAS

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled."""
        return self.extras.pooling is None


@dataclass(frozen=True)
class Outputs:
    """Tokens of a step whose logits or states are needed: indices among all tokens of the step, rising."""

    sample_after: Ints  # [samples] after which a token is sampled; of a row with drafts, its last known token and each draft
    prompt_logprobs: Ints = field(default_factory=_none)  # logprobs of the prompt token that follows
    pool: Ints = field(default_factory=_none)  # the hidden state itself, for pooling

    @classmethod
    def last(cls, count: npt.NDArray[np.integer], samples: npt.NDArray[np.integer]) -> "Outputs":
        """Return samples after the last samples[r] tokens of each row, and nothing else."""
        return cls(spans(np.cumsum(count) - samples, samples))


@dataclass(frozen=True, eq=False)
class RowShapes:
    """Lengths and outputs of rows, without their slots.

    Most steps have the shapes of the step before, so plans share the object, and derived arrays are computed once.
    """

    count: Ints  # [rows]
    drafts: Ints  # [rows] drafts among those tokens, the last ones
    outputs: Outputs

    @cached_property
    def tokens(self) -> int:
        return int(self.count.sum())

    @cached_property
    def drafted(self) -> int:
        """Return the number of all drafts."""
        return int(self.drafts.sum())

    @cached_property
    def each(self) -> list[tuple[bool, int]]:
        """[rows] (samples, drafts) as a list, which is faster than arrays in loops."""
        return list(zip(self.sample.tolist(), self.drafts.tolist(), strict=True))

    @cached_property
    def draft_positions(self) -> tuple[Longs, Longs]:
        """[drafted] the row of each draft, and its offset from that row's end, below 0."""
        row = np.arange(len(self.drafts)).repeat(self.drafts)
        return row, spans(-self.drafts, self.drafts).astype(np.int64)

    def rows_of(self, tokens: Ints) -> Ints:
        """Return the rows of these tokens of the step."""
        if self.tokens == len(self.count):  # a pure decode step
            return tokens
        return np.searchsorted(np.cumsum(self.count), tokens, side="right").astype(np.int32)

    @cached_property
    def sample_row(self) -> Ints:
        """[samples] the row of each sample."""
        return self.rows_of(self.outputs.sample_after)

    @cached_property
    def first_sample(self) -> Ints:
        """[rows] index of the row's first sample."""
        samples = np.where(self.sample, 1 + self.drafts, 0)
        first: Ints = samples.cumsum(dtype=np.int32) - samples.astype(np.int32)
        return first

    @cached_property
    def all_sample(self) -> bool:
        return bool(self.sample.all())

    @cached_property
    def sample(self) -> Bools:
        """[rows] whether the row samples."""
        if len(self.outputs.sample_after) == self.tokens:  # most steps: every token is sampled after
            return np.ones(len(self.count), np.bool_)
        sample = np.zeros(len(self.count), np.bool_)
        sample[self.sample_row] = True
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
    def sample_row(self) -> Ints:
        return self.shapes.sample_row

    @property
    def sample(self) -> Bools:
        return self.shapes.sample


class StepPlan(StepRows, frozen=True, eq=False, dict=True):
    """One step: admitted and retired slots, changes of page tables, and the rows. A plan that only moves pages has no rows.

    Order of effects on the device: retire, admit, given tokens, tables, stores, fetches, copies, states that are loaded,
    embeddings that are forgotten, items that are encoded, then the rows, then states that are saved. Recurrent states are in
    entries: those of the slots first, then snapshots of prefixes.

    The device keeps the embeddings of encoded images and videos by their digest; `encode` and `forget` are all that changes
    this cache. A row may have tokens of an item only if the item's embeddings are in it.

    A row is "`count` more tokens of `slot`", of which the last `drafts` are draft tokens of host or device. A row that
    reaches the last known token samples there, and after every draft. Drafts that equal the sampled tokens are accepted, up to
    the first that does not; so a row yields 1 to 1 + drafts tokens, and the device knows first where the next row begins. `end`
    is the maximum.

    Samples of `masked` rows are restricted by masks. Masks depend on tokens of the previous step, so they are
    not part of the plan: the step starts without them, and samples when it gets them.
    """

    step: int
    retired: Ints = NOTHING  # [retired] slots whose request left
    admitted: tuple[Admission, ...] = ()
    # page-table entries to write: table[group][slot, index] = page
    entry_group: Ints = NOTHING  # [entries]
    entry_slot: Ints = NOTHING  # [entries]
    entry_index: Ints = NOTHING  # [entries]
    entry_page: Ints = NOTHING  # [entries]
    # pages to duplicate before anything is written in this step (copy on write)
    copy_from: Ints = NOTHING  # [copies]
    copy_to: Ints = NOTHING  # [copies]
    masked: Ints = NOTHING  # [masked] indices among the samples, rising
    # tokens that were not sampled: tokens[slot, position] = token, in order, each after the slot's last
    given_slot: Ints = NOTHING  # [given]
    given_position: Ints = NOTHING  # [given]
    given_token: Ints = NOTHING  # [given]
    # [sum of drafts] drafts of the host, row by row; empty: the device drafts
    draft_token: Ints = NOTHING
    load_entry: Ints = NOTHING  # [loads] state[load_slot] = state[load_entry]
    load_slot: Ints = NOTHING  # [loads]
    save_slot: Ints = NOTHING  # [saves] state[save_entry] = state[save_slot], after the rows
    save_entry: Ints = NOTHING  # [saves]
    guesses: Ints = NOTHING  # [rows] tokens that a drafter with weights drafts after each row
    forget: tuple[str, ...] = ()  # digests whose embeddings leave the encoder cache, if they are in it
    encode: tuple[tuple[int, int], ...] = ()  # (slot, index in `Extras.media` of its request), in the order of rows
    # moves of pages between the device and records of the host tier; nothing reads a page before its fetch is reported.
    # A snapshot of recurrent states is written ~entry (below 0), once for each of its records, in order
    store_page: Ints = NOTHING  # [stores] record[store_record] = page[store_page], before anything is written in this step
    store_record: Ints = NOTHING  # [stores]
    store_tag: Longs = NO_LONGS  # [stores] of the page's key
    fetch_record: Ints = NOTHING  # [fetches] page[fetch_page] = record[fetch_record], after the stores
    fetch_page: Ints = NOTHING  # [fetches]
    fetch_tag: Longs = NO_LONGS  # [fetches] of the key that the record must have

    @cached_property
    def next_drafts(self) -> int:
        """Return the maximum of `guesses`."""
        return int(self.guesses.max(initial=0))


@dataclass(frozen=True)
class TopLogprobs:
    """For each position: column 0 is the chosen token, the others the most likely ones in falling order."""

    ids: Ints  # [positions, 1 + k]
    values: Floats  # [positions, 1 + k]
    rank: Ints  # [positions] 1-based rank of the chosen token


class StepResult(msgspec.Struct, frozen=True, eq=False):
    """The result of a step. `lengths[i]`: tokens of row i: 0 for a chunk, usually 1, up to 1 + drafts."""

    step: int
    lengths: Ints  # [rows]
    ids: Ints  # [sum of lengths] row by row
    logprobs: dict[int, TopLogprobs] = {}  # row -> logprobs of its tokens
    prompt_logprobs: dict[int, TopLogprobs] = {}  # row -> logprobs of the requested prompt tokens
    pooled: dict[int, Floats] = {}  # row -> [n, size] pooled states of its tokens, when complete
    drafts: dict[int, Ints] = {}  # masked row -> the device's drafts after its tokens
    failed: dict[int, str] = {}  # row -> error after its tokens; the other rows are valid


MAX_GRAPH_TOKENS = 2048  # larger steps hide the launch of kernels one by one
TOKEN_BUCKETS = (16, 32, *range(64, 1024, 64), *range(1024, MAX_GRAPH_TOKENS + 1, 256))


def recorded_width(tokens: int) -> int:
    """Return the recorded size that runs this many tokens."""
    return next((width for width in TOKEN_BUCKETS if width >= tokens), tokens)
