"""One server from start to end.

bind ─► answer /livez ─► load ─► open the API ─► ... ─► SIGTERM or Ctrl-C ─► drain ─► 0
                          └► 1 or 2, with one line           the engine is given up ─► 1    a second signal ─► 128 + its number
"""

import asyncio
import contextlib
import gc
import logging
import os
import socket
import threading
import time
import webbrowser
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import uvloop

from quire.async_llm import AsyncLLM
from quire.config.args import EngineArgs
from quire.config.server_args import ServerArgs
from quire.obs.gpus import start_sampler
from quire.obs.logs import (
    RequestLog,
    StatsLog,
    log_interval,
    log_periodically,
    set_http_levels,
    set_quiet_paths,
    set_up_logging,
)
from quire.obs.metrics import HttpMetrics, Metrics
from quire.obs.tracing import Tracing, make_exporter
from quire.proc.fork_server import LazyForkServer
from quire.serve.adapters import check_adapters, load_modules
from quire.serve.api_workers.client import ApiWorker
from quire.serve.api_workers.launch import FAILED, SIGNALLED, ApiWorkersLaunch, Launch, in_daemon_thread, log_ready
from quire.serve.app import build_app, build_middleware
from quire.serve.auth import Keys, check_exposure, find_keys
from quire.serve.endpoints import check_endpoints
from quire.serve.health import ServerState, Service
from quire.serve.http import RESPONSE_GRACE_S, HttpServer, find_addresses, listen, on_loopback, page_of, reachable, url_of
from quire.serve.server import files_digest
from quire.serve.token_routes import abort_answers
from quire.serve.tools import check_parsers
from quire.stat_loggers import make_stat_loggers
from quire.types.errors import EngineError, QuireError, RequestError
from quire.types.prompts import PromptType
from quire.types.sampling import RequestOutputKind, SamplingParams

logger = logging.getLogger(__name__)

POLL_S = 0.1  # between two checks of the engine
ENGINE_STOP_S = 5.0  # for the engine to end by itself


def run_server(engine_args: EngineArgs, settings: ServerArgs, started: float, fork_server: LazyForkServer | None = None) -> int:
    """Serve until a signal, and return the exit code. Bad settings are raised before anything is loaded.

    started: when the command began, in seconds of time.monotonic(). fork_server: of the engines, which imports meanwhile.
    """
    _set_up(settings)
    interval = log_interval()
    check_parsers(settings, engine_args.require_plugins)
    check_endpoints(engine_args.require_plugins)
    check_adapters(settings, engine_args)
    keys = find_keys(settings, os.environ)
    addresses = find_addresses(settings)
    check_exposure(settings, reachable(addresses), keys)
    exporter = None if settings.otlp_traces_endpoint is None else make_exporter(settings.otlp_traces_endpoint)
    tracing = None if exporter is None else Tracing(exporter)
    with _listening(settings, addresses) as sockets, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if settings.api_server_count > 1:
            return runner.run(ApiWorkersLaunch(engine_args, settings, sockets, fork_server).run(started))
        return runner.run(ServerLaunch(engine_args, settings, Keys(keys), sockets, tracing, interval, fork_server).run(started))


def run_api_worker(worker: ApiWorker, sockets: list[socket.socket]) -> int:
    """One of several API processes; the router has checked the settings."""
    settings = worker.begin.settings
    _set_up(settings)
    check_parsers(settings, worker.begin.args.require_plugins)
    exporter = None if settings.otlp_traces_endpoint is None else make_exporter(settings.otlp_traces_endpoint)
    tracing, keys = None if exporter is None else Tracing(exporter), Keys(find_keys(settings, os.environ))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        launch = ServerLaunch(worker.begin.args, settings, keys, sockets, tracing, log_interval(), None, worker)
        return runner.run(launch.run(worker.begin.started))


def _set_up(settings: ServerArgs) -> None:
    if set_up_logging():
        set_quiet_paths(settings.unlogged_paths)
        return
    set_http_levels(settings.uvicorn_log_level, not settings.disable_uvicorn_access_log, settings.unlogged_paths)


@contextlib.contextmanager
def _listening(settings: ServerArgs, addresses: list[tuple[socket.AddressFamily, str]]) -> Iterator[list[socket.socket]]:
    sockets = listen(settings, addresses)
    try:
        yield sockets
    finally:
        for opened in sockets:
            opened.close()
        if settings.uds is not None:
            Path(settings.uds).unlink(missing_ok=True)


