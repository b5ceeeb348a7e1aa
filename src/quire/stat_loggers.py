"""Stat loggers: objects of users that receive statistics after each step. The interface is vLLM's.

A factory is called with vLLM's configuration object and the number of the engine. A class that is a `StatLoggerBase` is such a
factory; one object of an `AggregateStatLoggerBase` receives the statistics of all engines.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from quire.config.config import Config
from quire.config.model_config import VllmConfig
from quire.config.plugins import STAT_LOGGERS, PlugIn, load_plugins
from quire.types.errors import PLUGIN_FAILURES, ConfigError
from quire.types.stats import NOTHING, Arrived, Finished, OutputNews, Stats

logger = logging.getLogger(__name__)

Factory = Callable[[VllmConfig, int], "StatLoggerBase"]


@dataclass
class PrefixCacheStats:
    """Prompt tokens looked up in the prefix cache since the last record, and those found."""

    queries: int = 0
    hits: int = 0


@dataclass
class SpecDecodingStats:
    """Drafts since the last record."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)


@dataclass
class SchedulerStats:
    """The state of an engine after a step."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    kv_cache_usage: float = 0.0  # 0 to 1
    prefix_cache_stats: PrefixCacheStats = field(default_factory=PrefixCacheStats)
    spec_decoding_stats: SpecDecodingStats | None = None


@dataclass
class FinishedRequestStats:
    """A finished request. Times are seconds."""

    finish_reason: str
    e2e_latency: float = 0.0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    max_tokens_param: int | None = None
    queued_time: float = 0.0
    prefill_time: float = 0.0
    inference_time: float = 0.0
    decode_time: float = 0.0
    mean_time_per_output_token: float = 0.0
    num_cached_tokens: int = 0
    request_id: str = ""


@dataclass
class IterationStats:
    """The outputs since the last record. Times are seconds."""

    iteration_timestamp: float = field(default_factory=time.time)
    num_generation_tokens: int = 0
    num_prompt_tokens: int = 0
    num_preempted_reqs: int = 0
    finished_requests: list[FinishedRequestStats] = field(default_factory=list)
    n_params_iter: list[int] = field(default_factory=list)
    max_num_generation_tokens_iter: list[int] = field(default_factory=list)
    time_to_first_tokens_iter: list[float] = field(default_factory=list)
    inter_token_latencies_iter: list[float] = field(default_factory=list)


class StatLoggerBase(ABC):
    @abstractmethod
    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None: ...

    @abstractmethod
    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: None = None,
        engine_idx: int = 0,
    ) -> None:
        """Receive the statistics of a step. Called on the event loop, so it must be fast."""

    @abstractmethod
    def log_engine_initialized(self) -> None:
        """The engine is ready."""

    def log(self) -> None:  # noqa: B027 - most have nothing to write
        """Write what was recorded. A server calls it every QUIRE_LOG_STATS_INTERVAL seconds."""


class AggregateStatLoggerBase(StatLoggerBase):
    """One object for all engines; `__init__` gets their numbers."""

    @abstractmethod
    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int]) -> None: ...


class StatLoggers:
    """Call stat loggers with what an observer of an engine receives. One that fails is reported and not called again."""

    read_stats: Callable[[int], Stats | None] | None = None  # latest statistics of an engine, where `on_step` is not called

    def __init__(self, factories: Sequence[tuple[str, Any]], config: Config) -> None:
        """Make the loggers. ConfigError: one cannot be made. factories: each with its name for messages."""
        self._config = VllmConfig.of(config, config.max_model_len)
        numbers = list(range(max(1, config.args.data_parallel_size)))
        self._loggers: list[tuple[str, int | None, StatLoggerBase]] = []  # name, engine (None: all), logger
        for name, factory in factories:
            together = isinstance(factory, type) and issubclass(factory, AggregateStatLoggerBase)
            for number in [None] if together else numbers:
                made = self._make(name, factory, numbers if number is None else number)
                self._loggers.append((name, number, made))
        self._news: dict[int, OutputNews] = {}  # since the last record, by engine
        self._last: dict[int, Stats] = {}
        self._ready: set[int] = set()

    def _make(self, name: str, factory: Any, engine: int | list[int]) -> StatLoggerBase:
        try:
            made: StatLoggerBase = factory(self._config, engine)
            missing = [each for each in ("record", "log", "log_engine_initialized") if not callable(getattr(made, each, None))]
        except PLUGIN_FAILURES as error:
            raise ConfigError(f"stat_loggers: {name} cannot be made: {type(error).__name__}: {error}") from error
        if missing:
            raise ConfigError(
                f"stat_loggers must make loggers like StatLoggerBase; {name} made a {type(made).__name__} without "
                f"{' and '.join(missing)}"
            )
        return made

    # ---- what an observer receives

    def on_arrival(self, request: Arrived) -> None:
        pass

    def on_outputs(self, news: OutputNews) -> None:
        waiting = self._news.setdefault(news.engine, OutputNews(news.now, engine=news.engine))
        waiting.tokens += news.tokens
        for mine, new in (
            (waiting.prompts, news.prompts), (waiting.first_tokens, news.first_tokens), (waiting.intervals, news.intervals),
            (waiting.finished, news.finished),
        ):  # fmt: skip
            mine += new  # type: ignore[operator]
        if self.read_stats is not None and (stats := self.read_stats(news.engine)) is not None:
            self._record(news.engine, stats)

    def on_step(self, stats: Stats, tokens_in_step: int, now: float) -> None:  # noqa: ARG002
        self._record(stats.engine, stats)

    def on_ready(self, engine: int) -> None:
        """An engine is ready; a restarted one is not announced again."""
        if engine not in self._ready:
            self._ready.add(engine)
            first = len(self._ready) == 1
            self._call("log_engine_initialized", lambda number: number == engine or (number is None and first))

    def log(self, now: float = 0.0) -> None:  # noqa: ARG002 - as StatsLog
        self._call("log", lambda _: True)

    def _record(self, engine: int, stats: Stats) -> None:
        last, news = self._last.get(engine, NOTHING), self._news.pop(engine, None)
        if stats.queries < last.queries or stats.preemptions < last.preemptions or stats.drafts.tokens < last.drafts.tokens:
            last = NOTHING  # another engine process, which counts from zero
        self._last[engine] = stats
        iteration = None if news is None else _iteration(news, stats.preemptions - last.preemptions)
        arguments = _scheduler(stats, last), iteration, None, engine
        self._call("record", lambda number: number is None or number == engine, *arguments)

    def _call(self, method: str, wanted: Callable[[int | None], bool], *arguments: Any) -> None:
        for entry in [entry for entry in self._loggers if wanted(entry[1])]:
            try:
                getattr(entry[2], method)(*arguments)
            except PLUGIN_FAILURES:
                logger.exception("stat logger %s failed in %s; it is not called again", entry[0], method)
                self._loggers.remove(entry)


def make_stat_loggers(config: Config, given: Sequence[Any] | None = None) -> StatLoggers | None:
    """Return the loggers of these factories and, unless `disable_log_stats`, of packages; None: there are none.

    ConfigError: a factory is not callable, or its logger cannot be made.
    """
    factories: list[tuple[str, Any]] = []
    if given is not None and not isinstance(given, list | tuple):
        raise ConfigError(f"stat_loggers must be a list of factories; got {type(given).__name__}")
    for factory in given or ():
        if not callable(factory):
            raise ConfigError(f"stat_loggers must be classes or functions; got {factory!r}")
        factories.append((getattr(factory, "__qualname__", type(factory).__name__), factory))
    if not config.args.disable_log_stats:

        def take(plugin: PlugIn, loaded: Any) -> None:
            if not (isinstance(loaded, type) and issubclass(loaded, StatLoggerBase)):
                raise ConfigError("it is not a subclass of quire.stat_loggers.StatLoggerBase")
            factories.append((f"{plugin.name} ({plugin.point.value}, {plugin.package})", loaded))

        load_plugins(STAT_LOGGERS, take, config.args.require_plugins)
    return StatLoggers(factories, config) if factories else None


def _scheduler(stats: Stats, last: Stats) -> SchedulerStats:
    drafts, before = stats.drafts, last.drafts
    accepted = [new - old for new, old in zip_longest(drafts.per_position, before.per_position, fillvalue=0)]
    drafted = SpecDecodingStats(
        drafts.rows - before.rows, drafts.tokens - before.tokens, drafts.accepted - before.accepted, accepted
    )
    return SchedulerStats(
        num_running_reqs=stats.running,
        num_waiting_reqs=stats.waiting,
        kv_cache_usage=1 - stats.free_pages / stats.pages if stats.pages else 0.0,
        prefix_cache_stats=PrefixCacheStats(stats.queries - last.queries, stats.hits - last.hits),
        spec_decoding_stats=drafted if drafted.num_drafts else None,
    )


def _iteration(news: OutputNews, preempted: int) -> IterationStats:
    return IterationStats(
        num_generation_tokens=news.tokens,
        num_prompt_tokens=sum(tokens for tokens, _ in news.prompts),
        num_preempted_reqs=preempted,
        finished_requests=[each for request in news.finished for each in _finished(request)],
        n_params_iter=[request.params.n for request in news.finished],
        max_num_generation_tokens_iter=[max(request.generated) for request in news.finished],
        time_to_first_tokens_iter=news.first_tokens,
        inter_token_latencies_iter=news.intervals,
    )


def _finished(request: Finished) -> list[FinishedRequestStats]:
    """Return one row for each choice."""
    times = request.metrics
    started, first = times.scheduled_ts or times.finished_ts, times.first_token_ts or times.finished_ts
    decode = times.last_token_ts - first if times.first_token_ts else 0.0
    return [
        FinishedRequestStats(
            finish_reason=reason,
            e2e_latency=times.finished_ts - times.queued_ts,
            num_prompt_tokens=request.prompt_tokens,
            num_generation_tokens=generated,
            max_tokens_param=None if request.pools else request.params.max_tokens,
            queued_time=max(0.0, started - times.queued_ts),
            prefill_time=max(0.0, first - started),
            inference_time=max(0.0, (times.last_token_ts or times.finished_ts) - started),
            decode_time=decode,
            mean_time_per_output_token=decode / (generated - 1) if generated > 1 else 0.0,
            num_cached_tokens=request.cached_tokens,
            request_id=request.request_id,
        )
        for reason, generated in zip(request.reasons, request.generated, strict=True)
    ]
