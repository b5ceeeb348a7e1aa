"""JSON of untrusted origin: every problem of a text, its depth included, is a ValueError."""

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from quire.types.errors import ConfigError


def read_json(text: str | bytes, hook: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """Parse a text. `hook` may replace the objects in it."""
    try:
        return json.loads(text, object_hook=hook)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json_lines(name: str, lines: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place, for errors, and the object of each line of the file `name`. Blank lines are skipped."""
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        where = f"{name} line {number}"
        try:
            line = read_json(text)
        except ValueError as error:
            raise ConfigError(f"{where} is not JSON: {error}") from None
        if not isinstance(line, dict):
            raise ConfigError(f"{where} is not a JSON object")
        yield where, line
