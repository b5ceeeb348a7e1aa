"""Floats of 8 bits in float32 arithmetic, the same bits on every GPU, and in the interpreter, as torch's own conversions.

BITS are those behind the point: 3 (e4m3fn) or 2 (e5m2). The exponent of such a number is put where float32 has its own, and
what that makes too little is made up for by a factor; numbers below the least normal one come out right as well.
"""

import triton
import triton.language as tl


@triton.jit
def wide_float8(numbers, BITS: tl.constexpr):
    """uint8 -> float32. What is not a number comes out as some number: its scale is none either."""
    bits = numbers.to(tl.int32)
    UP: tl.constexpr = 23 - BITS
    MISSING: tl.constexpr = 2.0**120 if BITS == 3 else 2.0**112
    small = ((bits & 0x7F) << UP).to(tl.float32, bitcast=True)
    size = small * MISSING
    return tl.where(bits >= 128, -size, size)


@triton.jit
def narrow_float8(x, BITS: tl.constexpr):
    """float32 within what 8 bits can hold -> uint8, to the nearest, of two the even one."""
    UP: tl.constexpr = 23 - BITS
    LEAST: tl.constexpr = 2.0**-6 if BITS == 3 else 2.0**-14  # normal number
    STEPS: tl.constexpr = 2.0**9 if BITS == 3 else 2.0**16  # in one, below that
    MISSING: tl.constexpr = (120 if BITS == 3 else 112) << BITS
    EVEN: tl.constexpr = 12582912.0  # to which float32 has no fractions
    size = tl.abs(x)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + ((1 << (UP - 1)) - 1) + ((bits >> UP) & 1)) >> UP) - MISSING
    below = ((tl.where(size < LEAST, size, 0.0) * STEPS + EVEN) - EVEN).to(tl.int32)
    code = tl.where(size < LEAST, below, normal)
    return (code | tl.where(x < 0, 128, 0)).to(tl.uint8)
