"""`bench serve` from beginning to end: reach the server, make the requests, warm up, send the load, summarize."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from quire.bench.arrivals import LoadShape, arrival_times
from quire.bench.client import Client, Origin, allow_open_files
from quire.bench.datasets import SYNTHETIC, DatasetOptions
from quire.bench.load import Load, Outgoing, progress, sender
from quire.bench.metrics import MAX_REQUESTS, Record, check_count
from quire.bench.openai import Kind, MeasuredServer, request_body
from quire.bench.report import error_lines
from quire.bench.samples import RandomPrompts, Sample
from quire.bench.sources import SOURCES
from quire.step_loop import little_garbage_collection
from quire.types.errors import ConfigError, EngineError

SPARE_FILES = 64
CACHED_SHARE = 0.05  # of the input: more means that an earlier run had the same prompts
LATE_S = 0.05  # a larger delay of the client itself is reported


@dataclass(frozen=True)
class ServeSettings:
    origin: Origin
    endpoint: str = "/v1/completions"
    kind: Kind = "completions"
    model: str | None = None  # None asks the server
    headers: Mapping[str, str] = field(default_factory=dict)
    insecure: bool = False
    timeout: float | None = None  # seconds, for a whole request
    ready_timeout: float = 0.0
    dataset: DatasetOptions = field(default_factory=DatasetOptions)
    prompt_format: str = "auto"  # of synthetic prompts: "ids", "text"; auto uses ids if the server accepts them
    vocab_size: int | None = None  # None asks the server
    self_timed: bool | None = None  # None: if the data set has times
    fields: Mapping[str, Any] = field(default_factory=dict)
    shape: LoadShape = field(default_factory=LoadShape)
    warmups: int = 0
    request_id_prefix: str = "bench-"
    keep_text: bool = False
    disable_tqdm: bool = False
    profile: bool = False  # the server's engines, while the load runs

    def __post_init__(self) -> None:
        check_count("num-warmups", self.warmups, 0, MAX_REQUESTS)
        if not self.endpoint.startswith("/"):
            raise ConfigError(f"--endpoint must start with a slash, got {self.endpoint!r}")
        if self.kind in ("chat", "rerank") and self.prompt_format == "ids":
            what = "messages are text" if self.kind == "chat" else "query and documents are text"
            raise ConfigError(f"--prompt-format ids does not work with {self.kind}: {what}")
        if self.dataset.name not in SYNTHETIC and (self.prompt_format != "auto" or self.vocab_size is not None):
            raise ConfigError(f"--prompt-format and --vocab-size are for random prompts, not for {self.dataset.name}")
        if self.prompt_format == "text" and self.vocab_size is not None:
            raise ConfigError("--vocab-size is for token ids, not for --prompt-format text")
        if self.pools:
            if unsuitable := sorted(set(self.fields) & {"n", "stream", "temperature", "ignore_eos"}):
                raise ConfigError(f"{self.kind} requests generate nothing; drop {', '.join(unsuitable)}")
        elif self.fields.get("n", 1) != 1 or not self.fields.get("stream", True):
            raise ConfigError("a benchmark request streams one completion; drop n and stream from --extra-body")
        if self.timed_by_data and self.shape.timed:
            raise ConfigError("the trace has its own times; use --no-self-timed for --request-rate or a ramp")

    @property
    def pools(self) -> bool:
        """Whether the answers are vectors or scores instead of streams of tokens."""
        return self.kind in ("embeddings", "rerank")

    @property
    def timed_by_data(self) -> bool:
        return self.dataset.name == "timed_trace" if self.self_timed is None else self.self_timed

    @property
    def load_text(self) -> str:
        if not self.timed_by_data:
            return str(self.shape)
        most = self.shape.max_concurrency
        return "as recorded" if most is None else f"as recorded, at most {most} at once"


@dataclass(frozen=True)
class Outcome:
    model: str
    server_version: str | None
    prompts: str  # "ids", "text" or "file"
    records: Sequence[Record]
    duration: float
    interrupted: bool
    notes: Sequence[str]
    traces: Sequence[str] = ()  # of the profile


async def bench_serve(settings: ServeSettings) -> Outcome:
    client = Client(settings.origin, settings.headers, insecure=settings.insecure, timeout=settings.timeout)
    server = MeasuredServer(client, settings.model)
    try:
        await server.wait_ready(settings.ready_timeout)
        if settings.model is not None:
            await server.check_key()
        server.model = model = settings.model or await server.first_model()
        alphabet = await _alphabet(settings, server)
        samples = await SOURCES[settings.dataset.name](_with_warmups(settings), alphabet, server)
        main = _prepare(settings, model, samples[: settings.dataset.count], "")
        allow_open_files(min(len(main), settings.shape.max_concurrency or len(main)) + SPARE_FILES)
        await _warm_up(settings, client, _prepare(settings, model, _warmup_samples(settings, samples), "warmup-"))
        version = await server.version()
        load = Load(
            sender(
                client,
                settings.origin.path(settings.endpoint),
                keep_text=settings.keep_text,
                streams=not settings.pools,
            ),
            settings.shape.max_concurrency,
        )
        async with progress(load, len(main), disable=settings.disable_tqdm), profiled(server, settings.profile) as traces:
            with little_garbage_collection():
                await load.run(main)
    finally:
        await client.close()
    synthetic = settings.dataset.name in SYNTHETIC
    prompts = ("text" if alphabet.text else "ids") if synthetic else "file"
    notes = _notes(settings, server, alphabet, load, len(main))
    return Outcome(model, version, prompts, load.records, load.duration, load.interrupted, notes, traces)


@contextlib.asynccontextmanager
async def profiled(server: MeasuredServer, on: bool) -> AsyncIterator[list[str]]:
    """Profile the server's engines meanwhile, if `on`; fill the list with the traces."""
    traces: list[str] = []
    if not on:
        yield traces
        return
    await server.start_profile()
    try:
        yield traces
    finally:
        traces += await server.stop_profile()


