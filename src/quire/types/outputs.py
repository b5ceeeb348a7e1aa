"""What comes back: token deltas from the engine core, and the answers users hold in their hands."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import msgspec

from quire.types.plan import Floats, TopLogprobs
from quire.types.request import FinishReason


class TokenDelta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Output of one request in one step. The last one carries `finish_reason`.

    Fields after `pooled` may be 0 (None) except in the first and last delta and after a preemption.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop token id, when one of stop_token_ids ended it
    error: str | None = None  # set exactly when finish_reason is "error"
    logprobs: tuple[TopLogprobs, ...] = ()  # one per token id, when asked for
    prompt_logprobs: tuple[TopLogprobs, ...] = ()  # chunks in order, when asked for
    pooled: Floats | None = None  # of a pooling request, with its end: [1, size], or [tokens, size] if each token has values
    # not in every delta:
    cached_tokens: int = 0
    scheduled_at: float = 0.0
    preemptions: int = 0
    drafts: tuple[int, int, int] | None = None  # rows that had any, drafts, and those that were right, so far


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]


class FlatLogprobs(Sequence[TokenLogprobs | None]):
    """Logprobs of many positions in five flat lists (SamplingParams.flat_logprobs): far fewer objects for long outputs.

    Reads like the list of dicts it replaces. Position i owns entries start_indices[i]:end_indices[i].
    """

    def __init__(self) -> None:
        self.start_indices: list[int] = []
        self.end_indices: list[int] = []
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.ranks: list[int | None] = []
        self.decoded_tokens: list[str | None] = []

    def append(self, position: TokenLogprobs | None) -> None:
        self.start_indices.append(len(self.token_ids))
        for token, entry in (position or {}).items():
            self.token_ids.append(token)
            self.logprobs.append(entry.logprob)
            self.ranks.append(entry.rank)
            self.decoded_tokens.append(entry.decoded_token)
        self.end_indices.append(len(self.token_ids))

    def extend(self, positions: "Iterable[TokenLogprobs | None]") -> None:
        if not isinstance(positions, FlatLogprobs):
            for position in positions:
                self.append(position)
            return
        first = len(self.token_ids)
        self.start_indices += [first + start for start in positions.start_indices]
        self.end_indices += [first + end for end in positions.end_indices]
        self.token_ids += positions.token_ids
        self.logprobs += positions.logprobs
        self.ranks += positions.ranks
        self.decoded_tokens += positions.decoded_tokens

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs | None: ...

    @overload
    def __getitem__(self, index: slice) -> "FlatLogprobs": ...

    def __getitem__(self, index: int | slice) -> "TokenLogprobs | FlatLogprobs | None":
        if isinstance(index, slice):
            return self._part(*index.indices(len(self)))
        lo, hi = self.start_indices[index], self.end_indices[index]
        if lo == hi:
            return None
        return {self.token_ids[i]: Logprob(self.logprobs[i], self.ranks[i], self.decoded_tokens[i]) for i in range(lo, hi)}

    def _part(self, start: int, stop: int, step: int) -> "FlatLogprobs":
        part = FlatLogprobs()
        if step != 1 or start >= stop:
            for i in range(start, stop, step):
                part.append(self[i])
            return part
        low, high = self.start_indices[start], self.end_indices[stop - 1]
        part.start_indices = [i - low for i in self.start_indices[start:stop]]
        part.end_indices = [i - low for i in self.end_indices[start:stop]]
        part.token_ids, part.logprobs = self.token_ids[low:high], self.logprobs[low:high]
        part.ranks, part.decoded_tokens = self.ranks[low:high], self.decoded_tokens[low:high]
        return part


@dataclass
class RequestMetrics:
    """Times are seconds of time.monotonic(), except `arrival_time`, which is wall clock."""

    arrival_time: float
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    finished_ts: float = 0.0
    first_token_latency: float = 0.0
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    num_spec_steps: int = 0  # steps in which it had drafts
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0


@dataclass
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Sequence[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    lora_request: Any = None
    error: str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: Sequence[TokenLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    lora_request: Any = None
    num_cached_tokens: int = 0
    num_cache_creation_tokens: int = 0
    pooled: Floats | None = None  # of a pooling request: [1, size], or [tokens, size] if each token has values


@dataclass
class BeamSearchSequence:
    """One beam: `tokens` includes the prompt."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass
class BeamSearchOutput:
    """Beams in falling score order."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)
