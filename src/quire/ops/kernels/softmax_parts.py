"""Softmax over parts of a row's keys, which are merged in order. Logits are powers of two and peaks are integers, so factors
between peaks are exact (`attention.py`).
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def power(exponent):
    """Return 2 ** exponent, exactly, of integers up to 0 in float32; 0 below -126."""
    return ((tl.maximum(exponent, -127.0).to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def sum_weights(weight):
    """Return the sums [M] of weights [M, N] between 0 and 1, each rounded to 23 fractional bits.

    The float32 numbers from 1 to 2 are 2 ** -23 apart, and so are their bits as integers.
    """
    fixed = (weight + 1.0).to(tl.int32, bitcast=True) - 0x3F800000
    return tl.sum(fixed, 1).to(tl.float32) * (2.0**-23)


@triton.jit
def merge_part(
    done,  # [M, DIM_BLOCK] float32: acc of the parts so far
    done_odd,
    done_peak,  # [M]
    done_total,  # [M]
    acc,  # the next part
    acc_odd,
    peak,  # [M]; -inf: no visible keys
    total,
    BITS: tl.constexpr,
):
    """Return the parts so far after the next one."""
    higher = tl.maximum(done_peak, peak)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    fade, share = power(done_peak - base), power(peak - base)
    done = done * fade[:, None] + acc * share[:, None]
    if BITS > 0:
        done_odd = done_odd * fade[:, None] + acc_odd * share[:, None]
    return done, done_odd, higher, done_total * fade + total * share
