"""Quire's own kernels for CPUs, in C (`native/`). Where no compiler was there when Quire was installed, there are none, and
libraries do their work."""

import importlib
import logging
from functools import cache
from typing import Any

logger = logging.getLogger(__name__)

MOST_WORKERS = 16
VERSION = 4  # of the structures that are handed over, as in `native/module.c`


@cache
def kernels() -> Any:
    """None = they were not built, or from other sources than ours."""
    try:
        module = importlib.import_module("quire.ops._native")
    except ImportError:
        logger.info("Quire was installed without its C kernels, which take a C compiler: on this CPU it is slower")
        return None
    if getattr(module, "VERSION", 0) != VERSION:
        logger.warning("Quire's C kernels are of another release, and not used: on this CPU it is slower. Install Quire again")
        return None
    return module


def multiplies() -> bool:
    """Are there kernels for products with numbers of few bits, and has this CPU the instructions they take?"""
    return kernels() is not None and bool(kernels().multiplies())


def multiplies_floats() -> bool:
    return kernels() is not None and bool(kernels().multiplies_floats())


def adapts() -> bool:
    """Do they know what adapters add to products of floats?"""
    return kernels() is not None and bool(getattr(kernels(), "ADAPTS", 0))


def tile() -> int:
    """Outputs that lie together in a matrix of numbers of few bits."""
    return int(kernels().TILE)


def float_tile() -> int:
    """The same for float32."""
    return int(kernels().FLOAT_TILE)


def run_decoders() -> bool:
    """Do they do all the products of a decoder here? Then a row's numbers depend on nothing that is beside it."""
    return multiplies() and multiplies_floats()


def workers() -> int:
    import torch

    return min(torch.get_num_threads(), MOST_WORKERS)
