"""Attention over pages: tiles of several queries of one row, and splits of the keys of rows with a single query.

The query heads that share a KV head are rows of one matrix (`SHARE` per token), so a key is read once for all of them. Logits
are powers of two.

    tile    m = token * SHARE + head      x      keys of the row, as far as the tile's queries see
    split   m = head                      x      keys split * SPLIT ... (split + 1) * SPLIT
    shared  m = row * SHARE + head        x      the same, of many rows with the same pages for these keys

In the fixed order (ops/order.py) all kernels compute the same bits for a query, so its output depends on its own queries, keys
and values only:

- Key blocks begin at multiples of BLOCK_N, which all kernels share, splits at multiples of SPLIT. A tile also attends split by
  split. The parts of a row are merged in the order of their keys; the first one is merged into the sinks.
- Tensor cores accumulate the products of one element in the same order for every tile size.
- A peak is rounded up to an integer. Factors between peaks are then powers of two and products with them exact, whether or not
  the compiler contracts them into fma.
- Weights are summed in fixed point, which is exact in any order (`sum_weights`).
- A block or a part without visible keys changes nothing.

8-bit values are read in pairs, as words of 16 bits, which copies to tensor cores can transpose: a head's even and odd
dimensions become two matrices, `_odd` the second, and are interleaved when stored.
"""

import triton
import triton.language as tl

from quire.ops.kernels.float8 import unpack_float8
from quire.ops.kernels.launcher import launched, let_next_start, tanh, wait_for_previous
from quire.ops.kernels.softmax_parts import LOG2_E, merge_part, power, sum_weights

LOADED_PARTS = tl.constexpr(8)  # at a time, when merged


@triton.jit
def _read(
    keys,  # pointer to this KV head in page 0
    scales,  # the same of its scales
    table,  # pointer to the row's page table
    at,  # [N] positions of the keys
    low,  # first position that may be read
    high,  # position after the last one
    page_stride,
    value_offset,
    BITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return keys and values, each [N, DIM_BLOCK] or half as many words, and the scales [N] of both if BITS. Masked elements
    are zeros.
    """
    PARTS: tl.constexpr = 2 if BITS > 0 else 1  # values read at once; strides count values
    dim = tl.arange(0, DIM_BLOCK // PARTS)
    if MASKED:
        inside = (at >= low) & (at < high)
        page = tl.load(table + at // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
    else:
        inside = at >= 0
        page = tl.load(table + at // PAGE_SIZE).to(tl.int64)
    place = keys + (page * (page_stride // PARTS) + (at % PAGE_SIZE) * (HEAD_DIM // PARTS))[:, None] + dim[None, :]
    if MASKED or HEAD_DIM != DIM_BLOCK:
        readable = inside[:, None] & (dim < HEAD_DIM // PARTS)[None, :]
        key = tl.load(place, mask=readable, other=0)
        value = tl.load(place + value_offset // PARTS, mask=readable, other=0)
    else:
        key = tl.load(place)
        value = tl.load(place + value_offset // PARTS)
    key_scale, value_scale = 1.0, 1.0
    if BITS > 0:  # page_stride counts bytes, and a scale has four
        where_scale = scales + page * (page_stride // 4) + at % PAGE_SIZE
        key_scale = tl.load(where_scale, mask=inside, other=0.0)
        value_scale = tl.load(where_scale + value_offset // HEAD_DIM, mask=inside, other=0.0)
    return key, value, key_scale, value_scale


@triton.jit
def _before_parts(sinks, head, real, SINKS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return peak and total [M] that the first part is merged into."""
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if SINKS:
        sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32)
        peak = tl.ceil(sink * LOG2_E)
        total = tl.exp2(tl.fma(sink, tl.full((BLOCK_M,), LOG2_E, tl.float32), -peak))
    return peak, total


