"""Garbage collection while steps run: a search through everything a process holds stops them for a tenth of a second."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def little_garbage_collection() -> Iterator[None]:
    """What exists already is not searched. Where the program has put objects aside itself, it is left as it is."""
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
