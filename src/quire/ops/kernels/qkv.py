"""Head norms, RoPE and the write to the KV cache in one launch, over the output of the merged projection.

A program handles some heads of one token. Query heads are followed by key heads, then value heads, in the order of a page's
lanes: head - HEADS is the lane.

    a head   [ first half of the pairs | second half | rest without RoPE ]       or, interleaved, [ pair | pair ... | rest ]
"""

import triton
import triton.language as tl
from torch import Tensor, finfo, uint8

from quire.ops.arguments import HeadNorms, Rotation
from quire.ops.kernels.float8 import narrow_float8
from quire.ops.kernels.launcher import cdiv, launched, let_next_start, overlapping, power_of_two, wait_for_previous
from quire.ops.kv import MANTISSA_BITS, MIN_SCALE, is_contiguous_by_page, kv_scales

HEADS_PER_PROGRAM = 8


@triton.jit
def _normed(x, factor, query_weight, key_weight, at, inside, offset, is_query, KIND: tl.constexpr):
    """Return normalized x [heads, n] in float32, rounded to KIND as a norm's output would be."""
    for_query = tl.load(query_weight + at, mask=inside, other=0.0).to(tl.float32)
    for_key = tl.load(key_weight + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.where(is_query[:, None], for_query[None, :], for_key[None, :]) + offset
    return (x * factor[:, None] * weight).to(KIND).to(tl.float32)


@triton.jit
def _narrow(x, scale, BITS: tl.constexpr, MOST: tl.constexpr):
    """Quantize x [heads, n] float32 to uint8 by the scale [heads] of each."""
    small = tl.div_rn(x, scale[:, None])
    return narrow_float8(tl.where(small > MOST, MOST, tl.where(small < -MOST, -MOST, small)), BITS)


@launched
@triton.jit(do_not_specialize_on_alignment=["write", "positions"])
def _place_heads(
    qkv,  # [T, (HEADS + 2 * KV_HEADS) * HEAD_DIM]; queries are written back
    kv,  # [pages, 2 * KV_HEADS, PAGE_SIZE, HEAD_DIM]
    scales,  # [pages, 2 * KV_HEADS, PAGE_SIZE] float32, if BITS
    given,  # [2 * KV_HEADS] float32, if GIVEN
    write,  # [T]
    positions,  # [T]
    cos,  # [max_position, HALF]
    sin,  # [max_position, HALF]
    query_weight,  # [HEAD_DIM]
    key_weight,  # [HEAD_DIM]
    qkv_stride,
    page_stride,
    eps,
    offset,
    BITS: tl.constexpr,  # mantissa bits of 8-bit values; 0: 16 or 32 bits
    GIVEN: tl.constexpr,
    MOST: tl.constexpr,  # largest 8-bit value
    LEAST: tl.constexpr,  # smallest scale
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    ROTATE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    exists = head < HEADS + 2 * KV_HEADS
    is_query = head < HEADS
    is_value = head >= HEADS + KV_HEADS
    REST: tl.constexpr = HEAD_DIM - 2 * HALF
    pair = tl.arange(0, HALF_BLOCK)
    in_half = pair < HALF
    first_at = 2 * pair if INTERLEAVED else pair
    second_at = 2 * pair + 1 if INTERLEAVED else HALF + pair
    rest_at = 2 * HALF + tl.arange(0, REST_BLOCK)
    in_rest = rest_at < HEAD_DIM
    source = qkv + token * qkv_stride + head[:, None] * HEAD_DIM
    KIND: tl.constexpr = qkv.dtype.element_ty
    whole = exists[:, None] & in_half[None, :]
    first = tl.load(source + first_at[None, :], mask=whole, other=0.0).to(tl.float32)
    second = tl.load(source + second_at[None, :], mask=whole, other=0.0).to(tl.float32)
    rest = first
    rest_whole = whole
    if REST > 0:
        rest_whole = exists[:, None] & in_rest[None, :]
        rest = tl.load(source + rest_at[None, :], mask=rest_whole, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        if REST > 0:
            squares += tl.sum(rest * rest, 1)
        factor = tl.rsqrt(squares / HEAD_DIM + eps)
        is_unchanged = is_value[:, None]
        one = _normed(first, factor, query_weight, key_weight, first_at, in_half, offset, is_query, KIND)
        two = _normed(second, factor, query_weight, key_weight, second_at, in_half, offset, is_query, KIND)
        first = tl.where(is_unchanged, first, one)
        second = tl.where(is_unchanged, second, two)
        if REST > 0:
            three = _normed(rest, factor, query_weight, key_weight, rest_at, in_rest, offset, is_query, KIND)
            rest = tl.where(is_unchanged, rest, three)
    if ROTATE:
        angle = tl.load(positions + token) * HALF + pair
        c = tl.where(is_value[:, None], 1.0, tl.load(cos + angle, mask=in_half, other=1.0)[None, :])
        s = tl.where(is_value[:, None], 0.0, tl.load(sin + angle, mask=in_half, other=0.0)[None, :])
        rotated = first * c - second * s
        second = second * c + first * s
        first = rotated
    place = tl.load(write + token)
    lane = head - HEADS
    target = kv + (place // PAGE_SIZE) * page_stride + (lane[:, None] * PAGE_SIZE + place % PAGE_SIZE) * HEAD_DIM
    to_cache = whole & ~is_query[:, None]
    if BITS > 0:
        cached = exists & ~is_query
        scale = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
        broken = tl.sum(first * 0.0, 1) + tl.sum(second * 0.0, 1)  # NaN if any value is NaN or infinite
        if REST > 0:
            scale = tl.maximum(scale, tl.max(tl.abs(rest), 1))
            broken += tl.sum(rest * 0.0, 1)
        scale = tl.div_rn(scale, MOST)
        scale = tl.where(scale < LEAST, LEAST, scale)
        if GIVEN:
            scale = tl.load(given + lane, mask=cached, other=1.0)
        where_scale = scales + (place // PAGE_SIZE) * (page_stride // 4) + lane * PAGE_SIZE + place % PAGE_SIZE
        tl.store(where_scale, scale + broken, mask=cached)
        tl.store(target + first_at[None, :], _narrow(first, scale, BITS, MOST), mask=to_cache)
        tl.store(target + second_at[None, :], _narrow(second, scale, BITS, MOST), mask=to_cache)
        if REST > 0:
            tl.store(target + rest_at[None, :], _narrow(rest, scale, BITS, MOST), mask=rest_whole & ~is_query[:, None])
    else:
        tl.store(target + first_at[None, :], first.to(kv.dtype.element_ty), mask=to_cache)
        tl.store(target + second_at[None, :], second.to(kv.dtype.element_ty), mask=to_cache)
        if REST > 0:
            tl.store(target + rest_at[None, :], rest.to(kv.dtype.element_ty), mask=rest_whole & ~is_query[:, None])
    if ROTATE or NORM:
        back = whole & is_query[:, None]
        tl.store(source + first_at[None, :], first.to(KIND), mask=back)
        tl.store(source + second_at[None, :], second.to(KIND), mask=back)
    if NORM and REST > 0:
        tl.store(source + rest_at[None, :], rest.to(KIND), mask=rest_whole & is_query[:, None])


def place_heads(
    qkv: Tensor,
    kv: Tensor,
    write: Tensor,
    positions: Tensor,
    rotation: Rotation | None,
    norms: HeadNorms | None,
    given: Tensor | None = None,
) -> Tensor:
    _, _, kv_heads, page_size, head_dim = kv.shape
    assert is_contiguous_by_page(kv) and qkv.stride(1) == 1
    tokens, lanes = qkv.shape[0], qkv.shape[1] // head_dim
    heads = lanes - 2 * kv_heads
    half = head_dim // 2 if rotation is None else rotation.cos.shape[1]
    cos, sin = (qkv, qkv) if rotation is None else (rotation.cos, rotation.sin)
    query_weight, key_weight = (qkv, qkv) if norms is None else (norms.query, norms.key)
    scales = kv_scales(kv)
    cache, scales_or_cache = (kv, kv) if scales is None else (kv.view(uint8), scales)
    if tokens:
        _place_heads[(tokens, cdiv(lanes, HEADS_PER_PROGRAM))](
            qkv, cache, scales_or_cache, scales_or_cache if given is None else given, write, positions, cos, sin,
            query_weight, key_weight,
            qkv.stride(0), kv.stride(0), 0.0 if norms is None else norms.eps, 0.0 if norms is None else norms.offset,
            BITS=MANTISSA_BITS.get(kv.dtype, 0), GIVEN=given is not None,
            MOST=0.0 if scales is None else finfo(kv.dtype).max, LEAST=MIN_SCALE,
            HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, PAGE_SIZE=page_size, HALF=half,
            ROTATE=rotation is not None, INTERLEAVED=rotation is not None and rotation.interleaved,
            NORM=norms is not None, HALF_BLOCK=power_of_two(half),
            REST_BLOCK=power_of_two(max(head_dim - 2 * half, 1)), HEAD_BLOCK=HEADS_PER_PROGRAM,
            **overlapping(),
        )  # fmt: skip
    return qkv.as_strided((tokens, heads, head_dim), (qkv.stride(0), head_dim, 1))
