"""Log format (time, level, module, message; one line each), log lines of requests, and regular statistics."""

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import TypeVar

from quire.proc.logs import apply_config, formatter
from quire.progress import LEVEL_VARIABLES
from quire.stat_loggers import StatLoggers
from quire.types.errors import ConfigError
from quire.types.stats import NO_DRAFTS, NOTHING, Arrived, OutputNews, Stats

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
TRACE = 5  # uvicorn's level below debug


class OneLine(logging.Formatter):
    """A client's text in a message cannot begin a line of its own. Stack traces keep theirs."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03d %(levelname)s [%(name)s] %(message)s", "%Y-%m-%d %H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        if not record.message.isprintable():
            record.message = "".join(char if char.isprintable() else _escaped(char) for char in record.message)
        return super().formatMessage(record)


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode()


def set_up_logging() -> bool:
    """Quire's and uvicorn's loggers write to standard error in one form; Quire's own level comes from the environment.

    Return whether a file that the environment names has set up everything instead.
    """
    if apply_config():
        return True
    handler = logging.StreamHandler()
    handler.setFormatter(formatter(OneLine()))
    for name in ("quire", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
    for name in ("uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).handlers = []
        logging.getLogger(name).propagate = True
    logging.getLogger("quire").setLevel(_level())
    return False


def set_http_levels(level: str, access: bool, quiet_paths: Collection[str] = ()) -> None:
    """Set uvicorn's log level, whether each request is logged, and paths that are not logged."""
    number = TRACE if level == "trace" else logging.getLevelName(level.upper())
    logging.getLogger("uvicorn").setLevel(number)
    logging.getLogger("uvicorn.error").setLevel(max(number, logging.WARNING))  # the launcher logs start and stop
    logger = logging.getLogger("uvicorn.access")
    logger.setLevel(logging.NOTSET)
    logger.disabled = not access
    set_quiet_paths(quiet_paths)


def set_quiet_paths(paths: Collection[str]) -> None:
    logging.getLogger("uvicorn.access").filters = [_QuietPaths(paths)] if paths else []


class _QuietPaths(logging.Filter):
    def __init__(self, paths: Collection[str]) -> None:
        super().__init__()
        self._paths = frozenset(paths)

    def filter(self, record: logging.LogRecord) -> bool:
        """uvicorn's arguments: client, method, path with query, HTTP version, status."""
        args = record.args
        return not (isinstance(args, tuple) and len(args) > 2 and str(args[2]).partition("?")[0] in self._paths)


def _level() -> str:
    for name in LEVEL_VARIABLES:
        if text := os.environ.get(name):
            if text.upper() not in LEVELS:
                raise ConfigError(f"{name} must be one of {', '.join(LEVELS)}; got {text!r}")
            return text.upper()
    return "INFO"


logger = logging.getLogger(__name__)

_Text = TypeVar("_Text", str, Sequence[int])


class RequestLog:
    """An observer. Prompts are logged at debug level only; `most` characters, or token ids, of a text."""

    def __init__(self, outputs: bool, most: int | None) -> None:
        self._outputs, self._most = outputs, most

    def on_step(self, stats: Stats, tokens_in_step: int, now: float) -> None:
        """Steps are not requests."""

    def on_arrival(self, request: Arrived) -> None:
        lora = request.lora_name or None
        logger.info("Received request %s: params: %s, lora_request: %s.", request.request_id, request.params, lora)
        if logger.isEnabledFor(logging.DEBUG):
            text = None if request.prompt is None else self._cut(request.prompt)
            ids = list(self._cut(request.prompt_ids))
            logger.debug("Request %s details: prompt: %r, prompt_token_ids: %s.", request.request_id, text, ids)

    def on_outputs(self, news: OutputNews) -> None:
        for request in news.finished:
            seconds = request.metrics.finished_ts - request.metrics.queued_ts
            for index, reason in enumerate(request.reasons):
                name = request.request_id if len(request.reasons) == 1 else f"{request.request_id} choice {index}"
                logger.info("Finished request %s: %s, %d tokens in %.3f s.", name, reason, request.generated[index], seconds)
                if self._outputs:
                    logger.info("Generated response %s: output: %r.", name, self._cut(request.texts[index]))

    def _cut(self, text: _Text) -> _Text:
        return text if self._most is None else text[: self._most]


def log_piece(name: str, choice: int, text: str, finish_reason: str | None, most: int | None) -> None:
    """Log one piece of a streamed answer; at most `most` characters of it."""
    shown = text if most is None else text[:most]
    line = "Generated response %s (streaming delta): choice: %d, output: %r, finish_reason: %s."
    logger.info(line, name, choice, shown, finish_reason)


# ---- statistics, at regular intervals

