"""A request in the scheduler: tokens, limits, and cursors.

    tokens    [ prompt .............. | sampled ........ ]   + `pending` sampled but still on the device
    computed  [ scheduled to be in the cache ......... )     an upper bound: rows in flight are counted
    known     = len(tokens) + pending - computed             tokens that no plan contains yet

`computed` and `known` are stored, `pending` follows from them: a decode row moves `computed` alone,
and a token that returns is only appended. Rows with drafts are counted as if all drafts were accepted, until the result is
known: pages are allocated for that, and trimmed by what is `settled`.

There is no phase: a fresh prompt, a chunk of a long one, a resumed request and a decoding one differ only in `known`.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from quire.types.media import Mark, highest_position
from quire.types.plan import Floats
from quire.types.prompts import NO_EXTRAS, Extras
from quire.types.sampling import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error", "repetition"]
Lack = Literal["grammar", "adapter", "pages"]
Spans = tuple[tuple[int, int], ...]  # (first, end) positions, rising and disjoint


@dataclass(frozen=True)
class EngineRequest:
    """A request for the engine core: text is tokenized, and all defaults are resolved.

    `fork_of` names a request with the same leading tokens, whose pages this one may share (n > 1, beam search).
    With `hold` the pages stay after the end so that later requests can fork, until they are released or needed.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams  # max_tokens is resolved, n is 1
    seed: int
    stop_ids: frozenset[int]  # end-of-text ids and stop_token_ids that end generation
    eos_ids: frozenset[int]  # those of stop_ids that are end-of-text (reported with stop_reason None)
    arrival: float
    bad_words: tuple[tuple[int, ...], ...] = ()  # params.bad_words as token sequences
    priority: int = 0
    tenant: str = ""  # slots are shared fairly among tenants
    salt: tuple[str, ...] = ()  # adapter, tenant: what cached keys depend on besides tokens and `marks`
    extras: Extras = NO_EXTRAS
    fork_of: str | None = None
    hold: bool = False
    engine: int | None = None  # of several engines, the required one; None: any
    # of a request that is replayed after the loss of its engine:
    resumed: tuple[int, ...] = ()  # the tokens it had sampled: known, but not part of the prompt
    scored: int = 0  # the last prompt position whose logprobs were handed out

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled. A request that samples none ends with the row of its last prompt token."""
        return self.extras.pooling is None

    @property
    def marks(self) -> tuple[Mark, ...]:
        """Return what cached keys depend on from a position on."""
        return tuple((item.start, item.digest) for item in self.extras.media)

    @property
    def media_bytes(self) -> int:
        """Return the bytes of images and videos that are part of the request, not in shared memory."""
        return sum(len(array.data) for item in self.extras.media for array in item.arrays)

    @property
    def highest_position(self) -> int:
        """Return the highest rotary position of the prompt."""
        return highest_position(self.extras.media, len(self.prompt)) if self.extras.media else len(self.prompt) - 1

    @property
    def forbids(self) -> bool:
        """Return whether the request itself may forbid tokens, which can be the only ones that a grammar allows."""
        delays_end = self.params.min_tokens > 0 and not self.stop_ids <= self.eos_ids
        return bool(self.bad_words) or self.params.allowed_token_ids is not None or delays_end


@dataclass(eq=False, slots=True)
class Drafting:
    """The draft tokens of a request, and their acceptance."""

    tokens: Sequence[int] = ()  # drafts after the first `at` of its tokens
    at: int = -1
    read: int = 0  # tokens that a drafter with weights has processed
    offered: int = 0  # drafts that the device has after those, if it drafts
    rest: Sequence[int] = ()  # the rest of earlier drafts that were right so far
    rows: int = 0  # with drafts
    drafted: int = 0
    accepted: int = 0
    first: float = -1.0  # recent acceptance rate of the first draft; below 0: unknown
    later: float = -1.0  # and of the next one, if all before it were accepted


@dataclass(eq=False, slots=True)
class Request:
    """One request's mutable state; only the scheduler and the cache groups write it."""

    spec: EngineRequest
    limit: int  # never more tokens than this, prompt included
    order: int  # arrival number, breaks ties
    tokens: "array[int]"
    computed: int = 0
    known: int = field(init=False)
    unverified: int = 0  # drafts in flight, by which `computed` may turn out to be too large
    sampled: bool = False  # its latest row samples, so that drafts can follow
    chunks: int = 0  # rows in flight that sample no token
    fast_until: int = 0  # decode rows up to here need no page and no check; 0 while more than one token is known
    inspect_at: int = 0  # at this length a new token may end the request or fill a page
    slot: int = -1
    pages: list[list[int]] = field(default_factory=list)  # per cache group
    covered: int = 0  # positions that the pages have space for
    keys: list[bytes] = field(default_factory=list)  # content keys of the full pages known so far
    published: int = 0  # pages offered to the content index so far
    cached: int = 0  # prompt tokens found in the cache at the first admission
    scored: int = 0  # last prompt position whose logprobs were handed out
    preemptions: int = 0
    leads_tenant: bool = False  # it joined the running requests as the only one of its tenant
    admitted: int = -1  # step of the latest admission
    scheduled_at: float = 0.0  # first time in a batch, 0 = never
    finished: FinishReason | None = None
    drafting: Drafting = field(default_factory=Drafting)
    reasoning_ended: bool = False  # its reasoning is over; used only with a reasoning budget
    lacks: set[Lack] = field(default_factory=set)  # what it needs before it may enter the queue
    adapter_slot: int = 0  # of its adapter on the device
    # of models with recurrent layers:
    branch: int = 0  # length of the prefix that other requests had, at the latest search
    save_at: list[int] = field(default_factory=list)  # positions where its state is saved, rising
    restored: int = -1  # the snapshot that it begins from; -1: none
    pooled: list[tuple[int, Floats]] = field(default_factory=list)  # (position, pooled states) of committed rows
    rolling: bytes | None = None  # content key of the latest snapshot among its sampled tokens
    # of prompts with images or videos:
    marks: tuple[Mark, ...] = field(init=False)
    media_end: int = field(init=False)  # position after the last embedding of an encoder
    spans: Spans = ()  # of its prompt; no row ends inside one

    def __post_init__(self) -> None:
        self.known, media = len(self.tokens), self.spec.extras.media
        self.marks = self.spec.marks
        self.media_end = media[-1].last if media else 0

    @property
    def constrained(self) -> bool:
        """Return whether a grammar restricts its tokens."""
        return self.spec.params.structured_outputs is not None

    @property
    def pending(self) -> int:
        """Return the number of tokens sampled by rows in flight."""
        return self.known + self.computed - len(self.tokens)

    @property
    def rows(self) -> int:
        """Return the rows in flight; each draft counts as a row."""
        return self.pending + self.chunks

    @property
    def settled(self) -> int:
        """Return the minimum that `computed` can turn out to be."""
        return self.computed - self.unverified

    @property
    def shares(self) -> bool:
        """Return whether requests with the same beginning have the same keys. Not if all of its prompt is one span."""
        return not self.spans or self.spans[0] != (0, len(self.spec.prompt))

    def reach(self, position: int) -> int:
        """Return the end of the shortest row that may begin at a position."""
        return next((end for first, end in self.spans if first <= position < end), position + 1)

    def before_span(self, position: int) -> int:
        """Return the first position of the span that a position divides, or the position itself."""
        return next((first for first, end in self.spans if first < position < end), position)

    def whole_pages(self, tokens: int, page_size: int) -> int:
        """Return the largest multiple of the page size, up to `tokens`, that divides no span."""
        pages = tokens // page_size
        while (first := self.before_span(pages * page_size)) != pages * page_size:
            pages = first // page_size
        return pages * page_size

    def rewind(self, computed: int) -> None:
        """Set the number of tokens that are in the cache."""
        self.known += self.computed - computed
        self.computed, self.unverified = computed, 0

    def land(self, drafts: int, tokens: int) -> None:
        """Record the tokens of a row with drafts, at most 1 + drafts. A request that lost its slot has been rewound."""
        missing = 1 + drafts - tokens
        if self.slot < 0:
            self.known -= missing
        else:
            self.computed -= missing
            self.unverified -= drafts
