"""Checks of request parameters: each returns the value, or raises InvalidParameter with the parameter's name."""

import math
from typing import Any

from quire.types.errors import InvalidParameter

LARGEST_INT = 2**63 - 1


def check_int(name: str, value: Any, low: int, high: int = LARGEST_INT) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidParameter(f"{name} must be an integer, got {value!r}", name)
    if value < low or value > high:
        bounds = f"at least {low}" if value < low and high == LARGEST_INT else f"between {low} and {high}"
        raise InvalidParameter(f"{name} must be {bounds}, got {shown(value)}", name)
    return value


def is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def shown(number: float) -> str:
    """Return a number as text for an error; a huge integer, which Python does not print, by its size."""
    if isinstance(number, int) and number.bit_length() > 128:
        return f"an integer of {number.bit_length()} bits"
    return f"{number}"


def check_real(name: str, value: Any, low: float | None = None, high: float | None = None, above: float | None = None) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidParameter(f"{name} must be a number, got {value!r}", name)
    bad = not is_finite(value)
    bad |= low is not None and value < low
    bad |= above is not None and value <= above
    bad |= high is not None and value > high
    if bad:
        bounds = (("at least", low), ("above", above), ("at most", high))
        parts = ["finite", *(f"{word} {bound:g}" for word, bound in bounds if bound is not None)]
        raise InvalidParameter(f"{name} must be {', '.join(parts)}, got {shown(value)}", name)
    return value


def check_ids(name: str, ids: Any) -> list[int]:
    if not isinstance(ids, list):
        raise InvalidParameter(f"{name} must be a list of token ids (integers from 0), got {type(ids).__name__}", name)
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            what = shown(token) if isinstance(token, int) else f"{token!r:.80}"
            raise InvalidParameter(f"{name} must be a list of token ids (integers from 0), got {what} in it", name)
    return ids


def check_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidParameter(f"{name} must be true or false, got {value!r}", name)
    return value
