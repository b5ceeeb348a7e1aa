"""Statistics that an engine reports after every step, and the events that observers of requests receive."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

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
    """A finished request of a user with its n choices."""

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
    pools: bool = False  # it returns a vector and generates nothing


@dataclass
class OutputNews:
    """The outputs of one step. Times are seconds."""

    now: float  # time.monotonic()
    tokens: int = 0  # generated
    prompts: list[tuple[int, int]] = field(default_factory=list)  # tokens, and how many were cached, of prompts now computed
    first_tokens: list[float] = field(default_factory=list)  # since the arrival of the request
    intervals: list[float] = field(default_factory=list)  # between two tokens of a choice
    finished: list[Finished] = field(default_factory=list)
    engine: int = 0  # its number, of several engines


class OutputObserver(Protocol):
    def on_arrival(self, request: Arrived) -> None:
        """A request was accepted."""

    def on_outputs(self, news: OutputNews) -> None:
        """A step's tokens were detokenized, or a request was dropped."""


class DeviceCounts(msgspec.Struct, frozen=True, array_like=True):
    """Preparations of the device, and how often they were used. All counts except replays are constant under steady
    traffic."""

    compilations: int = 0  # kernel variants compiled
    loads: int = 0  # kernel variants taken from the disk cache
    captures: int = 0  # CUDA graphs recorded
    replays: int = 0  # steps that ran as a CUDA graph
    misses: int = 0  # steps that could have run as a CUDA graph, but did not
    # estimates for each rank, with enable_mfu_metrics; floats, since their sums exceed 64-bit integers within hours
    flops: float = 0.0
    read_bytes: float = 0.0
    written_bytes: float = 0.0


NO_COUNTS = DeviceCounts()


class DraftCounts(msgspec.Struct, frozen=True, array_like=True):
    """Counts of rows with drafts, since the start of the engine process."""

    rows: int = 0
    tokens: int = 0
    accepted: int = 0
    per_position: tuple[int, ...] = ()  # accepted, by position after the last known token


NO_DRAFTS = DraftCounts()


class EncoderCounts(msgspec.Struct, frozen=True, array_like=True):
    """Counts of images and videos that prompts reached, since the start of the engine process."""

    queries: int = 0  # looked up in the encoder cache
    hits: int = 0  # ... and found; the others were encoded
    embeddings: int = 0  # of encoded items

    @property
    def encoded(self) -> int:
        """Return the number of encoded items."""
        return self.queries - self.hits


NO_ENCODINGS = EncoderCounts()


class TierCounts(msgspec.Struct, frozen=True, array_like=True):
    """Counts of pages outside the device; all but records, used and on_disk since the start of the engine process.

    A snapshot of recurrent states counts as the pages whose memory it takes; as one in skipped, lost and on_disk.
    """

    records: int = 0  # pages that it holds
    used: int = 0
    stored: int = 0  # pages stored
    skipped: int = 0  # pages not stored, since all records were in use
    queries: int = 0  # prompt tokens that the device did not have
    hits: int = 0  # ... and that were found when they had been fetched
    fetched: int = 0  # pages that arrived
    lost: int = 0  # pages that did not, and were computed again
    page_bytes: int = 0  # of a page on the rank with the largest
    on_disk: int = 0  # pages on disk
    written: int = 0  # pages written to disk
    read: int = 0  # pages read from disk
    disk_hits: int = 0  # hits that were on disk only


NO_TIERS = TierCounts()


def tiers_together(engines: Iterable[TierCounts]) -> TierCounts:
    """Return the sums over several engines, whose pages have one size."""
    found = list(engines)
    sums = {name: sum(getattr(each, name) for each in found) for name in TierCounts.__struct_fields__}
    return TierCounts(**{**sums, "page_bytes": max((each.page_bytes for each in found), default=0)})


class Stats(msgspec.Struct, frozen=True, array_like=True):
    running: int
    waiting: int  # parked children included
    pages: int
    free_pages: int  # cached ones included
    queries: int  # prompt tokens looked up in the prefix cache
    hits: int  # ... and found
    preemptions: int
    device: DeviceCounts = NO_COUNTS
    grammar_losses: int = 0  # lost grammar processes
    drafts: DraftCounts = NO_DRAFTS
    adapter_reads: int = 0  # from files to the host's memory
    adapter_puts: int = 0  # from there to the device
    encoder: EncoderCounts = NO_ENCODINGS
    tier: TierCounts = NO_TIERS
    engine: int = 0  # its number, of several


NOTHING = Stats(0, 0, 0, 0, 0, 0, 0)


def together(engines: Sequence[Stats]) -> Stats:
    """Return the sums over several engines. Device counts are reported per engine."""
    counted = ("running", "waiting", "pages", "free_pages", "queries", "hits", "preemptions", "grammar_losses")
    tier = tiers_together(each.tier for each in engines)
    return Stats(**{name: sum(getattr(each, name) for each in engines) for name in counted}, tier=tier)


class Observer(OutputObserver, Protocol):
    """Receives requests, outputs and steps. Called on the event loop, so it must be fast and must not raise."""

    def on_step(self, stats: Stats, tokens_in_step: int, now: float) -> None:
        """One step of the engine. `tokens_in_step`: prompt and output tokens; `now`: time.monotonic().

        All but the first four count from the start of the engine process, and again after a restart.
        """
