"""The form of log lines: time, level, place, message. One line each, whatever the message holds."""

import logging
import os
from collections.abc import Collection

from quire.progress import LEVEL_VARIABLES
from quire.types.errors import ConfigError

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
