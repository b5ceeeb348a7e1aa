"""Check and copy the weights of an adapter, each once. Weights that need no scale are copied unchanged, in pieces that torch
does not divide among its own threads: adapters are loaded in threads already, and running steps need the others."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

LARGE = 1e30  # fits in bfloat16, too
AT_ONCE = 1 << 15  # values, up to which torch uses one thread
BITS = {2: (torch.int16, np.int16, np.uint16), 4: (torch.int32, np.int32, np.uint32), 8: (torch.int64, np.int64, np.uint64)}


@dataclass(frozen=True)
class Scaled:
    """Weights to be multiplied by `scale` when they are copied."""

    values: Tensor
    scale: float


def largest_of(values: Tensor) -> float:
    """Return the largest absolute value; infinity if one is NaN. Floats are ordered as their bits are, except for the sign."""
    if not values.numel():
        return 0.0
    kind, signed, unsigned = BITS[values.dtype.itemsize]
    bits: npt.NDArray[np.signedinteger] = values.contiguous().view(kind).numpy()
    above, below = int(bits.max()), int(bits.view(unsigned).max()) - (1 << (8 * values.dtype.itemsize - 1))
    largest = float(torch.from_numpy(np.array([max(above, below, 0)], signed)).view(values.dtype))
    return math.inf if math.isnan(largest) else largest


def move(given: Tensor | Scaled, to: Tensor) -> bool:
    """`to` has the same shape. False if something became too large for its type; what is not finite before
    has been refused."""
    values, scale = (given.values, given.scale) if isinstance(given, Scaled) else (given, 1.0)
    if scale == 1.0 and values.dtype == to.dtype:
        kind = BITS[to.dtype.itemsize][0]
        np.copyto(to.view(kind).numpy(), values.view(kind).numpy())
        return True
    if to.dim() == 2 and values.t().is_contiguous():  # to multiply where it lies and then to turn it takes half as long
        lying = values.t()
        step = max(1, AT_ONCE // max(lying.shape[1], 1))
        made = torch.empty(min(step, len(lying)), lying.shape[1], dtype=to.dtype)
        for first in range(0, len(lying), step):
            some = torch.mul(_as_wide(lying[first : first + step], to), scale, out=made[: len(lying) - first])
            move(some.t(), to[:, first : first + step])
        return _fits(to)
    rows, columns = (to.shape[0], to.shape[1]) if to.dim() == 2 else (1, 1)
    step = max(1, AT_ONCE // max(rows, 1))
    if columns <= step:
        torch.mul(_as_wide(values, to), scale, out=to)
        return _fits(to)
    for first in range(0, columns, step):
        torch.mul(_as_wide(values[:, first : first + step], to), scale, out=to[:, first : first + step])
    return _fits(to)


def _as_wide(values: Tensor, to: Tensor) -> Tensor:
    """A product is rounded once, to its own type; torch would round it to that of the values first, which may be too narrow."""
    return values if values.dtype == to.dtype or values.dtype.itemsize > 2 else values.float()


def _fits(made: Tensor) -> bool:
    """Return whether the values are finite. Types with the exponent range of float32 hold every value of an adapter."""
    return torch.finfo(made.dtype).max > LARGE or largest_of(made) < math.inf
