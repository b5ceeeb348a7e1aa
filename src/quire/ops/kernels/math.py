"""Functions Triton has no portable name for."""

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """By an exponential that can vanish but not overflow."""
    small = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0, -size, size)
