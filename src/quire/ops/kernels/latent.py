"""Latent attention (MLA): over the latent cache, and over expanded keys and values for long prompts.

A row of the latent cache is a key and, without its end, the value of all heads. In the fixed order (ops/order.py) splits and
tiles compute the same bits for a query, by the rules of `attention.py`. A tile has two accumulators then, so a program computes
the values of one of LANES equal parts of the rank. It adds the products of its own part of the rank to logits first.
"""

import triton
import triton.language as tl

from quire.ops.kernels.launcher import launched, let_next_start, wait_for_previous
from quire.ops.kernels.softmax_parts import LOG2_E, merge_part, power, sum_weights


@triton.jit
def _rotated(x, cos, sin, position, inside, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Load pairs and apply RoPE. x [N]: pointers to 2 * HALF values, position [N].

    Return the first and second of each pair [N, HALF_BLOCK] float32, their offsets [HALF_BLOCK], and the mask.
    """
    pair = tl.arange(0, HALF_BLOCK)
    first_at = 2 * pair if INTERLEAVED else pair
    second_at = 2 * pair + 1 if INTERLEAVED else HALF + pair
    mask = inside[:, None] & (pair < HALF)[None, :]
    first = tl.load(x[:, None] + first_at[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x[:, None] + second_at[None, :], mask=mask, other=0.0).to(tl.float32)
    angle = position[:, None] * HALF + pair[None, :]
    c = tl.load(cos + angle, mask=mask, other=1.0)
    s = tl.load(sin + angle, mask=mask, other=0.0)
    # fma: variants of a kernel must round alike
    return tl.fma(first, c, -(second * s)), tl.fma(second, c, first * s), first_at, second_at, mask


@launched
@triton.jit(
    do_not_specialize=["rows_count", "query_count"],
    do_not_specialize_on_alignment=["rows", "query", "write", "row_positions", "positions"],
)
def prepare_kernel(
    rows,  # [T, RANK + 2 * HALF], as projected
    query,  # [K, HEADS, NOPE + 2 * HALF], as projected
    near,  # [K, HEADS, RANK + 2 * HALF]
    kv,  # [pages, PAGE_SIZE, RANK + 2 * HALF]
    write,  # [T]
    row_positions,  # [T]
    positions,  # [K]
    norm,  # [RANK]
    up,  # [HEADS, NOPE + values, RANK]
    cos,  # [max_position, HALF]
    sin,  # [max_position, HALF]
    rows_count,
    query_count,
    rows_stride,
    query_stride,
    up_stride,
    page_stride,
    eps,
    HEADS: tl.constexpr,  # heads whose queries are projected; 0: none
    ROWS: tl.constexpr,  # whether rows are written to their pages
    NOPE: tl.constexpr,
    NOPE_BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Programs of a head project some dimensions of some queries into the latent space; those after the heads write rows to
    pages."""
    let_next_start(EARLY)
    head, part = tl.program_id(0), tl.program_id(1)
    t = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    ROW: tl.constexpr = RANK + 2 * HALF
    if head < HEADS:
        n = part * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, NOPE_BLOCK)
        where = up + head.to(tl.int64) * up_stride + k[:, None] * RANK + n[None, :]
        matrix = tl.load(where, mask=(k < NOPE)[:, None] & (n < RANK)[None, :], other=0.0)
        wait_for_previous(EARLY)
        real = t < query_count
        source = query + t.to(tl.int64) * query_stride + head * (NOPE + 2 * HALF)
        x = tl.load(source[:, None] + k[None, :], mask=real[:, None] & (k < NOPE)[None, :], other=0.0)
        target = near + (t.to(tl.int64) * HEADS + head) * ROW
        value = tl.dot(x, matrix, input_precision="ieee")
        tl.store(target[:, None] + n[None, :], value.to(near.dtype.element_ty), mask=real[:, None] & (n < RANK)[None, :])
        if part == 0:
            position = tl.load(positions + t, mask=real, other=0)
            first, second, first_at, second_at, mask = _rotated(
                source + NOPE, cos, sin, position, real, HALF, HALF_BLOCK, INTERLEAVED
            )
            tl.store(target[:, None] + RANK + first_at[None, :], first.to(near.dtype.element_ty), mask=mask)
            tl.store(target[:, None] + RANK + second_at[None, :], second.to(near.dtype.element_ty), mask=mask)
    else:
        wait_for_previous(EARLY)
        if ROWS and part == 0:
            real = t < rows_count
            r = tl.arange(0, RANK_BLOCK)
            in_rank = r < RANK
            source = rows + t.to(tl.int64) * rows_stride
            x = tl.load(source[:, None] + r[None, :], mask=real[:, None] & in_rank[None, :], other=0.0).to(tl.float32)
            factor = tl.rsqrt(tl.sum(x * x, 1) / RANK + eps)
            weight = tl.load(norm + r, mask=in_rank, other=0.0).to(tl.float32)
            place = tl.load(write + t, mask=real, other=0)
            target = kv + (place // PAGE_SIZE) * page_stride + (place % PAGE_SIZE) * ROW
            normed = (x * factor[:, None] * weight[None, :]).to(rows.dtype.element_ty).to(kv.dtype.element_ty)
            tl.store(target[:, None] + r[None, :], normed, mask=real[:, None] & in_rank[None, :])
            position = tl.load(row_positions + t, mask=real, other=0)
            first, second, first_at, second_at, mask = _rotated(
                source + RANK, cos, sin, position, real, HALF, HALF_BLOCK, INTERLEAVED
            )
            tl.store(target[:, None] + RANK + first_at[None, :], first.to(kv.dtype.element_ty), mask=mask)
            tl.store(target[:, None] + RANK + second_at[None, :], second.to(kv.dtype.element_ty), mask=mask)


@triton.jit
def _query(
    source,  # [M] pointers to queries in the latent space
    real,  # [M]
    lane,
    COLUMNS: tl.constexpr,
    COLUMN_BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    END: tl.constexpr,
    END_BLOCK: tl.constexpr,
):
    """Return the parts of queries that a lane multiplies one after the other: its own, the other lane's, and the end."""
    column, e = tl.arange(0, COLUMN_BLOCK), tl.arange(0, END_BLOCK)
    stored = real[:, None] & (column < COLUMNS)[None, :]
    own = tl.load(source[:, None] + lane * COLUMNS + column[None, :], mask=stored, other=0.0)
    other = own
    if LANES == 2:
        other = tl.load(source[:, None] + (1 - lane) * COLUMNS + column[None, :], mask=stored, other=0.0)
    end = tl.load(source[:, None] + LANES * COLUMNS + e[None, :], mask=real[:, None] & (e < END)[None, :], other=0.0)
    return own, other, end, stored


@triton.jit
def _fold(
    query,  # [M, COLUMN_BLOCK] of the lane's part
    query_other,  # [M, COLUMN_BLOCK] of the other lane's part, if LANES == 2
    query_end,  # [M, END_BLOCK]
    acc,  # [M, COLUMN_BLOCK] float32
    peak,  # [M] largest logit of this part so far, rounded up to an integer
    total,  # [M] sum of the weights relative to it
    done,  # of the parts before, as in `merge_part`; if SPLIT
    done_peak,
    done_total,
    kv,
    table,  # pointer to the row's page table
    begin,  # position of the first key
    high,  # position after the last one
    position,  # [M] of the queries
    lane,
    page_stride,
    scale,
    COLUMNS: tl.constexpr,
    COLUMN_BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    END: tl.constexpr,
    END_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
    SPLIT: tl.constexpr,  # keys after which a part is merged; 0: the caller merges; -1: never, and weights have any order
    BLOCK_N: tl.constexpr,
):
    """Return acc, peak and total after these keys, and the merged parts."""
    column, e = tl.arange(0, COLUMN_BLOCK), tl.arange(0, END_BLOCK)
    at = begin + tl.arange(0, BLOCK_N)
    exists = at < high
    if MASKED:
        page = tl.load(table + at // PAGE_SIZE, mask=exists, other=0).to(tl.int64)
    else:
        page = tl.load(table + at // PAGE_SIZE).to(tl.int64)
    place = kv + page * page_stride + (at % PAGE_SIZE) * (LANES * COLUMNS + END)
    own_at = place[:, None] + lane * COLUMNS + column[None, :]
    other_at = place[:, None] + (1 - lane) * COLUMNS + column[None, :]
    end_at = place[:, None] + LANES * COLUMNS + e[None, :]
    if MASKED or COLUMNS != COLUMN_BLOCK or END != END_BLOCK:
        readable = exists[:, None] & (column < COLUMNS)[None, :]
        own = tl.load(own_at, mask=readable, other=0.0)
        end = tl.load(end_at, mask=exists[:, None] & (e < END)[None, :], other=0.0)
        if LANES == 2:
            other = tl.load(other_at, mask=readable, other=0.0)
    else:
        own = tl.load(own_at)
        end = tl.load(end_at)
        if LANES == 2:
            other = tl.load(other_at)
    logit = tl.dot(query, tl.trans(own), input_precision="ieee")
    if LANES == 2:
        logit = tl.dot(query_other, tl.trans(other), logit, input_precision="ieee")
    logit = tl.dot(query_end, tl.trans(end), logit, input_precision="ieee")
    if SPLIT > 0:  # noqa: SIM102 - a constant
        if begin % SPLIT == 0:  # after the dot products, as in `attention.py`
            done, _, done_peak, done_total = merge_part(done, 0.0, done_peak, done_total, acc, 0.0, peak, total, 0)
            peak = tl.full(peak.shape, float("-inf"), tl.float32)  # resets acc and total: their factor is 0
    scale *= LOG2_E
    if MASKED:
        logit = tl.where(exists[None, :] & (at[None, :] <= position[:, None]), logit, float("-inf"))
    higher = tl.maximum(peak, tl.ceil(tl.max(logit, 1) * scale))
    base = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
    weight = tl.exp2(tl.fma(logit, scale, -base[:, None]))
    fade = power(peak - base)
    total = total * fade + (tl.sum(weight, 1) if SPLIT < 0 else sum_weights(weight))
    acc = tl.dot(weight.to(own.dtype), own, acc * fade[:, None], input_precision="ieee")
    return acc, higher, total, done, done_peak, done_total


@launched
@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["splits"])
def latent_splits_kernel(
    near,  # [K, HEADS, LANES * COLUMNS + END]
    kv,  # [pages, PAGE_SIZE, LANES * COLUMNS + END]
    out,  # [K, HEADS, LANES, COLUMNS]
    parts,  # [parts, HEADS, LANES, COLUMNS] float32: values times weights
    peaks,  # [parts, HEADS, LANES] float32
    totals,  # [parts, HEADS, LANES] float32
    tables,  # [R, max_pages]
    row_starts,  # [R + 1]
    splits,  # [splits, 4] row (-1: nothing to do), split of its keys, index among the parts (-1: the only one), length
    page_stride,
    table_stride,
    scale,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    COLUMN_BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    END: tl.constexpr,
    END_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    item = splits + tl.program_id(1) * 4
    row, split, part, length = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    if row < 0:
        return
    lane = tl.program_id(0) % LANES
    head = tl.program_id(0) // LANES * BLOCK_M + tl.arange(0, BLOCK_M)
    real = head < HEADS
    token = tl.load(row_starts + row).to(tl.int64)
    source = near + (token * HEADS + head) * (LANES * COLUMNS + END)
    query, other, end, stored = _query(source, real, lane, COLUMNS, COLUMN_BLOCK, LANES, END, END_BLOCK)
    acc = tl.zeros((BLOCK_M, COLUMN_BLOCK), tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    table = tables + row.to(tl.int64) * table_stride
    high = tl.minimum(length, (split + 1) * SPLIT)
    position = tl.zeros((BLOCK_M,), tl.int32) + (length - 1)
    for begin in tl.range(split * SPLIT, high, BLOCK_N):
        acc, peak, total, _, _, _ = _fold(
            query, other, end, acc, peak, total, 0, 0, 0, kv, table, begin, high, position, lane, page_stride, scale,
            COLUMNS, COLUMN_BLOCK, LANES, END, END_BLOCK, PAGE_SIZE, True, 0, BLOCK_N,
        )  # fmt: skip
    column = tl.arange(0, COLUMN_BLOCK)
    if part < 0:
        target = out + ((token * HEADS + head) * LANES + lane) * COLUMNS
        tl.store(target[:, None] + column[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=stored)
    else:
        where_part = (part.to(tl.int64) * HEADS + head) * LANES + lane
        tl.store(parts + (where_part * COLUMNS)[:, None] + column[None, :], acc, mask=stored)
        tl.store(peaks + where_part, peak, mask=real)
        tl.store(totals + where_part, total, mask=real)


@launched
@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["tiles"])
def latent_tiles_kernel(
    near,  # [K, HEADS, LANES * COLUMNS + END]
    kv,  # [pages, PAGE_SIZE, LANES * COLUMNS + END]
    out,  # [K, HEADS, LANES, COLUMNS]
    tables,  # [R, max_pages]
    row_starts,  # [R + 1]
    kv_lengths,  # [R]
    tiles,  # [tiles, 3] row (-1: nothing to do), its first token within the row, unused
    page_stride,
    table_stride,
    scale,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    COLUMN_BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    END: tl.constexpr,
    END_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    tile = tiles + tl.program_id(1) * 3
    row, first = tl.load(tile), tl.load(tile + 1)
    if row < 0:
        return
    start = tl.load(row_starts + row)
    count = tl.load(row_starts + row + 1) - start
    length = tl.load(kv_lengths + row)
    m = tl.arange(0, BLOCK_M)
    lane = tl.program_id(0) % LANES
    head = tl.program_id(0) // LANES * BLOCK_H + m % BLOCK_H
    token = first + m // BLOCK_H
    real = (token < count) & (head < HEADS)
    lowest = length - count + first
    high = tl.minimum(lowest + BLOCK_M // BLOCK_H, length)
    position = tl.minimum(length - count + token, high - 1)  # padding attends to existing keys
    line = (start + token).to(tl.int64) * HEADS + head
    query, other, end, stored = _query(
        near + line * (LANES * COLUMNS + END), real, lane, COLUMNS, COLUMN_BLOCK, LANES, END, END_BLOCK
    )
    acc = tl.zeros((BLOCK_M, COLUMN_BLOCK), tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    done, done_peak, done_total = acc, peak, total
    table = tables + row.to(tl.int64) * table_stride
    clear = (lowest + 1) // BLOCK_N * BLOCK_N  # all queries see the keys before it
    for begin in tl.range(0, clear, BLOCK_N):
        acc, peak, total, done, done_peak, done_total = _fold(
            query, other, end, acc, peak, total, done, done_peak, done_total, kv, table, begin, high, position, lane,
            page_stride, scale, COLUMNS, COLUMN_BLOCK, LANES, END, END_BLOCK, PAGE_SIZE, False, SPLIT, BLOCK_N,
        )  # fmt: skip
    for begin in tl.range(clear, high, BLOCK_N):
        acc, peak, total, done, done_peak, done_total = _fold(
            query, other, end, acc, peak, total, done, done_peak, done_total, kv, table, begin, high, position, lane,
            page_stride, scale, COLUMNS, COLUMN_BLOCK, LANES, END, END_BLOCK, PAGE_SIZE, True, SPLIT, BLOCK_N,
        )  # fmt: skip
    if SPLIT > 0:
        acc, _, _, total = merge_part(done, 0.0, done_peak, done_total, acc, 0.0, peak, total, 0)
    target = out + (line * LANES + lane) * COLUMNS
    tl.store(
        target[:, None] + tl.arange(0, COLUMN_BLOCK)[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=stored
    )


@launched
@triton.jit(do_not_specialize=["count"])
def values_kernel(
    found,  # [K, HEADS, RANK]
    up,  # [HEADS, NOPE + VALUES, RANK]
    out,  # [K, HEADS, VALUES]
    count,
    up_stride,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    VALUES: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Project what queries found in the latent space to values."""
    let_next_start(EARLY)
    head = tl.program_id(0)
    t = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    real = t < count
    source = found + ((t.to(tl.int64) * HEADS + head) * RANK)[:, None] + k[None, :]
    matrix = up + head.to(tl.int64) * up_stride + (NOPE + n)[None, :] * RANK + k[:, None]
    tile = tl.load(matrix, mask=(k < RANK)[:, None] & (n < VALUES)[None, :], other=0.0)
    wait_for_previous(EARLY)
    acc = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for begin in tl.range(0, RANK, BLOCK_K):
        following = begin + BLOCK_K
        coming = tl.load(matrix + following, mask=(k < RANK - following)[:, None] & (n < VALUES)[None, :], other=0.0)
        x = tl.load(source + begin, mask=real[:, None] & (k < RANK - begin)[None, :], other=0.0)
        acc = tl.dot(x, tile, acc, input_precision="ieee")
        tile = coming
    target = out + ((t.to(tl.int64) * HEADS + head) * VALUES)[:, None] + n[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=real[:, None] & (n < VALUES)[None, :])


@triton.jit
def _fold_expanded(
    q, q_first, q_second, acc, peak, total, made, ends, at, high, position, made_stride, row_stride, scale,
    NOPE: tl.constexpr, NOPE_BLOCK: tl.constexpr, VALUES: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return acc, peak and total after the keys at `at` [N]."""
    d, v, pair = tl.arange(0, NOPE_BLOCK), tl.arange(0, VALUE_BLOCK), tl.arange(0, HALF_BLOCK)
    first_at = 2 * pair if INTERLEAVED else pair
    second_at = 2 * pair + 1 if INTERLEAVED else HALF + pair
    exists = at < high
    line = made + at.to(tl.int64)[:, None] * made_stride
    end = ends + at.to(tl.int64)[:, None] * row_stride
    rotated = exists[:, None] & (pair < HALF)[None, :]
    key = tl.load(line + d[None, :], mask=exists[:, None] & (d < NOPE)[None, :], other=0.0)
    first = tl.load(end + first_at[None, :], mask=rotated, other=0.0)
    second = tl.load(end + second_at[None, :], mask=rotated, other=0.0)
    value = tl.load(line + NOPE + v[None, :], mask=exists[:, None] & (v < VALUES)[None, :], other=0.0)
    logit = tl.dot(q, tl.trans(key), input_precision="ieee")
    logit = tl.dot(q_first, tl.trans(first), logit, input_precision="ieee")
    logit = tl.dot(q_second, tl.trans(second), logit, input_precision="ieee") * (scale * LOG2_E)
    if MASKED:
        logit = tl.where(exists[None, :] & (at[None, :] <= position[:, None]), logit, float("-inf"))
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
    held,  # [S, RANK + 2 * HALF] the latent rows
    out,  # [K, HEADS, VALUES]
    cos,  # [max_position, HALF]
    sin,  # [max_position, HALF]
    row_starts,  # [R + 1]
    kv_lengths,  # [R]
    tiles,  # [tiles, 3] row, its first token within the row, index of its first key
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
    one, two, _first_at, _second_at, _mask = _rotated(source + NOPE, cos, sin, position, real, HALF, HALF_BLOCK, INTERLEAVED)
    q_first, q_second = one.to(q.dtype), two.to(q.dtype)
    acc = tl.zeros((BLOCK_M, VALUE_BLOCK), tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    keys = made + place.to(tl.int64) * made_stride + head * (NOPE + VALUES)
    ends = held + place.to(tl.int64) * (RANK + 2 * HALF) + RANK
    clear = (lowest + 1) // BLOCK_N * BLOCK_N  # all queries see the keys before it
    n = tl.arange(0, BLOCK_N)
    for begin in tl.range(0, clear, BLOCK_N):
        acc, peak, total = _fold_expanded(
            q, q_first, q_second, acc, peak, total, keys, ends, begin + n, high, position, made_stride, RANK + 2 * HALF, scale,
            NOPE, NOPE_BLOCK, VALUES, VALUE_BLOCK, HALF, HALF_BLOCK, INTERLEAVED, False,
        )  # fmt: skip
    for begin in tl.range(clear, high, BLOCK_N):
        acc, peak, total = _fold_expanded(
            q, q_first, q_second, acc, peak, total, keys, ends, begin + n, high, position, made_stride, RANK + 2 * HALF, scale,
            NOPE, NOPE_BLOCK, VALUES, VALUE_BLOCK, HALF, HALF_BLOCK, INTERLEAVED, True,
        )  # fmt: skip
    target = out + (at_token * HEADS + head) * VALUES
    tl.store(
        target[:, None] + v[None, :],
        (acc / total[:, None]).to(out.dtype.element_ty),
        mask=real[:, None] & (v < VALUES)[None, :],
    )
