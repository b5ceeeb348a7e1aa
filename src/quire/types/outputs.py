"""What comes back: token deltas from the engine core, and the answers users hold in their hands."""

from dataclasses import dataclass, field
from typing import Any

from quire.types.plan import TopLogprobs
from quire.types.request import FinishReason


@dataclass(frozen=True)
class TokenDelta:
    """News of one request after one step. The last one carries `finish_reason`."""

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop token id, when one of stop_token_ids ended it
    error: str | None = None  # set exactly when finish_reason is "error"
    logprobs: tuple[TopLogprobs, ...] = ()  # one per token id, when asked for
    prompt_logprobs: tuple[TopLogprobs, ...] = ()  # chunks in order, when asked for
    cached_tokens: int = 0
    scheduled_at: float = 0.0
    preemptions: int = 0


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]


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


@dataclass
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
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
    prompt_logprobs: list[TokenLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    lora_request: Any = None
    num_cached_tokens: int = 0


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
