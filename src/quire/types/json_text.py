"""JSON of untrusted origin: every problem of a text, its depth included, is a ValueError."""

import json
from collections.abc import Callable
from typing import Any


def read_json(text: str | bytes, hook: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """Parse a text. `hook` may replace the objects in it."""
    try:
        return json.loads(text, object_hook=hook)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
