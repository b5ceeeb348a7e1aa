"""What observers of a server's requests are told: once per request that comes, and once per step for all that was generated."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from quire.types.outputs import RequestMetrics
from quire.types.request import FinishReason
from quire.types.sampling import SamplingParams


@dataclass(frozen=True)
class Arrived:
    request_id: str
    prompt: str | None
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    lora_name: str = ""  # of its adapter


@dataclass(frozen=True)
class Finished:
    """A user's request that is over: its n choices together."""

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    params: SamplingParams
    metrics: RequestMetrics
    reasons: tuple[FinishReason, ...]  # one per choice, as the next two
    generated: tuple[int, ...]  # tokens
    texts: tuple[str, ...]
    trace_headers: Mapping[str, str] | None = None
    engine_ids: tuple[str, ...] = ()  # one per choice
    lora_name: str = ""  # of its adapter


@dataclass
class OutputNews:
    """What one step's deltas brought. Times are seconds."""

    now: float  # time.monotonic()
    tokens: int = 0  # generated
    prompts: list[tuple[int, int]] = field(default_factory=list)  # tokens, and how many were cached, of prompts now computed
    first_tokens: list[float] = field(default_factory=list)  # since the request came
    intervals: list[float] = field(default_factory=list)  # between two tokens of a choice
    finished: list[Finished] = field(default_factory=list)
    engine: int = 0  # whose step, of several engines


class OutputObserver(Protocol):
    def on_arrival(self, request: Arrived) -> None:
        """A request was accepted."""

    def on_outputs(self, news: OutputNews) -> None:
        """A step's tokens were turned into text, or a request was dropped."""
