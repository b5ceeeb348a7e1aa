"""Latent attention of long prompts, over the keys and values of all heads that were made of their rows.

    key     [ NOPE: made | 2 * HALF: the end of the row, the same for all heads ]

The made numbers lie one sequence after the other, and so do the rows they were made of.
"""

import triton
import triton.language as tl

from quire.ops.kernels.latent import LOG2_E, _turned
from quire.ops.kernels.launcher import launched, let_next_start, wait_for_previous


@triton.jit
def _fold(
    q, q_first, q_second, acc, peak, total, made, ends, at, high, position, made_stride, row_stride, scale,
    NOPE: tl.constexpr, NOPE_BLOCK: tl.constexpr, VALUES: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """acc, peak and total with the keys at `at` [N] taken in."""
    d, v, pair = tl.arange(0, NOPE_BLOCK), tl.arange(0, VALUE_BLOCK), tl.arange(0, HALF_BLOCK)
    first_at = 2 * pair if INTERLEAVED else pair
    second_at = 2 * pair + 1 if INTERLEAVED else HALF + pair
    there = at < high
    line = made + at.to(tl.int64)[:, None] * made_stride
    end = ends + at.to(tl.int64)[:, None] * row_stride
    turned = there[:, None] & (pair < HALF)[None, :]
    key = tl.load(line + d[None, :], mask=there[:, None] & (d < NOPE)[None, :], other=0.0)
    first = tl.load(end + first_at[None, :], mask=turned, other=0.0)
    second = tl.load(end + second_at[None, :], mask=turned, other=0.0)
    value = tl.load(line + NOPE + v[None, :], mask=there[:, None] & (v < VALUES)[None, :], other=0.0)
    logit = tl.dot(q, tl.trans(key), input_precision="ieee")
    logit = tl.dot(q_first, tl.trans(first), logit, input_precision="ieee")
    logit = tl.dot(q_second, tl.trans(second), logit, input_precision="ieee") * (scale * LOG2_E)
    if MASKED:
        logit = tl.where(there[None, :] & (at[None, :] <= position[:, None]), logit, float("-inf"))
    higher = tl.maximum(peak, tl.max(logit, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
    weight = tl.exp2(logit - base[:, None])
    fade = tl.exp2(peak - base)
    acc = tl.dot(weight.to(value.dtype), value, acc * fade[:, None], input_precision="ieee")
    return acc, higher, total * fade + tl.sum(weight, 1)


@launched
@triton.jit(do_not_specialize_on_alignment=["query", "tiles"])
def expanded_kernel(
    query,  # [K, HEADS, NOPE + 2 * HALF], as projected
    made,  # [S, HEADS, NOPE + VALUES]
    held,  # [S, RANK + 2 * HALF] the rows that they were made of
    out,  # [K, HEADS, VALUES]
    cos,  # [max_position, HALF]
    sin,  # [max_position, HALF]
    row_starts,  # [R + 1]
    kv_lengths,  # [R]
    tiles,  # [tiles, 3] row, its first token within the row, place of its first key
    query_stride,
    made_stride,
    scale,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    NOPE: tl.constexpr,
    NOPE_BLOCK: tl.constexpr,
    VALUES: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    head = tl.program_id(0)
    tile = tiles + tl.program_id(1) * 3
    row, first, place = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    start = tl.load(row_starts + row)
    count = tl.load(row_starts + row + 1) - start
    length = tl.load(kv_lengths + row)
    token = first + tl.arange(0, BLOCK_M)
    real = token < count
    lowest = length - count + first
    high = tl.minimum(lowest + BLOCK_M, length)
    position = tl.minimum(length - count + token, high - 1)
    d, v = tl.arange(0, NOPE_BLOCK), tl.arange(0, VALUE_BLOCK)
    at_token = (start + token).to(tl.int64)
    source = query + at_token * query_stride + head * (NOPE + 2 * HALF)
    q = tl.load(source[:, None] + d[None, :], mask=real[:, None] & (d < NOPE)[None, :], other=0.0)
    one, two, _first_at, _second_at, _mask = _turned(source + NOPE, cos, sin, position, real, HALF, HALF_BLOCK, INTERLEAVED)
    q_first, q_second = one.to(q.dtype), two.to(q.dtype)
    acc = tl.zeros((BLOCK_M, VALUE_BLOCK), tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    keys = made + place.to(tl.int64) * made_stride + head * (NOPE + VALUES)
    ends = held + place.to(tl.int64) * (RANK + 2 * HALF) + RANK
    clear = (lowest + 1) // BLOCK_N * BLOCK_N  # keys before it are seen by all
    n = tl.arange(0, BLOCK_N)
    for begin in tl.range(0, clear, BLOCK_N):
        acc, peak, total = _fold(
            q, q_first, q_second, acc, peak, total, keys, ends, begin + n, high, position, made_stride, RANK + 2 * HALF, scale,
            NOPE, NOPE_BLOCK, VALUES, VALUE_BLOCK, HALF, HALF_BLOCK, INTERLEAVED, False,
        )  # fmt: skip
    for begin in tl.range(clear, high, BLOCK_N):
        acc, peak, total = _fold(
            q, q_first, q_second, acc, peak, total, keys, ends, begin + n, high, position, made_stride, RANK + 2 * HALF, scale,
            NOPE, NOPE_BLOCK, VALUES, VALUE_BLOCK, HALF, HALF_BLOCK, INTERLEAVED, True,
        )  # fmt: skip
    target = out + (at_token * HEADS + head) * VALUES
    tl.store(
        target[:, None] + v[None, :],
        (acc / total[:, None]).to(out.dtype.element_ty),
        mask=real[:, None] & (v < VALUES)[None, :],
    )