@triton.jit
def _fold(
    query,  # [M, DIM_BLOCK]; if BITS, the even dimensions
    query_odd,  # if BITS, the odd dimensions
    acc,  # [M, DIM_BLOCK] float32
    acc_odd,
    peak,  # [M] largest logit of this part so far, rounded up to an integer
    total,  # [M] sum of the weights relative to it
    done,  # of the parts before, as in `merge_part`; if SPLIT
    done_odd,
    done_peak,
    done_total,
    key,  # [N, DIM_BLOCK], if BITS words
    value,  # [N, DIM_BLOCK], if BITS words
    key_scale,  # [N], if BITS
    value_scale,  # [N], if BITS
    begin,  # position of the first key
    low,  # first visible position
    high,  # position after the last one
    position,  # [M] positions of the queries
    slope,  # [M] increase of a logit per key position, before scaling
    scale,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SLOPES: tl.constexpr,
    BITS: tl.constexpr,
    MASKED: tl.constexpr,
    SPLIT: tl.constexpr,  # keys after which a part is merged; 0: the caller merges; -1: never, and weights have any order
    BLOCK_N: tl.constexpr,
):
    """Return acc, peak and total after these keys, and the merged parts. Scales belong to whole keys and values: cheaper to
    apply after the dot product.
    """
    at = begin + tl.arange(0, BLOCK_N)
    if BITS > 0:
        even, odd = unpack_float8(key, query.dtype, BITS)
        logit = tl.dot(query, tl.trans(even), input_precision="ieee")
        logit = tl.dot(query_odd, tl.trans(odd), logit, input_precision="ieee") * key_scale[None, :]
    else:
        logit = tl.dot(query, tl.trans(key), input_precision="ieee")
    if SPLIT > 0:  # noqa: SIM102 - a constant
        # At the end of a block, Triton 3.9 would read acc before the asynchronous dot product has ended.
        if begin % SPLIT == 0:
            done, done_odd, done_peak, done_total = merge_part(
                done, done_odd, done_peak, done_total, acc, acc_odd, peak, total, BITS
            )  # fmt: skip
            peak = tl.full(peak.shape, float("-inf"), tl.float32)  # resets acc and total: their factor is 0
    if SOFT_CAP > 0:
        logit = tanh(logit * (scale / SOFT_CAP))
        scale = SOFT_CAP
    if SLOPES:
        logit = tl.fma(slope[:, None], at[None, :].to(tl.float32), logit)
    scale *= LOG2_E
    if MASKED:
        visible = ((at >= low) & (at < high))[None, :] & (at[None, :] <= position[:, None])
        if WINDOW > 0:
            visible &= at[None, :] > position[:, None] - WINDOW
        logit = tl.where(visible, logit, float("-inf"))
    higher = tl.maximum(peak, tl.ceil(tl.max(logit, 1) * scale))
    base = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
    weight = tl.exp2(tl.fma(logit, scale, -base[:, None]))
    fade = power(peak - base)
    total = total * fade + (tl.sum(weight, 1) if SPLIT < 0 else sum_weights(weight))
    if BITS > 0:
        even, odd = unpack_float8(value, query.dtype, BITS)
        if query.dtype == tl.float16:  # weights times scales would underflow
            even = (even.to(tl.float32) * value_scale[:, None]).to(query.dtype)
            odd = (odd.to(tl.float32) * value_scale[:, None]).to(query.dtype)
        else:
            weight *= value_scale[None, :]
        weight = weight.to(query.dtype)
        acc = tl.dot(weight, even, acc * fade[:, None], input_precision="ieee")
        acc_odd = tl.dot(weight, odd, acc_odd * fade[:, None], input_precision="ieee")
    else:
        acc = tl.dot(weight.to(value.dtype), value, acc * fade[:, None], input_precision="ieee")
    return acc, acc_odd, higher, total, done, done_odd, done_peak, done_total


