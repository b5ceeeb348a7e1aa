"""Numpy arrays in msgpack frames: the kind of their numbers, the shape, and the bytes."""

from collections.abc import Callable, Collection
from typing import Any

import numpy as np


def from_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, np.ascontiguousarray(value).data)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot be sent to another process")


def array_reader(kinds: Collection[str], writable: bool = False) -> Callable[[Any, Any], Any]:
    """Only arrays of these `kinds` are taken. `writable`: they may be written to."""

    def to_array(kind: Any, value: Any) -> Any:
        if getattr(kind, "__origin__", kind) is not np.ndarray:
            raise TypeError(f"a {kind} cannot be received from another process")
        dtype, shape, data = value
        if dtype not in kinds:
            raise TypeError(f"an array of {dtype} cannot be received; only {', '.join(kinds)} can")
        array = np.frombuffer(data, dtype).reshape(shape)
        return array.copy() if writable else array

    return to_array
