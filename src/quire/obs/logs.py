"""Log format (time, level, module, message; one line each), and the log lines of requests."""

import logging
import os
from collections.abc import Collection, Sequence
from typing import TypeVar

from quire.progress import LEVEL_VARIABLES
from quire.types.errors import ConfigError
from quire.types.stats import Arrived, OutputNews, Stats

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


def set_up_logging() -> None:
    """Quire's and uvicorn's loggers write to standard error in one form; Quire's own level comes from the environment."""
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine())
    for name in ("quire", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
    for name in ("uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).handlers = []
        logging.getLogger(name).propagate = True
    logging.getLogger("quire").setLevel(_level())


def set_http_levels(level: str, access: bool, quiet_paths: Collection[str] = ()) -> None:
    """What uvicorn says: from which level on, whether each request gets a line, and the paths that get none."""
    number = TRACE if level == "trace" else logging.getLevelName(level.upper())
    logging.getLogger("uvicorn").setLevel(number)
    logging.getLogger("uvicorn.error").setLevel(max(number, logging.WARNING))  # starting and stopping is told by the launcher
    logger = logging.getLogger("uvicorn.access")
    logger.setLevel(logging.NOTSET)
    logger.disabled = not access
    logger.filters = [_QuietPaths(quiet_paths)] if quiet_paths else []


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
    """An observer. Prompts are told at debug level only; `most` characters, or token ids, of a text."""

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