@triton.jit
def _attend(
    query, query_odd, acc, acc_odd, peak, total, done, done_odd, done_peak, done_total, keys, scales, table, begin, low, high,
    position, slope, page_stride, value_offset, scale,
    BITS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, SLOPES: tl.constexpr, MASKED: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Read keys and values, and fold them in."""
    key, value, key_scale, value_scale = _read(
        keys, scales, table, begin + tl.arange(0, BLOCK_N), low, high, page_stride, value_offset,
        BITS, HEAD_DIM, DIM_BLOCK, PAGE_SIZE, MASKED,
    )  # fmt: skip
    return _fold(
        query, query_odd, acc, acc_odd, peak, total, done, done_odd, done_peak, done_total, key, value, key_scale, value_scale,
        begin, low, high, position, slope, scale, WINDOW, SOFT_CAP, SLOPES, BITS, MASKED, SPLIT, BLOCK_N,
    )  # fmt: skip


@triton.jit
def _halves(query, BLOCK_M: tl.constexpr, DIM_BLOCK: tl.constexpr, BITS: tl.constexpr):
    """Return queries and zero accumulators, each split into even and odd dimensions if BITS."""
    if BITS > 0:
        query, query_odd = tl.split(tl.reshape(query, (BLOCK_M, DIM_BLOCK // 2, 2)))
        acc, acc_odd = tl.zeros((BLOCK_M, DIM_BLOCK // 2), tl.float32), tl.zeros((BLOCK_M, DIM_BLOCK // 2), tl.float32)
    else:
        query_odd, acc, acc_odd = 0.0, tl.zeros((BLOCK_M, DIM_BLOCK), tl.float32), 0.0
    return query, query_odd, acc, acc_odd


@triton.jit
def _tile(
    query, sinks, row_starts, kv_lengths, row, first, kv_head, query_stride,
    SHARE: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, SINKS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Return a tile's queries, the peak and total before its first part, positions, the lowest position and the one after the
    highest, tokens, heads, and the mask of real elements.
    """
    start = tl.load(row_starts + row)
    count = tl.load(row_starts + row + 1) - start
    length = tl.load(kv_lengths + row)
    m = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, DIM_BLOCK)
    TOKENS: tl.constexpr = BLOCK_M // SHARE
    token = first + m // SHARE
    head = kv_head * SHARE + m % SHARE
    real = (m < TOKENS * SHARE) & (token < count)
    lowest = length - count + first
    high = tl.minimum(lowest + TOKENS, length)
    position = tl.minimum(length - count + token, high - 1)  # padding attends to existing keys
    token = (start + token).to(tl.int64)
    stored = real[:, None] & (dim < HEAD_DIM)[None, :]
    q = tl.load(query + (token * query_stride + head * HEAD_DIM)[:, None] + dim[None, :], mask=stored, other=0.0)
    peak, total = _before_parts(sinks, head, real, SINKS, BLOCK_M)
    return q, peak, total, position, lowest, high, token, head, stored