INTERVAL_VARIABLES = ("QUIRE_LOG_STATS_INTERVAL", "VLLM_LOG_STATS_INTERVAL")
RECENT_REQUESTS = 1000  # over which the hit rate of the prefix cache is computed


class StatsLog:
    """An observer that adds up between two lines. `engine`: whose numbers, of several; `of`: what the line begins with;
    `drafts`: log draft statistics, which engines count for all API processes together."""

    def __init__(self, now: float, device: str = "cuda", engine: int = 0, of: str = "", drafts: bool = True) -> None:
        self._since, self._engine, self._of, self._tells_drafts = now, engine, of, drafts
        self._cache = "KV cache usage" if device == "cpu" else "GPU KV cache usage"
        self._stats: Stats | None = None
        self._prompt_tokens = self._generated = self._preemptions = 0
        self._recent: deque[tuple[int, int]] = deque(maxlen=RECENT_REQUESTS)  # prompt tokens, and how many were cached
        self._was_idle = True
        self._drafts = self._drafts_told = NO_DRAFTS  # since the start of the engine, and by the last line

    def on_step(self, stats: Stats, tokens_in_step: int, now: float) -> None:  # noqa: ARG002
        if stats.engine != self._engine:
            return
        before = 0 if self._stats is None or stats.preemptions < self._stats.preemptions else self._stats.preemptions
        self._preemptions += stats.preemptions - before
        if stats.drafts.rows < self._drafts.rows:
            self._drafts_told = NO_DRAFTS  # another engine, which counts from zero
        self._stats, self._drafts = stats, stats.drafts

    def on_arrival(self, request: Arrived) -> None:
        """Whether tokens were generated."""

    def on_outputs(self, news: OutputNews) -> None:
        if news.engine != self._engine:
            return
        self._generated += news.tokens
        for prompt in news.prompts:
            self._prompt_tokens += prompt[0]
            self._recent.append(prompt)

    def log(self, now: float) -> None:
        """Writes the line and begins anew. An idle engine is mentioned once, then only at debug level."""
        seconds = max(now - self._since, 1e-9)
        stats = self._stats or NOTHING
        idle = not (self._prompt_tokens or self._generated or stats.running or stats.waiting)
        level = logging.DEBUG if idle and self._was_idle else logging.INFO
        logger.log(
            level,
            "%sEngine %03d: Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, "
            "Running: %d reqs, Waiting: %d reqs%s, %s: %.1f%%, Prefix cache hit rate: %.1f%%",
            self._of,
            self._engine,
            self._prompt_tokens / seconds,
            self._generated / seconds,
            stats.running,
            stats.waiting,
            f", Preemptions: {self._preemptions}" if self._preemptions else "",
            self._cache,
            100 * (1 - stats.free_pages / stats.pages) if stats.pages else 0.0,
            100 * self._hit_rate(),
        )
        if self._tells_drafts:
            self._log_drafts(seconds)
        self._since, self._was_idle = now, idle
        self._prompt_tokens = self._generated = self._preemptions = 0

    def _log_drafts(self, seconds: float) -> None:
        """Logged only if there were any."""
        before, now = self._drafts_told, self._drafts
        rows, tokens, accepted = now.rows - before.rows, now.tokens - before.tokens, now.accepted - before.accepted
        self._drafts_told = now
        if not rows:
            return
        old = (*before.per_position, *[0] * len(now.per_position))  # rows have become longer since, perhaps
        rates = [(new - past) / rows for new, past in zip(now.per_position, old, strict=False)]
        while rates and not rates[-1]:
            rates.pop()
        logger.info(
            "Engine %03d: SpecDecoding metrics: Mean acceptance length: %.2f, Accepted throughput: %.2f tokens/s, "
            "Drafted throughput: %.2f tokens/s, "
            "Accepted: %d tokens, Drafted: %d tokens, Per-position acceptance rate: %s, Avg Draft acceptance rate: %.1f%%",
            self._engine,
            1 + accepted / rows,
            accepted / seconds,
            tokens / seconds,
            accepted,
            tokens,
            ", ".join(f"{rate:.3f}" for rate in rates) or "0.000",
            100 * accepted / tokens,
        )

    def _hit_rate(self) -> float:
        tokens = sum(prompt for prompt, _ in self._recent)
        return sum(cached for _, cached in self._recent) / tokens if tokens else 0.0


async def log_periodically(log: StatsLog | StatLoggers, interval: float) -> None:
    while True:
        await asyncio.sleep(interval)
        log.log(time.monotonic())


def log_interval() -> float:
    """Return the seconds between two lines, from the environment; 10 by default."""
    for name in INTERVAL_VARIABLES:
        if text := os.environ.get(name):
            try:
                seconds = float(text)
            except ValueError:
                seconds = 0.0
            if not 0.0 < seconds < float("inf"):
                raise ConfigError(f"{name} must be a number of seconds above 0, got {text!r}")
            return seconds
    return 10.0