class ServerLaunch(Launch):
    def __init__(
        self,
        engine_args: EngineArgs,
        settings: ServerArgs,
        keys: Keys,
        sockets: list[socket.socket],
        tracing: Tracing | None,
        stats_interval: float,
        fork_server: LazyForkServer | None,
        worker: ApiWorker | None = None,
    ) -> None:
        """`worker`: this is one of several API processes, and the engines are the router's."""
        super().__init__()
        self._fork_server, self._worker = fork_server, worker
        self._engine_args, self._settings, self._sockets, self._tracing = engine_args, settings, sockets, tracing
        self._stats_interval = stats_interval
        self._state = ServerState(settings)
        self._http = HttpServer(settings, build_middleware(self._state, keys, on_loopback(sockets)))
        self._llm: AsyncLLM | None = None

    async def run(self, started: float) -> int:
        self._handle_signals()
        serving = self._start(self._http.serve(sockets=self._sockets))
        life = self._start(self._live(started))
        at_once = self._start(self._stop_now.wait())
        try:
            await asyncio.wait({serving, life, at_once}, return_when=asyncio.FIRST_COMPLETED)
            if at_once.done():
                logger.warning("stopping at once")
                return SIGNALLED + self._signal
            if life.done():
                return life.result()
            serving.result()
            raise EngineError("the HTTP server ended by itself")
        finally:
            if not at_once.done():
                self._http.should_exit = True
                await asyncio.wait({serving, at_once}, return_when=asyncio.FIRST_COMPLETED)
            await self._end(graceful=not at_once.done())

    def _on_signal(self, number: int) -> None:
        self._state.draining = True
        super()._on_signal(number)

    async def _end(self, graceful: bool) -> None:
        if self._llm is not None:
            self._state.closing = True
            self._llm.shutdown(ENGINE_STOP_S if graceful else 0.0)
        if not graceful:
            await self._state.wait_idle(POLL_S)  # clients that still read get the end of their stream
            logging.getLogger("uvicorn.error").disabled = True  # responses that are cut off here are no mistakes
        for task in self._tasks:
            task.cancel()
        if self._tracing is not None and graceful:
            self._tracing.close(RESPONSE_GRACE_S)

    # ---- the life of a server --------------------------------------------------------------------------------------------

    async def _live(self, started: float) -> int:
        url = url_of(self._settings, self._sockets)
        if self._worker is None:
            logger.info("listening on %s, loading %s", url, self._engine_args.model)
        loading = self._start(self._load())
        if not await self._before_signal(loading):
            logger.info("stopped before the model was loaded")
            return 0
        llm = loading.result()
        metrics = self._observe(llm)
        router = None if self._worker is None else self._worker.router
        if router is not None:
            router.abort_here = partial(abort_answers, llm)
        others = None if router is None else router.abort_in_others
        app = build_app(llm, self._settings, metrics=metrics, abort_in_others=others)
        http_metrics = HttpMetrics(metrics.registry)
        self._http.connection_limits.on_closed_unread = http_metrics.closed_unread.add
        self._state.service = Service(llm, app, metrics, http_metrics, router)
        gc.collect()
        if self._worker is None:
            log_ready(llm.config.served_names[0], url, started, page_of(self._settings, self._sockets), llm.timeline)
        else:
            self._start(
                self._worker.send_counts(lambda: self._state.open, [*metrics.boards, http_metrics.board], metrics.adapters)
            )
        gc.freeze()  # what lives now lives to the end: a search through it would make every stream wait
        self._start(self._greet(llm, page_of(self._settings, self._sockets)))
        if await self._before_signal(self._start(_death(llm))):
            return await self._end_after_loss()
        await self._drain(llm)
        return FAILED if llm.state == "dead" and not self._state.closing else 0

    async def _greet(self, llm: AsyncLLM, page: str | None) -> None:
        """Open the page or print a sample answer, if the settings ask for it."""
        settings = self._settings
        if settings.open and page is not None:
            threading.Thread(target=webbrowser.open, args=(page,), name="quire-browser", daemon=True).start()
        if settings.sample is not None:
            await print_sample(llm, settings.sample)
            if page is not None:
                print(f"\nOpen {page} in a browser.", flush=True)

    async def _load(self) -> AsyncLLM:
        def make() -> AsyncLLM:
            if self._worker is not None:
                llm = self._worker.make()
                llm.add_stat_loggers(make_stat_loggers(llm.config))
            else:
                llm = AsyncLLM.from_engine_args(self._engine_args, fork_server=self._fork_server)
            llm.offload.start(large_bodies=llm.media.media is not None)
            llm.media.readers = self._settings.api_server_count
            llm.media.start()
            return llm

        self._llm = llm = await in_daemon_thread(make, discard=lambda late: late.shutdown(0.0))
        threading.Thread(target=files_digest, args=[llm.config.facts.files], name="quire-digest", daemon=True).start()
        await llm.wait_ready()
        await load_modules(llm, self._settings)
        return llm

    def _observe(self, llm: AsyncLLM) -> Metrics:
        settings, args = self._settings, self._engine_args
        several = [_cache_info(llm, each.pages) for each in llm.engines] if len(llm.engines) > 1 else []
        name, info = llm.config.served_names[0], _cache_info(llm, llm.pages)
        metrics = Metrics(settings.metrics_prefix, name, llm.max_model_len, info, several)
        if llm.adapters.enabled:
            metrics.adapters = llm.adapters_in_use
            metrics.adapter_names = lambda: (adapter.name for adapter in llm.adapters.all)
        if llm.config.device == "cuda" and (sampler := start_sampler()) is not None:
            metrics.gpus = lambda: sampler.readings
        llm.observers.append(metrics)
        llm.media.cache.on_query, llm.media.on_processed = metrics.count_media_query, metrics.media_seconds.observe
        of = "" if self._worker is None else f"API process {self._worker.begin.name.rstrip('.')}, "
        for number in range(0 if args.disable_log_stats else len(llm.engines)):
            drafts = self._worker is None or self._worker.begin.first
            log = StatsLog(time.monotonic(), llm.config.device, number, of, drafts)
            llm.observers.append(log)
            self._start(log_periodically(log, self._stats_interval))
        if llm.stat_loggers is not None:
            self._start(log_periodically(llm.stat_loggers, self._stats_interval))
        if settings.enable_log_requests:
            llm.observers.append(RequestLog(settings.enable_log_outputs, settings.max_log_len))
        if self._tracing is not None:
            llm.observers.append(self._tracing)
        return metrics

    # ---- its end ---------------------------------------------------------------------------------------------------------

    async def _drain(self, llm: AsyncLLM) -> None:
        """Let open requests finish until the deadline; then abort them, which their clients get as an error."""
        state, seconds = self._state, self._settings.shutdown_timeout
        logger.info("shutting down: %d open requests have %.0f s to finish; a second signal does not wait", state.open, seconds)
        if await state.wait_idle(seconds):
            logger.info("shutting down: nothing is open")
            return
        logger.warning("shutting down: %d requests are ended after %.0f s", state.open, seconds)
        state.closing = True
        llm.shutdown(0.0)
        if not await state.wait_idle(RESPONSE_GRACE_S):
            logger.error("shutting down: %d responses could not be written", state.open)

    async def _end_after_loss(self) -> int:
        """End the server after the engine was lost for good, when clients have read their errors."""
        logger.critical("the engine is dead: the server ends")
        self._state.draining = True
        if not await self._state.wait_idle(RESPONSE_GRACE_S):
            logger.error("%d responses could not be written", self._state.open)
        return FAILED


