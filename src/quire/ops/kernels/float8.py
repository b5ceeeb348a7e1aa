"""8-bit floats with the same bits as torch's conversions, on every GPU and in the interpreter.

BITS are mantissa bits: 3 (e4m3fn) or 2 (e5m2). The exponent is moved to where float32 has its own, and a factor makes up for
the difference of biases; subnormal numbers are exact as well.
"""

import triton
import triton.language as tl

# by dtype and BITS: PTX type, right shift of exponent and mantissa in the upper byte of 16 bits, mask of both after it, and the
# difference of exponent biases as a factor
WIDENED = {
    ("bf16", 3): ("bf16x2", 4, 0x07F007F0, 0x7B807B80),
    ("bf16", 2): ("bf16x2", 3, 0x0FE00FE0, 0x77807780),
    ("fp16", 3): ("f16x2", 1, 0x3F803F80, 0x5C005C00),
    ("fp16", 2): ("f16x2", 0, 0x7F007F00, 0x3C003C00),
}


@triton.constexpr_function
def _widening(name, bits, second):
    """Return PTX that converts the first (or second) bytes of two words in a register, $1, to two 16-bit numbers, $0. The fma
    adds -0, which preserves -0."""
    kind, shift, mask, factor = WIDENED[name, bits]
    lines = [".reg .b32 half, size, factor, zero;", f"mov.b32 factor, {factor:#x};", "mov.b32 zero, 0x80008000;"]
    lines += [f"prmt.b32 half, 0, $1, {0x7050 if second else 0x6040:#x};"]
    lines += [f"shr.u32 size, half, {shift};", f"and.b32 size, size, {mask:#x};", "and.b32 half, half, 0x80008000;"]
    lines += ["or.b32 half, half, size;", f"fma.rn.{kind} $0, half, factor, zero;"]
    return "{ " + " ".join(lines) + " }"


@triton.jit
def wide_float8(numbers, BITS: tl.constexpr):
    """Return codes 0 ... 255 as float32. NaN becomes some finite value: its scale is NaN, too."""
    bits = numbers.to(tl.int32)
    UP: tl.constexpr = 23 - BITS
    MISSING: tl.constexpr = 2.0**120 if BITS == 3 else 2.0**112
    small = ((bits & 0x7F) << UP).to(tl.float32, bitcast=True)
    size = small * MISSING
    return tl.where(bits >= 128, -size, size)


@triton.jit
def unpack_float8(words, KIND: tl.constexpr, BITS: tl.constexpr):
    """Return the first and second values of words of two, int16, in dtype KIND, which represents them exactly."""
    if tl.bfloat16 == KIND:
        first = tl.inline_asm_elementwise(_widening("bf16", BITS, False), "=r,r", [words], tl.bfloat16, True, 2)
        second = tl.inline_asm_elementwise(_widening("bf16", BITS, True), "=r,r", [words], tl.bfloat16, True, 2)
    elif tl.float16 == KIND:
        first = tl.inline_asm_elementwise(_widening("fp16", BITS, False), "=r,r", [words], tl.float16, True, 2)
        second = tl.inline_asm_elementwise(_widening("fp16", BITS, True), "=r,r", [words], tl.float16, True, 2)
    else:
        first, second = wide_float8(words & 255, BITS), wide_float8((words >> 8) & 255, BITS)
    return first, second


@triton.jit
def narrow_float8(x, BITS: tl.constexpr):
    """Round float32 values within the 8-bit range to uint8 codes, to nearest, ties to even."""
    UP: tl.constexpr = 23 - BITS
    LEAST: tl.constexpr = 2.0**-6 if BITS == 3 else 2.0**-14  # smallest normal number
    STEPS: tl.constexpr = 2.0**9 if BITS == 3 else 2.0**16  # steps per one below it
    MISSING: tl.constexpr = (120 if BITS == 3 else 112) << BITS
    EVEN: tl.constexpr = 12582912.0  # float32 has no fractions at this magnitude
    size = tl.abs(x)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + ((1 << (UP - 1)) - 1) + ((bits >> UP) & 1)) >> UP) - MISSING
    below = ((tl.where(size < LEAST, size, 0.0) * STEPS + EVEN) - EVEN).to(tl.int32)
    code = tl.where(size < LEAST, below, normal)
    return (code | tl.where(x < 0, 128, 0)).to(tl.uint8)
