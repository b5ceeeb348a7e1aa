"""Garbage collection while times are taken."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def little_garbage_collection() -> Iterator[None]:
    """What exists already is not searched for garbage."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
