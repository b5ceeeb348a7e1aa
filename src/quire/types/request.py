"""A request as the deciding half sees it: tokens, limits, and cursors.

    tokens    [ prompt .............. | sampled ........ ]   + `pending` sampled but still on the device
    computed  [ scheduled to be in the cache ......... )     an upper bound: rows in flight are counted
    known     = len(tokens) + pending - computed             what the device has not been asked to run yet

`computed` and `known` are kept, `pending` follows from them: a row of one token that is sampled after moves `computed` alone,
and a token that returns is only appended. Rows with drafts are counted as if all of these were right, until it is known how
many were: pages are allocated for that, and trimmed by what is `settled`.

There is no phase: a fresh prompt, a chunk of a long one, a resumed request and a decoding one differ only in `known`.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from quire.types.plan import Floats
from quire.types.prompts import NO_EXTRAS, Extras
from quire.types.sampling import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error", "repetition"]
Lack = Literal["grammar", "adapter"]


@dataclass(frozen=True)
class EngineRequest:
    """What the front half hands to the engine core: all text is tokens by now, all defaults are resolved.

    `fork_of` names a request with the same leading tokens, whose pages this one may share (n > 1, beam search).
    `hold` keeps the pages after the finish so that later requests can fork, until released or the room is needed.
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
    tenant: str = ""  # whose it is: slots are shared out fairly among tenants
    salt: tuple[str, ...] = ()  # adapter, media, tenant: what else the cached keys depend on
    extras: Extras = NO_EXTRAS
    fork_of: str | None = None
    hold: bool = False
    engine: int | None = None  # of several engines, the one that is to have it; None: whichever suits
    # of a request that another engine had begun:
    resumed: tuple[int, ...] = ()  # the tokens it had sampled: known, but not part of the prompt
    scored: int = 0  # the last prompt position whose logprobs were handed out

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn. A request that draws none ends with the row of its last prompt token."""
        return self.extras.pooling is None

    @property
    def forbids(self) -> bool:
        """May it forbid tokens itself, which a grammar would leave as the only ones?"""
        put_off = self.params.min_tokens > 0 and not self.stop_ids <= self.eos_ids
        return bool(self.bad_words) or self.params.allowed_token_ids is not None or put_off


@dataclass(eq=False, slots=True)
class Drafting:
    """What is expected of a request, and how that went."""

    tokens: Sequence[int] = ()  # expected behind the first `at` of its tokens
    at: int = -1
    read: int = 0  # of its tokens, by a drafter with weights
    offered: int = 0  # so many the device expects there, where it is the device that drafts
    rest: Sequence[int] = ()  # of what was expected before and has come so far: what should come next
    rows: int = 0  # that had drafts
    drafted: int = 0
    accepted: int = 0
    first: float = -1.0  # how often the first draft is right, of late; below 0 = not known
    later: float = -1.0  # and how often the next one, if all before it were


@dataclass(eq=False, slots=True)
class Request:
    """One request's mutable state; only the scheduler and the cache groups write it."""

    spec: EngineRequest
    limit: int  # never more tokens than this, prompt included
    order: int  # arrival number, breaks ties
    tokens: "array[int]"
    computed: int = 0
    known: int = field(init=False)
    loose: int = 0  # drafts in flight: of `computed`, so much may turn out to be less
    drew: bool = False  # its latest row ends in a draw, so that drafts follow
    chunks: int = 0  # rows in flight that bring no token
    fast_until: int = 0  # rows of one token up to here need no page and no thought; 0 while more than one token is known
    inspect_at: int = 0  # a new token that makes it this long may end it, fill a page, or is news beyond itself
    slot: int = -1
    pages: list[list[int]] = field(default_factory=list)  # per cache group
    covered: int = 0  # positions the pages have room for
    keys: list[bytes] = field(default_factory=list)  # content keys of the full pages known so far
    published: int = 0  # pages offered to the content index so far
    cached: int = 0  # prompt tokens found in the cache at the first admission
    scored: int = 0  # last prompt position whose logprobs were handed out
    preemptions: int = 0
    lone: bool = False  # it runs as the first of its tenant among others' requests
    admitted: int = -1  # step of the latest admission
    scheduled_at: float = 0.0  # first time in a batch, 0 = never
    finished: FinishReason | None = None
    drafting: Drafting = field(default_factory=Drafting)
    thought: bool = False  # its reasoning is known to be over; matters only if that has a budget
    lacks: set[Lack] = field(default_factory=set)  # what it waits for before it may be in the queue
    place: int = 0  # of its adapter on the device
    # where layers are recurrent:
    branch: int = 0  # positions of its tokens that others had before, as far as the latest look for a prefix found
    wanted: list[int] = field(default_factory=list)  # positions where its state is to be saved, rising
    restored: int = -1  # the snapshot that it begins from; -1 = it begins with nothing
    pooled: list[tuple[int, Floats]] = field(default_factory=list)  # position and pooled states of rows that came back
    rolling: bytes | None = None  # content key of the latest snapshot among its sampled tokens

    def __post_init__(self) -> None:
        self.known = len(self.tokens)

    @property
    def constrained(self) -> bool:
        """What it may draw is a grammar's matter."""
        return self.spec.params.structured_outputs is not None

    @property
    def pending(self) -> int:
        """Tokens that are sampled by rows in flight."""
        return self.known + self.computed - len(self.tokens)

    @property
    def rows(self) -> int:
        """Rows in flight, those with drafts counted with each of these."""
        return self.pending + self.chunks

    @property
    def settled(self) -> int:
        """The least that `computed` can turn out to be."""
        return self.computed - self.loose

    def rewind(self, computed: int) -> None:
        """Of what it has, only so much is in the cache."""
        self.known += self.computed - computed
        self.computed, self.loose = computed, 0

    def land(self, drafts: int, brought: int) -> None:
        """A row that could bring 1 + drafts tokens has brought so many. Whoever lost its slot since has been rewound."""
        missing = 1 + drafts - brought
        if self.slot < 0:
            self.known -= missing
        else:
            self.computed -= missing
            self.loose -= drafts