async def _death(llm: AsyncLLM) -> None:
    while llm.state != "dead":
        await asyncio.sleep(POLL_S)


def _cache_info(llm: AsyncLLM, pages: int) -> dict[str, object]:
    config = llm.config
    return {
        "block_size": config.page_size,
        "cache_dtype": config.cache_dtype,
        "enable_prefix_caching": config.prefix_caching,
        "prefix_caching_hash_algo": "sha256",
        "gpu_memory_utilization": config.args.gpu_memory_utilization,
        "kv_cache_memory_bytes": config.args.kv_cache_memory_bytes,
        "num_gpu_blocks_override": config.args.num_gpu_blocks_override,
        "num_gpu_blocks": pages,
    }


MAX_TOKENS = 64


async def print_sample(llm: AsyncLLM, question: str) -> None:
    """Print the answer to a question; an error is only logged."""
    try:
        print(f"> {question}\n{await _answer(llm, question)}", flush=True)
    except QuireError as error:
        logger.warning("the sample could not be answered: %s", error)


async def _answer(llm: AsyncLLM, question: str) -> str:
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, output_kind=RequestOutputKind.FINAL_ONLY)
    text = ""
    async for output in llm.generate(await _prompt(llm, question), params, "sample"):
        text = output.outputs[0].text
    return text.strip()


async def _prompt(llm: AsyncLLM, question: str) -> PromptType:
    """Return the question as a user's message, or as it is for a model without a chat template."""
    try:
        text, ids = await llm.render_chat([{"role": "user", "content": question}], add_generation_prompt=True)
    except RequestError:
        return question
    return {"prompt": text, "prompt_token_ids": ids}
