"""The metrics of the engine and its requests, with vLLM's names, types, labels and buckets.

An observer: the engine's numbers come with every step, the requests' times with every batch of outputs. Gauges are
read from the engine on a scrape. Each server has its own registry; nothing is global.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Protocol

from prometheus_client import CollectorRegistry

from quire.obs.gpus import GpuReading
from quire.obs.instruments import Board, Boards, BoardState, Counter, Gauge, Histogram, Instrument, Summary, total
from quire.types.stats import NOTHING, Arrived, Finished, OutputNews, Stats

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

REASONS = ("stop", "length", "abort", "error", "repetition")
CALL_ENDS = ("complete", "cut", "broken", "text")  # text: a call's marker that no call followed
FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
    2560.0,
)  # fmt: skip
PER_TOKEN = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
WHOLE_REQUEST = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0,
    7680.0,
)  # fmt: skip
STEP_TOKENS = tuple(float(n) for n in (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384))
BY_ADAPTER = ("lora_name",)
BY_GPU = ("gpu", "gpu_name")
MAX_ADAPTERS = 1000  # whose values are stored between scrapes
CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)


AdaptersInUse = tuple[int, Sequence[str], Sequence[str]]  # how many there may be; names of requests that wait, and that run
OpenAdapters = tuple[Sequence[str], Sequence[str]]  # the names
NONE_OPEN: OpenAdapters = ((), ())


class Engine(Protocol):
    """What is read of the engine when metrics are asked for."""

    @property
    def stats(self) -> Stats | None: ...
    @property
    def restarts(self) -> int: ...
    @property
    def replayed(self) -> int: ...
    @property
    def heartbeat_age(self) -> float: ...
    @property
    def engines(self) -> "Sequence[Engine]":
        """Of several, one by one."""
        ...


class Metrics:
    """`cache_info` describes the cache; it becomes the labels of cache_config_info.

    Of several engines, `engines` has that for each: Prometheus is then told the numbers of each by itself, and what is counted
    here are the sums.
    """

    def __init__(
        self,
        prefix: str,
        model_name: str,
        max_model_len: int,
        cache_info: Mapping[str, object],
        engines: Sequence[Mapping[str, object]] = (),
        number: int = 0,
    ) -> None:
        board = self.board = Board(f"{prefix}:", {"model_name": model_name, "engine": str(number)})
        self.parts = [Metrics(prefix, model_name, max_model_len, each, (), i) for i, each in enumerate(engines)]
        self._cache_info = {name: str(value) for name, value in cache_info.items()}
        self._last: dict[int, Stats] = {}  # by engine
        self.adapters: Callable[[], AdaptersInUse] | None = None  # called on a scrape
        self.gpus: Callable[[], Sequence[GpuReading]] = tuple  # called on a scrape
        self._room = MAX_ADAPTERS
        self.adapter_names: Callable[[], Iterable[str]] | None = None  # those that can be asked for
        self._add_state(board)
        self._add_tokens(board)
        self._add_times(board)
        self._add_sizes(board, one_two_five(max_model_len))

    @cached_property
    def of_engines(self) -> frozenset[str]:
        """The names of counters that engines count, and not the requests of this process."""
        counters = (*self._counters, self.accepted_per_position, self.restarts, self.replayed)
        return frozenset(counter.name for counter in counters)

    @property
    def boards(self) -> list[Board]:
        """The sums, and of several engines each one's."""
        return [self.board, *(part.board for part in self.parts)]

    @cached_property
    def registry(self) -> "CollectorRegistry":
        """For Prometheus: these metrics, and those of the process."""
        from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

        registry = CollectorRegistry()
        parts = [part.board for part in self.parts]
        registry.register(Boards(parts, self._undivided(self.board)) if parts else self.board)
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)
        return registry

    def _add_state(self, board: Board) -> None:
        self.running = board.add(Gauge("num_requests_running", "Requests that are in steps now"))
        self.waiting = board.add(Gauge("num_requests_waiting", "Requests that wait for room"))
        self.waiting_by_reason = board.add(Gauge("num_requests_waiting_by_reason", "Waiting requests by reason", ("reason",)))
        self.cache_usage = board.add(Gauge("kv_cache_usage_perc", "Fraction of the cache pages in use, 0 to 1"))
        self.host_usage = board.add(Gauge("kv_offload_cpu_cache_usage_perc", "Fraction of the host tier in use, 0 to 1"))
        self.cache_config = board.add(Gauge("cache_config_info", "How the cache is set up", tuple(self._cache_info)))
        self.cache_config.set(1, *self._cache_info.values())
        self.heartbeat = board.add(Gauge("engine_heartbeat_age_seconds", "Since the engine process was last heard of"))
        self.gpu_gauges = (
            board.add(Gauge("gpu_utilization", "Share of time in which the GPU ran a kernel, 0 to 1, by NVML", BY_GPU)),
            board.add(Gauge("gpu_memory_used_bytes", "Memory of the GPU in use, by all processes, by NVML", BY_GPU)),
            board.add(Gauge("gpu_memory_total_bytes", "Memory of the GPU, by NVML", BY_GPU)),
        )
        self.lora_info = board.add(
            Gauge(
                "lora_requests_info", "Adapters of open requests: waiting for their first token, or running; when (Unix time)",
                ("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
            )
        )  # fmt: skip
        self.restarts = board.add(Counter("engine_restarts", "Times the engine process was restarted"))
        self.replayed = board.add(Counter("requests_replayed", "Requests continued in a restarted engine"))

    def _add_tokens(self, board: Board) -> None:
        self._counters = (  # the engine's, as in _counted
            board.add(Counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache")),
            board.add(Counter("prefix_cache_hits", "Prompt tokens found in the prefix cache")),
            preemptions := board.add(Counter("num_preemptions", "Times a request gave its pages back and had to wait")),
            board.add(Counter("kernel_compilations", "Kernel variants compiled")),
            board.add(Counter("kernel_loads", "Kernel variants taken from the disk cache")),
            board.add(Counter("graph_captures", "CUDA graphs recorded")),
            board.add(Counter("graph_replays", "Steps that replayed a CUDA graph")),
            board.add(Counter("graph_misses", "Steps of one-token rows that found no CUDA graph")),
            losses := board.add(
                Counter("grammar_losses", "Times the grammar process was lost; its requests go on with another")
            ),
            board.add(Counter("spec_decode_num_drafts", "Rows with drafts that were verified")),
            board.add(Counter("spec_decode_num_draft_tokens", "Drafts that were verified")),
            board.add(Counter("spec_decode_num_accepted_tokens", "Drafts that were right")),
            board.add(Counter("lora_reads", "Adapters read from files")),
            board.add(Counter("lora_loads", "Adapters put on the device")),
            board.add(Counter("estimated_flops_per_gpu", "Operations of a rank, estimated with --enable-mfu-metrics")),
            board.add(Counter("estimated_read_bytes_per_gpu", "Memory that a rank read, estimated with --enable-mfu-metrics")),
            board.add(Counter("estimated_write_bytes_per_gpu", "Memory that a rank wrote, the same")),
            board.add(Counter("external_prefix_cache_queries", "Prompt tokens looked up in host memory")),
            board.add(Counter("external_prefix_cache_hits", "Prompt tokens fetched from host memory")),
            board.add(Counter("kv_offload_store_bytes", "Pages stored in host memory, bytes of a rank")),
            board.add(Counter("kv_offload_load_bytes", "Pages fetched from host memory, bytes of a rank")),
            board.add(Counter("kv_offload_stores_skipped", "Pages not stored, since all of host memory was in use")),
            board.add(Counter("kv_offload_tiering_write_bytes", "Pages written to disk, bytes of a rank")),
            board.add(Counter("kv_offload_tiering_read_bytes", "Pages read from disk, bytes of a rank")),
            board.add(Counter("kv_offload_load_failures", "Pages that were wrong or lost, and were computed again")),
            board.add(Counter("mm_encoder_cache_queries", "Images and videos of prompts looked up in the encoder cache")),
            board.add(Counter("mm_encoder_cache_hits", "Images and videos found in the encoder cache; others were encoded")),
            board.add(Counter("mm_encoder_embeddings", "Embeddings of encoded images and videos")),
        )
        self.accepted_per_position = board.add(
            Counter(
                "spec_decode_num_accepted_tokens_per_pos",
                "Drafts that were right, by their place in the row",
                ("position",),
                (("0",),),
            )
        )
        self.preemptions, self.grammar_losses = preemptions, losses
        self.lora_requests = board.add(Counter("lora_requests", "Requests with an adapter that ended", BY_ADAPTER))
        self.lora_prompt = board.add(Counter("lora_prompt_tokens", "Prompt tokens of requests with an adapter", BY_ADAPTER))
        self.lora_generated = board.add(Counter("lora_generation_tokens", "Tokens generated with an adapter", BY_ADAPTER))
        self.prompt_tokens = board.add(Counter("prompt_tokens", "Prompt tokens taken in"))
        self.generation_tokens = board.add(Counter("generation_tokens", "Tokens generated"))
        self.by_source = board.add(
            Counter(
                "prompt_tokens_by_source", "Prompt tokens by source; local_cache_hit includes host memory and disk",
                ("source",),
                (("local_compute",), ("local_cache_hit",), ("external_kv_transfer",)),
            )
        )  # fmt: skip
        self.prompt_cached = board.add(Counter("prompt_tokens_cached", "Prompt tokens that were cached"))
        self.tool_calls = board.add(
            Counter("tool_calls", "Tool calls in answers, by what became of them", ("outcome",), ((end,) for end in CALL_ENDS))
        )
        self.media_queries = board.add(Counter("mm_cache_queries", "Images and videos looked up in the processor cache"))
        self.media_hits = board.add(Counter("mm_cache_hits", "Images and videos found in the processor cache"))
        self.success = board.add(
            Counter("request_success", "Choices that ended, by reason", ("finished_reason",), ((reason,) for reason in REASONS))
        )

    def _add_times(self, board: Board) -> None:
        self.ttft = board.add(Histogram("time_to_first_token_seconds", "From arrival to the first token", FIRST_TOKEN))
        self.media_seconds = board.add(
            Histogram("mm_processing_seconds", "Of an image or video in a media process, with the wait for one", FIRST_TOKEN)
        )
        self.itl = board.add(Histogram("inter_token_latency_seconds", "Between two tokens of a choice", PER_TOKEN))
        self.tpot = board.add(
            Histogram("request_time_per_output_token_seconds", "Mean time per token after the first, per request", PER_TOKEN)
        )
        self.e2e = board.add(Histogram("e2e_request_latency_seconds", "From arrival to the end", WHOLE_REQUEST))
        self.queue = board.add(Histogram("request_queue_time_seconds", "From arrival to the first step", WHOLE_REQUEST))
        self.inference = board.add(Histogram("request_inference_time_seconds", "From the first step to the end", WHOLE_REQUEST))
        self.prefill = board.add(
            Histogram("request_prefill_time_seconds", "From the first step to the first token", WHOLE_REQUEST)
        )
        self.decode = board.add(Histogram("request_decode_time_seconds", "From the first token to the last", WHOLE_REQUEST))

    def _add_sizes(self, board: Board, sizes: tuple[float, ...]) -> None:
        self.step_tokens = board.add(Histogram("iteration_tokens_total", "Prompt and generated tokens per step", STEP_TOKENS))
        self.request_prompt = board.add(Histogram("request_prompt_tokens", "Prompt tokens per request", sizes))
        self.request_generated = board.add(Histogram("request_generation_tokens", "Generated tokens per choice", sizes))
        self.request_longest = board.add(
            Histogram("request_max_num_generation_tokens", "Generated tokens of a request's longest choice", sizes)
        )
        self.request_computed = board.add(
            Histogram("request_prefill_kv_computed_tokens", "Prompt tokens per request that were not cached", sizes)
        )
        self.request_n = board.add(Histogram("request_params_n", "n of requests", CHOICES))
        self.request_limit = board.add(Histogram("request_params_max_tokens", "max_tokens of requests", sizes))

    # ---- observing -------------------------------------------------------------------------------------------------------

    def on_step(self, stats: Stats, tokens_in_step: int, now: float) -> None:
        last = self._last.get(stats.engine, NOTHING)
        if any(new < old for new, old in zip(_counted(stats), _counted(last), strict=True)):
            last = NOTHING  # another engine, which counts from zero
        for counter, new, old in zip(self._counters, _counted(stats), _counted(last), strict=True):
            counter.add(new - old)
        for place, new in enumerate(stats.drafts.per_position):
            old = last.drafts.per_position[place] if place < len(last.drafts.per_position) else 0
            self.accepted_per_position.add(new - old, str(place))
        self._last[stats.engine] = stats
        if self.parts:
            self.parts[stats.engine].on_step(stats, tokens_in_step, now)

    def on_arrival(self, request: Arrived) -> None:
        """A request is counted when it gets somewhere."""

    def on_outputs(self, news: OutputNews) -> None:
        if news.tokens or news.prompts:  # as vLLM counts: tokens generated, and the prompts whose first ones are among them
            self.step_tokens.observe(news.tokens + sum(tokens for tokens, _ in news.prompts))
        self.generation_tokens.add(news.tokens)
        self.ttft.observe_all(news.first_tokens)
        self.itl.observe_all(news.intervals)
        for tokens, cached in news.prompts:
            self.prompt_tokens.add(tokens)
            self.prompt_cached.add(cached)
            self.by_source.add(cached, "local_cache_hit")
            self.by_source.add(tokens - cached, "local_compute")
        for request in news.finished:
            self._count(request)
        if self.parts:
            self.parts[news.engine].on_outputs(news)

    def _count(self, request: Finished) -> None:
        for reason in request.reasons:
            self.success.add(1, reason)
        metrics, params = request.metrics, request.params
        if request.lora_name:
            self.lora_requests.add(1, request.lora_name)
            self.lora_prompt.add(request.prompt_tokens, request.lora_name)
            self.lora_generated.add(sum(request.generated), request.lora_name)
            if len(self.lora_requests.values) > self._room:
                self._forget_adapters(self.boards)
                self._room = max(MAX_ADAPTERS, 2 * len(self.lora_requests.values))
        self.request_prompt.observe(request.prompt_tokens)
        self.request_computed.observe(request.prompt_tokens - request.cached_tokens)
        self.request_generated.observe_all(request.generated)
        self.request_longest.observe(max(request.generated))
        self.request_n.observe(params.n)
        if params.max_tokens is not None and not request.pools:
            self.request_limit.observe(params.max_tokens)
        self.e2e.observe(metrics.finished_ts - metrics.queued_ts)
        if metrics.scheduled_ts:
            self.queue.observe(max(0.0, metrics.scheduled_ts - metrics.queued_ts))
        if metrics.first_token_ts:
            decode = metrics.last_token_ts - metrics.first_token_ts
            self.prefill.observe(max(0.0, metrics.first_token_ts - metrics.scheduled_ts))
            self.decode.observe(decode)
            self.inference.observe(max(0.0, metrics.last_token_ts - metrics.scheduled_ts))
            if max(request.generated) > 1:
                self.tpot.observe(decode / (max(request.generated) - 1))

    def _forget_adapters(self, boards: Iterable[Board], others: OpenAdapters = NONE_OPEN) -> None:
        """Numbers of adapters that were unloaded go when the last of their requests has ended: names may be without end."""
        if self.adapters is None or self.adapter_names is None:
            return
        _, waiting, running = self.adapters()
        there = {*self.adapter_names(), *waiting, *running, *others[0], *others[1]}
        for counter in (one for board in boards for one in board.instruments if one.labels == BY_ADAPTER):
            assert isinstance(counter, Counter)
            for labels in [labels for labels in counter.values if labels[0] not in there]:
                del counter.values[labels]

    # ---- telling ---------------------------------------------------------------------------------------------------------

    def render(self, engine: Engine, accept: str = "") -> tuple[bytes, str]:
        """All of it as text, and the text's content type: what the reader accepts decides between two formats."""
        self.look(engine)
        return encode(self.registry, accept)

    def render_total(
        self,
        engine: Engine,
        http: Board,
        others: Sequence[Sequence[BoardState]],
        accept: str = "",
        adapters: OpenAdapters = NONE_OPEN,
    ) -> tuple[bytes, str]:
        """The same of several API processes: these values and those of others, from `take`. `adapters`: of the others'
        requests that wait, and that run."""
        from prometheus_client import CollectorRegistry, PlatformCollector

        self.look(engine, adapters)
        whole, *parts, about_http = total([*self.boards, http], others, self.of_engines)
        self._forget_adapters([whole, *parts], adapters)
        registry = CollectorRegistry()
        registry.register(Boards(parts, self._undivided(whole)) if parts else whole)
        registry.register(about_http)
        PlatformCollector(registry=registry)
        return encode(registry, accept)

    def _undivided(self, board: Board) -> list[Instrument]:
        """What engines have no part of each."""
        media = (self.media_queries.name, self.media_hits.name, self.media_seconds.name)
        names = (self.tool_calls.name, self.lora_info.name, *media, *(gauge.name for gauge in self.gpu_gauges))
        return [one for one in board.instruments if one.name in names]

    def count_media_query(self, hit: bool) -> None:
        self.media_queries.add(1)
        self.media_hits.add(int(hit))

    def look(self, engine: Engine, adapters: OpenAdapters = NONE_OPEN) -> None:
        """Read the gauges. `adapters`: of other API processes' requests."""
        stats = engine.stats or NOTHING
        self.running.set(stats.running)
        self.waiting.set(stats.waiting)
        self.waiting_by_reason.set(stats.waiting, "capacity")
        self.waiting_by_reason.set(0, "deferred")
        self.cache_usage.set(1 - stats.free_pages / stats.pages if stats.pages else 0)
        self.host_usage.set(stats.tier.used / stats.tier.records if stats.tier.records else 0)
        self.heartbeat.set(engine.heartbeat_age)
        self._forget_adapters(self.boards)
        if self.adapters is not None:
            most, waiting, running = self.adapters()
            names = [",".join(sorted({*here, *there})) for here, there in ((waiting, adapters[0]), (running, adapters[1]))]
            self.lora_info.values.clear()
            self.lora_info.set(time.time(), str(most), *names)
        for gauge in self.gpu_gauges:
            gauge.values.clear()
        for gpu in self.gpus():
            for gauge, value in zip(self.gpu_gauges, gpu[2:], strict=True):
                gauge.set(value, gpu.number, gpu.name)
        self.restarts.values[()] = float(engine.restarts)
        self.replayed.values[()] = float(engine.replayed)
        for part, each in zip(self.parts, engine.engines if self.parts else (), strict=True):
            part.look(each)


def _counted(stats: Stats) -> tuple[float, ...]:
    """What counts from the start of an engine."""
    device, tier = stats.device, stats.tier
    return (
        stats.queries, stats.hits, stats.preemptions, device.compilations, device.loads, device.captures, device.replays,
        device.misses, stats.grammar_losses, stats.drafts.rows, stats.drafts.tokens, stats.drafts.accepted,
        stats.adapter_reads, stats.adapter_puts, device.flops, device.read_bytes, device.written_bytes,
        tier.queries, tier.hits, tier.stored * tier.page_bytes, tier.fetched * tier.page_bytes, tier.skipped,
        tier.written * tier.page_bytes, tier.read * tier.page_bytes, tier.lost, stats.encoder.queries,
        stats.encoder.hits, stats.encoder.embeddings,
    )  # fmt: skip


def one_two_five(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 ... up to `most`."""
    bounds, unit = [], 1
    while unit <= most:
        bounds += [float(unit * step) for step in (1, 2, 5) if unit * step <= most]
        unit *= 10
    return tuple(bounds)


METHODS = frozenset(("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"))
COARSE = (0.1, 0.5, 1.0)
FINE = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 7.5, 10.0, 30.0, 60.0,
)  # fmt: skip


class HttpMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        board = self.board = Board("", {})
        self.requests = board.add(
            Counter("http_requests", "Requests by method, status and route", ("method", "status", "handler"))
        )
        self.received = board.add(Summary("http_request_size_bytes", "Content length of requests", ("handler",)))
        self.sent = board.add(Summary("http_response_size_bytes", "Bytes of response bodies", ("handler",)))
        self.duration = board.add(
            Histogram("http_request_duration_seconds", "Duration of requests", COARSE, ("method", "handler"))
        )
        self.duration_fine = board.add(
            Histogram("http_request_duration_highr_seconds", "Duration of requests, with many buckets", FINE)
        )
        self.closed_unread = board.add(
            Counter("http_connections_closed_unread", "Connections closed because their client did not read the answer")
        )
        registry.register(board)

    def record(self, method: str, handler: str, status: int, seconds: float, received: int, sent: int) -> None:
        """`handler` is the matched route's template, so that clients cannot make up labels."""
        method = method if method in METHODS else "other"
        self.requests.add(1, method, f"{status // 100}xx", handler)
        self.received.observe(received, handler)
        self.sent.observe(sent, handler)
        self.duration.observe(seconds, method, handler)
        self.duration_fine.observe(seconds)


def encode(registry: "CollectorRegistry", accept: str) -> tuple[bytes, str]:
    """Return the metrics as text in the format that a reader accepts, and the content type.

    No name needs escaping. prometheus_client escapes the colon of our samples in OpenMetrics all the same, unless the reader
    allows UTF-8: Prometheus 2 would store `quire_num_requests_running`.
    """
    from prometheus_client.exposition import choose_encoder

    chosen, content_type = choose_encoder(accept)
    if isinstance(chosen, partial) and "escaping" in chosen.keywords:
        chosen = partial(chosen.func, **{**chosen.keywords, "escaping": "allow-utf-8"})
    return chosen(registry), content_type
