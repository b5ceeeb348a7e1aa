"""Keeps count of the kernel variants this process compiled or took from the disk cache, and chooses where that cache is."""

import os
from threading import Lock
from typing import Any

from triton import knobs

from quire.files.wheel import cache_directory

CHOICES = ("TRITON_CACHE_DIR", "TRITON_HOME")  # environment: where the user wants compiled kernels to be kept


class Variants:
    """Counts from the moment it is installed. Whoever listened to the compiler before goes on doing so."""

    def __init__(self) -> None:
        self.compilations = self.loads = 0
        self._lock = Lock()  # kernels may be compiled on several threads
        self._before: Any = None

    def install(self) -> "Variants":
        self._before, knobs.compilation.listener = knobs.compilation.listener, self
        return self

    def __call__(self, *, cache_hit: bool, **told: Any) -> None:
        with self._lock:
            self.loads += cache_hit
            self.compilations += not cache_hit
        if self._before is not None:
            self._before(cache_hit=cache_hit, **told)


def choose_cache() -> None:
    """Compiled kernels are kept beside Quire's other files, unless the user chose a place."""
    if not any(os.environ.get(name) for name in CHOICES):
        os.environ["TRITON_CACHE_DIR"] = str(cache_directory() / "triton")


choose_cache()
VARIANTS = Variants().install()