async def _alphabet(settings: ServeSettings, server: MeasuredServer) -> RandomPrompts:
    if settings.dataset.name not in SYNTHETIC or settings.kind in ("chat", "rerank") or settings.prompt_format == "text":
        return RandomPrompts(None)
    size = await server.vocab_size() if settings.vocab_size is None else settings.vocab_size
    if size is None and settings.prompt_format == "ids":
        raise ConfigError("the server has no /tokenize, so its vocabulary is unknown; use --vocab-size or --prompt-format text")
    return RandomPrompts(size)


def _with_warmups(settings: ServeSettings) -> DatasetOptions:
    """Add samples for warm-up requests: equal in kind, but other prompts, so that the prefix cache has none of the run's."""
    if settings.dataset.name == "timed_trace":
        return settings.dataset
    return replace(settings.dataset, count=settings.dataset.count + settings.warmups)


def _warmup_samples(settings: ServeSettings, samples: Sequence[Sample]) -> list[Sample]:
    others = samples[settings.dataset.count :] or samples
    return [others[index % len(others)] for index in range(settings.warmups)]


def _prepare(settings: ServeSettings, model: str, samples: Sequence[Sample], kind: str) -> list[Outgoing]:
    """Return the requests with their bodies, which are serialized before the clock starts."""
    if settings.timed_by_data:
        if any(sample.at is None for sample in samples):
            raise ConfigError(f"--self-timed requires a data set with times; {settings.dataset.name} has none")
        times = np.asarray([sample.at for sample in samples], dtype=np.float64)
    else:
        times = arrival_times(settings.shape, len(samples), settings.dataset.seed)
    return [
        Outgoing(
            f"{settings.request_id_prefix}{kind}{index}",
            request_body(sample, kind=settings.kind, model=model, fields=settings.fields),
            float(due),
            0 if settings.pools else sample.output_tokens,
            sample.prompt_tokens or 0,
        )
        for index, (sample, due) in enumerate(zip(samples, times, strict=True))
    ]


async def _warm_up(settings: ServeSettings, client: Client, requests: Sequence[Outgoing]) -> None:
    if not requests:
        return
    path = settings.origin.path(settings.endpoint)
    load = Load(sender(client, path, streams=not settings.pools), settings.shape.max_concurrency)
    await load.run([Outgoing(request.name, request.body, 0.0) for request in requests])
    if load.interrupted:
        raise asyncio.CancelledError
    if not any(record.ok for record in load.records):
        raise EngineError(f"no warm-up request succeeded: {error_lines(load.records)[0]}")


def _notes(settings: ServeSettings, server: MeasuredServer, alphabet: RandomPrompts, load: Load, count: int) -> list[str]:
    """Return notes for the reader of the figures."""
    notes = ["the server was profiled, which costs time"] if settings.profile else []
    good = [record for record in load.records if record.ok]
    if load.interrupted:
        notes.append(f"interrupted: {count - len(load.records):,} of {count:,} requests had not ended and are not counted")
    if alphabet.text and settings.dataset.name in SYNTHETIC:
        notes.append("prompts are random words, about one token each; input tokens are counted by the server")
    if server.estimated:
        notes.append("the server has no /tokenize: lengths of the data set's texts are estimated")
    inputs, cached = sum(record.prompt_tokens for record in good), sum(record.cached_tokens for record in good)
    if settings.dataset.name == "random" and not settings.dataset.random_prefix_len and cached > CACHED_SHARE * inputs:
        notes.append(f"{cached / inputs:.0%} of the input was in the server's prefix cache; another --seed sends other prompts")
    uncounted = sum(not record.counted for record in good)
    if uncounted:
        notes.append(f"{uncounted:,} answers came without usage: their chunks are counted as tokens")
    short = sum(record.output_tokens < record.asked_tokens for record in good)
    if short and settings.fields.get("ignore_eos"):
        notes.append(f"{short:,} answers are shorter than requested, in spite of --ignore-eos")
    if settings.shape.max_concurrency is None and (settings.shape.timed or settings.timed_by_data) and good:
        late = float(np.percentile([record.wait for record in load.records], 99))
        if late > LATE_S:
            notes.append(
                f"this client was late: 1 % of the requests were sent more than {late * 1000:,.0f} ms after they were due"
            )
    return notes
