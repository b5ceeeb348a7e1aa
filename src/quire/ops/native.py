"""Quire's C kernels for CPUs (`native/`). They are missing in the pure Python wheel and if no compiler was available at
installation; libraries are used then."""

import importlib
import logging
from functools import cache
from typing import Any

logger = logging.getLogger(__name__)

MAX_WORKERS = 16
VERSION = 4  # of the structures passed to C, as in `native/module.c`


@cache
def kernels() -> Any:
    """Return the C module; None: not built, or built from other sources."""
    try:
        module = importlib.import_module("quire.ops._native")
    except ImportError:
        logger.warning(
            "Quire is installed without its C kernels, so CPU inference is slower. Install a C compiler and Python's headers, "
            "then run pip install --force-reinstall --no-deps --no-binary quire quire (in a checkout: pip install .)"
        )
        return None
    if getattr(module, "VERSION", 0) != VERSION:
        logger.warning("Quire's C kernels are of another release and not used, so CPU inference is slower; reinstall Quire")
        return None
    return module


def multiplies() -> bool:
    """Return whether there are kernels for 4- and 8-bit GEMMs, and this CPU has the instructions."""
    return kernels() is not None and bool(kernels().multiplies())


def multiplies_floats() -> bool:
    return kernels() is not None and bool(kernels().multiplies_floats())


def adapts() -> bool:
    """Return whether the float kernels support LoRA."""
    return kernels() is not None and bool(getattr(kernels(), "ADAPTS", 0))


def encodes() -> bool:
    """Return whether there are kernels for encoders in float32: LayerNorm and attention over packed sequences."""
    return multiplies_floats() and bool(getattr(kernels(), "ENCODES", 0))


def tile() -> int:
    """Return the outputs per tile of a 4- or 8-bit matrix."""
    return int(kernels().TILE)


def float_tile() -> int:
    """Return the outputs per tile of a float32 matrix."""
    return int(kernels().FLOAT_TILE)


def run_decoders() -> bool:
    """Return whether all GEMMs of a decoder run in C kernels, so that a row's result does not depend on other rows."""
    return multiplies() and multiplies_floats()


def workers() -> int:
    import torch

    return min(torch.get_num_threads(), MAX_WORKERS)