@triton.jit
def _seen(lowest, high, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the first key that queries from `lowest` to before `high` see, where its block begins, and the begin and end of
    the blocks that all of them see.
    """
    low = 0
    begin = 0
    if WINDOW > 0:
        low = tl.maximum(0, lowest - WINDOW + 1)
        begin = tl.cdiv(tl.maximum(high - WINDOW, low), BLOCK_N) * BLOCK_N
    end = tl.maximum(begin, (lowest + 1) // BLOCK_N * BLOCK_N)
    return low, low // BLOCK_N * BLOCK_N, begin, end


@launched
@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["tiles"])
def tiles_kernel(
    query,  # [T, heads, HEAD_DIM]
    kv,  # [pages, 2, kv_heads, PAGE_SIZE, HEAD_DIM], if BITS words of two
    scales,  # [pages, 2, kv_heads, PAGE_SIZE] float32, if BITS
    out,  # [T, heads, HEAD_DIM]
    sinks,  # [heads], or ALiBi slopes
    tables,  # [R, max_pages]
    row_starts,  # [R + 1]
    kv_lengths,  # [R]
    tiles,  # [tiles, 3] row (-1: nothing to do), its first token within the row, unused
    query_stride,
    out_stride,
    page_stride,
    value_offset,
    table_stride,
    scale,
    SHARE: tl.constexpr,
    BITS: tl.constexpr,  # mantissa bits of 8-bit values; 0: 16 or 32 bits
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
    SLOPES: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    kv_head = tl.program_id(0)
    tile = tiles + tl.program_id(1) * 3
    row, first = tl.load(tile), tl.load(tile + 1)
    if row < 0:
        return
    q, done_peak, done_total, position, lowest_query, high, token, head, stored = _tile(
        query, sinks, row_starts, kv_lengths, row, first, kv_head, query_stride, SHARE, HEAD_DIM, DIM_BLOCK, SINKS, BLOCK_M
    )
    q, q_odd, acc, acc_odd = _halves(q, BLOCK_M, DIM_BLOCK, BITS)
    done, done_odd = acc, acc_odd
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    keys = kv + kv_head * (PAGE_SIZE * HEAD_DIM // (2 if BITS > 0 else 1))
    scales += kv_head * PAGE_SIZE
    table = tables + row.to(tl.int64) * table_stride
    slope = tl.load(sinks + head).to(tl.float32) / scale if SLOPES else peak
    low, start, clear, edge = _seen(lowest_query, high, WINDOW, BLOCK_N)
    if WINDOW > 0:
        for begin in tl.range(start, clear, BLOCK_N):
            acc, acc_odd, peak, total, done, done_odd, done_peak, done_total = _attend(
                q, q_odd, acc, acc_odd, peak, total, done, done_odd, done_peak, done_total, keys, scales, table, begin, low,
                high, position, slope, page_stride, value_offset, scale,
                BITS, HEAD_DIM, DIM_BLOCK, PAGE_SIZE, WINDOW, SOFT_CAP, SLOPES, True, SPLIT, BLOCK_N,
            )  # fmt: skip
    for begin in tl.range(clear, edge, BLOCK_N):
        acc, acc_odd, peak, total, done, done_odd, done_peak, done_total = _attend(
            q, q_odd, acc, acc_odd, peak, total, done, done_odd, done_peak, done_total, keys, scales, table, begin, low, high,
            position, slope, page_stride, value_offset, scale,
            BITS, HEAD_DIM, DIM_BLOCK, PAGE_SIZE, WINDOW, SOFT_CAP, SLOPES, False, SPLIT, BLOCK_N,
        )  # fmt: skip
    for begin in tl.range(edge, high, BLOCK_N):
        acc, acc_odd, peak, total, done, done_odd, done_peak, done_total = _attend(
            q, q_odd, acc, acc_odd, peak, total, done, done_odd, done_peak, done_total, keys, scales, table, begin, low, high,
            position, slope, page_stride, value_offset, scale,
            BITS, HEAD_DIM, DIM_BLOCK, PAGE_SIZE, WINDOW, SOFT_CAP, SLOPES, True, SPLIT, BLOCK_N,
        )  # fmt: skip
    done, done_odd, done_peak, done_total = merge_part(done, done_odd, done_peak, done_total, acc, acc_odd, peak, total, BITS)
    if BITS > 0:
        done = tl.interleave(done, done_odd)
    where_out = out + (token * out_stride + head * HEAD_DIM)[:, None] + tl.arange(0, DIM_BLOCK)[None, :]
    tl.store(where_out, (done / done_total[:, None]).to(out.dtype.element_ty), mask=stored)


@launched
@triton.jit(do_not_specialize=["table_stride", "first_head", "size"], do_not_specialize_on_alignment=["copies"])
def copy_kernel(
    kv,  # [pages, 2, kv_heads, PAGE_SIZE, HEAD_DIM], if BITS words of two
    scales,  # [pages, 2, kv_heads, PAGE_SIZE] float32, if BITS
    keys,  # [2, heads at once, size, HEAD_DIM]: the values lie after the keys
    tables,  # [R, max_pages]
    row_starts,  # [R + 1]
    kv_lengths,  # [R]
    copies,  # [copies, 3] row, its first key, index in the copy
    page_stride,
    value_offset,
    table_stride,
    first_head,
    size,
    BITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Copy BLOCK keys and values of one head; zeros where no token of the row sees a key."""
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    head = tl.program_id(0)
    item = copies + tl.program_id(1) * 3
    row, first, place = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    at = first + tl.arange(0, BLOCK)
    lane = kv + (first_head + head) * (PAGE_SIZE * HEAD_DIM // (2 if BITS > 0 else 1))
    scales += (first_head + head) * PAGE_SIZE
    table = tables + row.to(tl.int64) * table_stride
    length = tl.load(kv_lengths + row)
    low = 0
    if WINDOW > 0:
        low = length - (tl.load(row_starts + row + 1) - tl.load(row_starts + row)) - WINDOW + 1
    key, value, key_scale, value_scale = _read(
        lane, scales, table, at, low, length, page_stride, value_offset, BITS, HEAD_DIM, HEAD_DIM, PAGE_SIZE, True
    )
    if BITS > 0:
        kind: tl.constexpr = keys.dtype.element_ty
        even, odd = unpack_float8(key, tl.float32, BITS)
        key = (tl.interleave(even, odd) * key_scale[:, None]).to(kind)
        even, odd = unpack_float8(value, tl.float32, BITS)
        value = (tl.interleave(even, odd) * value_scale[:, None]).to(kind)
    rows = head.to(tl.int64) * size + place + tl.arange(0, BLOCK)
    target = keys + rows[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(target, key)
    tl.store(target + tl.num_programs(0).to(tl.int64) * size * HEAD_DIM, value)


@launched
@triton.jit(do_not_specialize=["first_head", "size"], do_not_specialize_on_alignment=["tiles"])
def long_tiles_kernel(
    query,  # [T, heads, HEAD_DIM]
    out,  # [T, heads, HEAD_DIM]
    sinks,  # [heads], or ALiBi slopes
    row_starts,  # [R + 1]
    kv_lengths,  # [R]
    tiles,  # [tiles, 3] row, its first token within the row, index of its key 0, which may be virtual
    query_stride,
    out_stride,
    first_head,
    size,
    scale,
    keys,  # descriptor of [heads at once * size, HEAD_DIM]
    values,  # descriptor of the same shape
    SHARE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
    SLOPES: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The same as tiles_kernel over contiguous keys and values: blocks are fetched by the copy engine (TMA)."""
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    kv_head = first_head + tl.program_id(0)
    tile = tiles + tl.program_id(1) * 3
    row, first, place = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    q, done_peak, done_total, position, lowest_query, high, token, head, stored = _tile(
        query, sinks, row_starts, kv_lengths, row, first, kv_head, query_stride, SHARE, HEAD_DIM, HEAD_DIM, SINKS, BLOCK_M
    )
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    done = acc
    odd = tl.zeros((1,), tl.float32)  # only for 8-bit values
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    slope = tl.load(sinks + head).to(tl.float32) / scale if SLOPES else peak
    low, start, clear, edge = _seen(lowest_query, high, WINDOW, BLOCK_N)
    base = tl.program_id(0) * size + place
    if WINDOW > 0:
        for begin in tl.range(start, clear, BLOCK_N):
            key, value = keys.load([base + begin, 0]), values.load([base + begin, 0])
            acc, odd, peak, total, done, odd, done_peak, done_total = _fold(
                q, q, acc, odd, peak, total, done, odd, done_peak, done_total, key, value, 1.0, 1.0, begin, low, high,
                position, slope, scale, WINDOW, SOFT_CAP, SLOPES, 0, True, SPLIT, BLOCK_N,
            )  # fmt: skip
    for begin in tl.range(clear, edge, BLOCK_N):
        key, value = keys.load([base + begin, 0]), values.load([base + begin, 0])
        acc, odd, peak, total, done, odd, done_peak, done_total = _fold(
            q, q, acc, odd, peak, total, done, odd, done_peak, done_total, key, value, 1.0, 1.0, begin, low, high,
            position, slope, scale, WINDOW, SOFT_CAP, SLOPES, 0, False, SPLIT, BLOCK_N,
        )  # fmt: skip
    for begin in tl.range(edge, high, BLOCK_N):
        key, value = keys.load([base + begin, 0]), values.load([base + begin, 0])
        acc, odd, peak, total, done, odd, done_peak, done_total = _fold(
            q, q, acc, odd, peak, total, done, odd, done_peak, done_total, key, value, 1.0, 1.0, begin, low, high,
            position, slope, scale, WINDOW, SOFT_CAP, SLOPES, 0, True, SPLIT, BLOCK_N,
        )  # fmt: skip
    done, _, done_peak, done_total = merge_part(done, odd, done_peak, done_total, acc, odd, peak, total, 0)
    where_out = out + (token * out_stride + head * HEAD_DIM)[:, None] + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(where_out, (done / done_total[:, None]).to(out.dtype.element_ty), mask=stored)


@launched
@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["splits"])
def splits_kernel(
    query,  # [T, heads, HEAD_DIM]
    kv,  # [pages, 2, kv_heads, PAGE_SIZE, HEAD_DIM], if BITS words of two
    scales,  # [pages, 2, kv_heads, PAGE_SIZE] float32, if BITS
    out,  # [T, heads, HEAD_DIM]
    parts,  # [parts, heads, HEAD_DIM] float32: values times weights
    peaks,  # [parts, heads] float32
    totals,  # [parts, heads] float32
    sinks,  # [heads], or ALiBi slopes
    tables,  # [R, max_pages]
    row_starts,  # [R + 1]
    splits,  # [splits, 4] row (-1: nothing to do), split of its keys, index among the parts (-1: the only one), key length
    query_stride,
    out_stride,
    page_stride,
    value_offset,
    table_stride,
    scale,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    BITS: tl.constexpr,  # mantissa bits of 8-bit values; 0: 16 or 32 bits
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
    SLOPES: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    kv_head = tl.program_id(0)
    item = splits + tl.program_id(1) * 4
    row, split, part, length = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    if row < 0:
        return
    token = tl.load(row_starts + row).to(tl.int64)
    m = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, DIM_BLOCK)
    head = kv_head * SHARE + m
    real = m < SHARE
    stored = real[:, None] & (dim < HEAD_DIM)[None, :]
    where_q = query + token * query_stride + (head * HEAD_DIM)[:, None] + dim[None, :]
    q, q_odd, acc, acc_odd = _halves(tl.load(where_q, mask=stored, other=0.0), BLOCK_M, DIM_BLOCK, BITS)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(0, length - WINDOW)
    keys = kv + kv_head * (PAGE_SIZE * HEAD_DIM // (2 if BITS > 0 else 1))
    scales += kv_head * PAGE_SIZE
    table = tables + row.to(tl.int64) * table_stride
    begin, high = split * SPLIT, tl.minimum(length, (split + 1) * SPLIT)
    begin = tl.maximum(begin, low // BLOCK_N * BLOCK_N)
    position = tl.zeros((BLOCK_M,), tl.int32) + (length - 1)
    slope = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) / scale if SLOPES else peak
    for at in tl.range(begin, high, BLOCK_N):
        acc, acc_odd, peak, total, _, _, _, _ = _attend(
            q, q_odd, acc, acc_odd, peak, total, 0, 0, 0, 0, keys, scales, table, at, low, high,
            position, slope, page_stride, value_offset, scale,
            BITS, HEAD_DIM, DIM_BLOCK, PAGE_SIZE, WINDOW, SOFT_CAP, SLOPES, True, 0, BLOCK_N,
        )  # fmt: skip
    if BITS > 0:
        acc = tl.interleave(acc, acc_odd)
    if part < 0:
        done = tl.zeros((BLOCK_M, DIM_BLOCK), tl.float32)
        done_peak, done_total = _before_parts(sinks, head, real, SINKS, BLOCK_M)
        done, _, done_peak, done_total = merge_part(done, 0.0, done_peak, done_total, acc, 0.0, peak, total, 0)
        where_out = out + token * out_stride + (head * HEAD_DIM)[:, None] + dim[None, :]
        tl.store(where_out, (done / done_total[:, None]).to(out.dtype.element_ty), mask=stored)
    else:
        where_part = part.to(tl.int64) * HEADS + head
        tl.store(parts + (where_part * HEAD_DIM)[:, None] + dim[None, :], acc, mask=stored)
        tl.store(peaks + where_part, peak, mask=real)
        tl.store(totals + where_part, total, mask=real)


@launched
@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["shared", "members"])
def shared_kernel(
    query,  # [T, heads, HEAD_DIM]
    kv,  # [pages, 2, kv_heads, PAGE_SIZE, HEAD_DIM], if BITS words of two
    scales,  # [pages, 2, kv_heads, PAGE_SIZE] float32, if BITS
    parts,  # [parts, heads, HEAD_DIM] float32
    peaks,  # [parts, heads] float32
    totals,  # [parts, heads] float32
    slopes,  # [heads] of ALiBi, if SLOPES
    tables,  # [R, max_pages]
    row_starts,  # [R + 1]
    shared,  # [shared, 3] split, its first member, how many (at most BLOCK_M // SHARE; -1: nothing to do)
    members,  # [members, 2] row, its first part
    query_stride,
    page_stride,
    value_offset,
    table_stride,
    scale,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    BITS: tl.constexpr,  # mantissa bits of 8-bit values; 0: 16 or 32 bits
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SLOPES: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Attend for rows that share a split. All members see all its keys, and have more after it; any member's page table
    addresses them.
    """
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    kv_head = tl.program_id(0)
    item = shared + tl.program_id(1) * 3
    split, first, count = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    if count < 0:
        return
    m = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, DIM_BLOCK)
    real = m // SHARE < count
    member = members + (first + m // SHARE) * 2
    token = tl.load(row_starts + tl.load(member, mask=real, other=0)).to(tl.int64)
    part = tl.load(member + 1, mask=real, other=0).to(tl.int64) + split
    head = kv_head * SHARE + m % SHARE
    stored = real[:, None] & (dim < HEAD_DIM)[None, :]
    q = tl.load(query + (token * query_stride + head * HEAD_DIM)[:, None] + dim[None, :], mask=stored, other=0.0)
    q, q_odd, acc, acc_odd = _halves(q, BLOCK_M, DIM_BLOCK, BITS)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    keys = kv + kv_head * (PAGE_SIZE * HEAD_DIM // (2 if BITS > 0 else 1))
    scales += kv_head * PAGE_SIZE
    table = tables + tl.load(members + first * 2).to(tl.int64) * table_stride
    slope = tl.load(slopes + head).to(tl.float32) / scale if SLOPES else peak
    for at in tl.range(split * SPLIT, (split + 1) * SPLIT, BLOCK_N):
        acc, acc_odd, peak, total, _, _, _, _ = _attend(
            q, q_odd, acc, acc_odd, peak, total, 0, 0, 0, 0, keys, scales, table, at, 0, 0,
            m, slope, page_stride, value_offset, scale,
            BITS, HEAD_DIM, DIM_BLOCK, PAGE_SIZE, 0, SOFT_CAP, SLOPES, False, 0, BLOCK_N,
        )  # fmt: skip
    if BITS > 0:
        acc = tl.interleave(acc, acc_odd)
    where_part = part * HEADS + head
    tl.store(parts + (where_part * HEAD_DIM)[:, None] + dim[None, :], acc, mask=stored)
    tl.store(peaks + where_part, peak, mask=real)
    tl.store(totals + where_part, total, mask=real)


@launched
@triton.jit(do_not_specialize_on_alignment=["merges"])
def merge_parts_kernel(
    parts,  # [parts, heads, HEAD_DIM] float32
    peaks,  # [parts, heads] float32
    totals,  # [parts, heads] float32
    out,  # [T, heads, HEAD_DIM]
    sinks,  # [heads], if SINKS
    row_starts,  # [R + 1]
    merges,  # [merges, 3] row (-1: nothing to do), its first part, number of parts
    out_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    SINKS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Merge the parts of a row in order. Several are loaded at a time."""
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    merge = merges + tl.program_id(1) * 3
    row, first, count = tl.load(merge), tl.load(merge + 1), tl.load(merge + 2)
    if row < 0:
        return
    one = tl.arange(0, 1)
    head = tl.program_id(0) + one
    dim = tl.arange(0, DIM_BLOCK)[None, :]
    peak, total = _before_parts(sinks, head, one == 0, SINKS, 1)
    acc = tl.zeros((1, DIM_BLOCK), tl.float32)
    for begin in tl.range(0, count, LOADED_PARTS):
        for index in tl.static_range(LOADED_PARTS):
            at = begin + index + one
            exists = at < count
            where_part = (first + at).to(tl.int64) * HEADS + head
            readable = exists[:, None] & (dim < HEAD_DIM)
            part = tl.load(parts + (where_part * HEAD_DIM)[:, None] + dim, mask=readable, other=0.0)
            part_peak = tl.load(peaks + where_part, mask=exists, other=float("-inf"))
            part_total = tl.load(totals + where_part, mask=exists, other=0.0)
            acc, _, peak, total = merge_part(acc, 0.0, peak, total, part, 0.0, part_peak, part_total, 0)
    where_out = out + tl.load(row_starts + row).to(tl.int64) * out_stride + (head * HEAD_DIM)[:, None] + dim
    tl.store(where_out, (acc / total[:, None]).to(out.dtype.element_ty), mask=dim < HEAD_DIM)
