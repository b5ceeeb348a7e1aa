"""How the processes of Quire write their logs: lines of text, JSON objects, or as a file for `logging.config.dictConfig` says.

Environment variables decide, so that every process of a server does the same; `--log-format` and `--log-config-file` set them.
"""

import json
import logging
import logging.config
import os
import time
from pathlib import Path
from typing import Any

from quire.types.errors import ConfigError

FORMAT_VARIABLE = "QUIRE_LOGGING_FORMAT"
CONFIG_VARIABLES = ("QUIRE_LOGGING_CONFIG_PATH", "VLLM_LOGGING_CONFIG_PATH")
FORMATS = ("text", "json")
_ACCESS = ("client", "method", "path", "http_version", "status")  # of uvicorn's access log


class JsonLine(logging.Formatter):
    """One JSON object per record, stack traces included."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "timestamp": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "process": record.process,
        }
        if record.name == "uvicorn.access" and isinstance(record.args, tuple) and len(record.args) == len(_ACCESS):
            fields |= zip(_ACCESS, record.args, strict=True)
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


def writes_json() -> bool:
    chosen = os.environ.get(FORMAT_VARIABLE) or FORMATS[0]
    if chosen not in FORMATS:
        raise ConfigError(f"{FORMAT_VARIABLE} must be one of {', '.join(FORMATS)}; got {chosen!r}. Change it or leave it out.")
    return chosen == "json"


def formatter(text: logging.Formatter) -> logging.Formatter:
    """Return the formatter that the environment asks for; `text`: that of lines of text."""
    return JsonLine() if writes_json() else text


def read_config() -> dict[str, Any] | None:
    """Return the logging configuration of a file; None: no file is named. `vllm` in it stands for the logger `quire`."""
    name = next((name for name in CONFIG_VARIABLES if os.environ.get(name)), None)
    if name is None:
        return None
    path = Path(os.environ[name]).expanduser()
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _wrong(name, path, f"cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise _wrong(name, path, f"is not JSON: {error}") from None
    if not isinstance(config, dict) or not isinstance(config.get("loggers", {}), dict):
        raise _wrong(name, path, "is not a logging configuration")
    loggers = config.get("loggers", {})
    if "vllm" in loggers:
        loggers.setdefault("quire", loggers.pop("vllm"))
    return {"disable_existing_loggers": False, **config}


def apply_config() -> bool:
    """Configure logging as the file says; False: no file is named."""
    config = read_config()
    if config is None:
        return False
    try:
        logging.config.dictConfig(config)
    except (ValueError, TypeError, AttributeError, ImportError) as error:
        name = next(name for name in CONFIG_VARIABLES if os.environ.get(name))
        cause = f"{error}: {error.__cause__}" if error.__cause__ else str(error)
        raise _wrong(name, Path(os.environ[name]), f"is not a logging configuration: {cause}") from None
    return True


def _wrong(name: str, path: Path, problem: str) -> ConfigError:
    return ConfigError(f"{name} {path} {problem}. Give a JSON file for logging.config.dictConfig, or leave it out.")


def set_up_child(text: logging.Formatter, level: str | int) -> None:
    """Set up logging in a process that another one of Quire started."""
    if apply_config():
        return
    handler = logging.StreamHandler()
    handler.setFormatter(formatter(text))
    logging.basicConfig(handlers=[handler])
    logging.getLogger("quire").setLevel(level)


def piped(prefix: str, process: int, line: str) -> str:
    """Return a line of another process as it is shown: with a prefix, or as a JSON object."""
    if os.environ.get(FORMAT_VARIABLE) != "json":
        return f"{prefix} {line}"
    if line.startswith("{"):
        return line
    stamp = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime())}.000Z"
    return json.dumps({"timestamp": stamp, "level": "INFO", "logger": "stderr", "message": line, "process": process})
