"""Attention over pages: tiles of several queries of one row, and splits of the keys of rows with a single query.

The query heads that share a KV head are the rows of one matrix (`SHARE` of them for each token), so a key is read once for
all of them. Logits are kept in powers of two.

    tile    m = token * SHARE + head      x      keys of the row, as far as the tile's queries see
    split   m = head                      x      keys split * SPLIT ... (split + 1) * SPLIT
    shared  m = row * SHARE + head        x      the same, of many rows whose pages for these keys are the same

Where a split begins, where its part is stored and how the parts of a row are merged depends on that row alone, not on the
batch; a part from a shared split may differ from the row's own in the last bits, as matrix units of other shapes make it.
"""

import triton
import triton.language as tl

from quire.ops.kernels.math import tanh

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _attend(
    query,  # [M, DIM_BLOCK]
    acc,  # [M, DIM_BLOCK] float32
    peak,  # [M] largest logit so far
    total,  # [M] sum of the weights relative to it
    keys,  # pointer to this KV head's lane of page 0
    table,  # pointer to the row's page table
    at,  # [N] positions of the keys
    low,  # first position that may be read
    high,  # position after the last
    position,  # [M] of the queries
    page_stride,
    value_offset,
    scale,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    dim = tl.arange(0, DIM_BLOCK)
    if MASKED:
        there = (at >= low) & (at < high)
        page = tl.load(table + at // PAGE_SIZE, mask=there, other=0).to(tl.int64)
    else:
        there = at >= 0
        page = tl.load(table + at // PAGE_SIZE).to(tl.int64)
    place = keys + (page * page_stride + (at % PAGE_SIZE) * HEAD_DIM)[:, None] + dim[None, :]
    if MASKED or HEAD_DIM != DIM_BLOCK:
        readable = there[:, None] & (dim < HEAD_DIM)[None, :]
        key = tl.load(place, mask=readable, other=0.0)
        value = tl.load(place + value_offset, mask=readable, other=0.0)
    else:
        key = tl.load(place)
        value = tl.load(place + value_offset)
    logit = tl.dot(query, tl.trans(key), input_precision="ieee")
    if SOFT_CAP > 0:
        logit = tanh(logit * (scale / SOFT_CAP))
        scale = SOFT_CAP
    scale *= LOG2_E
    if MASKED:
        visible = there[None, :] & (at[None, :] <= position[:, None])
        if WINDOW > 0:
            visible &= at[None, :] > position[:, None] - WINDOW
        logit = tl.where(visible, logit, float("-inf"))
    higher = tl.maximum(peak, tl.max(logit, 1) * scale)
    base = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
    weight = tl.exp2(logit * scale - base[:, None])
    fade = tl.exp2(peak - base)
    acc = tl.dot(weight.to(value.dtype), value, acc * fade[:, None], input_precision="ieee")
    return acc, higher, total * fade + tl.sum(weight, 1)


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["tiles"])
def tiles_kernel(
    query,  # [T, heads, HEAD_DIM]
    kv,  # [pages, 2, kv_heads, PAGE_SIZE, HEAD_DIM]
    out,  # [T, heads, HEAD_DIM]
    sinks,  # [heads]
    tables,  # [R, max_pages]
    row_starts,  # [R + 1]
    kv_lengths,  # [R]
    tiles,  # [tiles, 2] row, its first token within the row
    query_stride,
    out_stride,
    page_stride,
    value_offset,
    table_stride,
    scale,
    SHARE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    kv_head = tl.program_id(0)
    tile = tiles + tl.program_id(1) * 2
    row, first = tl.load(tile), tl.load(tile + 1)
    start = tl.load(row_starts + row)
    count = tl.load(row_starts + row + 1) - start
    length = tl.load(kv_lengths + row)
    m = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, DIM_BLOCK)
    TOKENS: tl.constexpr = BLOCK_M // SHARE
    token = first + m // SHARE
    head = kv_head * SHARE + m % SHARE
    real = (m < TOKENS * SHARE) & (token < count)
    lowest_query = length - count + first
    high = tl.minimum(lowest_query + TOKENS, length)
    position = tl.minimum(length - count + token, high - 1)  # padding looks at what is there
    where_q = (start + token).to(tl.int64) * query_stride + head * HEAD_DIM
    stored = real[:, None] & (dim < HEAD_DIM)[None, :]
    q = tl.load(query + where_q[:, None] + dim[None, :], mask=stored, other=0.0)
    acc = tl.zeros((BLOCK_M, DIM_BLOCK), tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if SINKS:
        peak = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * LOG2_E
        total += 1.0
    keys = kv + kv_head * (PAGE_SIZE * HEAD_DIM)
    table = tables + row.to(tl.int64) * table_stride
    low = 0
    clear = (lowest_query + 1) // BLOCK_N * BLOCK_N  # keys before this are seen by every query of the tile
    if WINDOW > 0:
        low = tl.maximum(0, lowest_query - WINDOW + 1)
        clear = low
    n = tl.arange(0, BLOCK_N)
    for begin in tl.range(low, clear, BLOCK_N):
        acc, peak, total = _attend(
            q, acc, peak, total, keys, table, begin + n, low, high, position, page_stride, value_offset, scale,
            HEAD_DIM, DIM_BLOCK, PAGE_SIZE, WINDOW, SOFT_CAP, False,
        )  # fmt: skip
    for begin in tl.range(clear, high, BLOCK_N):
        acc, peak, total = _attend(
            q, acc, peak, total, keys, table, begin + n, low, high, position, page_stride, value_offset, scale,
            HEAD_DIM, DIM_BLOCK, PAGE_SIZE, WINDOW, SOFT_CAP, True,
        )  # fmt: skip
    where_out = (start + token).to(tl.int64) * out_stride + head * HEAD_DIM
    tl.store(out + where_out[:, None] + dim[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["splits"])
def splits_kernel(
    query,  # [T, heads, HEAD_DIM]
    kv,  # [pages, 2, kv_heads, PAGE_SIZE, HEAD_DIM]
    out,  # [T, heads, HEAD_DIM]
    parts,  # [parts, heads, HEAD_DIM] float32
    weights,  # [parts, heads] float32: log2 of the sum of a part's weights
    sinks,  # [heads]
    tables,  # [R, max_pages]
    row_starts,  # [R + 1]
    splits,  # [splits, 4] row (-1 = nothing to do), split of its keys, place among the parts (-1 = the only one), key length
    query_stride,
    out_stride,
    page_stride,
    value_offset,
    table_stride,
    scale,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
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
    q = tl.load(where_q, mask=stored, other=0.0)
    acc = tl.zeros((BLOCK_M, DIM_BLOCK), tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(0, length - WINDOW)
    if SINKS:
        counts = split == low // SPLIT  # the first part of a row counts them
        peak = tl.where(counts, tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * LOG2_E, peak)
        total = tl.where(counts, 1.0, total)
    keys = kv + kv_head * (PAGE_SIZE * HEAD_DIM)
    table = tables + row.to(tl.int64) * table_stride
    begin, high = split * SPLIT, tl.minimum(length, (split + 1) * SPLIT)
    begin = tl.maximum(begin, low // BLOCK_N * BLOCK_N)
    position = tl.zeros((BLOCK_M,), tl.int32) + (length - 1)
    n = tl.arange(0, BLOCK_N)
    for at in tl.range(begin, high, BLOCK_N):
        acc, peak, total = _attend(
            q, acc, peak, total, keys, table, at + n, low, high, position, page_stride, value_offset, scale,
            HEAD_DIM, DIM_BLOCK, PAGE_SIZE, WINDOW, SOFT_CAP, True,
        )  # fmt: skip
    acc = acc / total[:, None]
    if part < 0:
        where_out = out + token * out_stride + (head * HEAD_DIM)[:, None] + dim[None, :]
        tl.store(where_out, acc.to(out.dtype.element_ty), mask=stored)
    else:
        where_part = part.to(tl.int64) * HEADS + head
        tl.store(parts + (where_part * HEAD_DIM)[:, None] + dim[None, :], acc, mask=stored)
        tl.store(weights + where_part, peak + tl.log2(total), mask=real)


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["shared", "members"])
def shared_kernel(
    query,  # [T, heads, HEAD_DIM]
    kv,  # [pages, 2, kv_heads, PAGE_SIZE, HEAD_DIM]
    parts,  # [parts, heads, HEAD_DIM] float32
    weights,  # [parts, heads] float32
    sinks,  # [heads]
    tables,  # [R, max_pages]
    row_starts,  # [R + 1]
    shared,  # [shared, 3] split, its first member, how many (at most BLOCK_M // SHARE; -1 = nothing to do)
    members,  # [members, 2] row, its first part
    query_stride,
    page_stride,
    value_offset,
    table_stride,
    scale,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The members see all keys of the split, and have more after it. Any member's page table leads to the keys."""
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
    acc = tl.zeros((BLOCK_M, DIM_BLOCK), tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if SINKS:
        counts = split == 0
        peak = tl.where(counts, tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * LOG2_E, peak)
        total = tl.where(counts, 1.0, total)
    keys = kv + kv_head * (PAGE_SIZE * HEAD_DIM)
    table = tables + tl.load(members + first * 2).to(tl.int64) * table_stride
    n = tl.arange(0, BLOCK_N)
    for at in tl.range(split * SPLIT, (split + 1) * SPLIT, BLOCK_N):
        acc, peak, total = _attend(
            q, acc, peak, total, keys, table, at + n, 0, 0, m, page_stride, value_offset, scale,
            HEAD_DIM, DIM_BLOCK, PAGE_SIZE, 0, SOFT_CAP, False,
        )  # fmt: skip
    where_part = part * HEADS + head
    tl.store(parts + (where_part * HEAD_DIM)[:, None] + dim[None, :], acc / total[:, None], mask=stored)
    tl.store(weights + where_part, peak + tl.log2(total), mask=real)


@triton.jit(do_not_specialize_on_alignment=["merges"])
def merge_kernel(
    parts,  # [parts, heads, HEAD_DIM] float32
    weights,  # [parts, heads] float32
    out,  # [T, heads, HEAD_DIM]
    row_starts,  # [R + 1]
    merges,  # [merges, 3] row (-1 = nothing to do), its first part, how many
    out_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    head = tl.program_id(0)
    merge = merges + tl.program_id(1) * 3
    row, first, count = tl.load(merge), tl.load(merge + 1), tl.load(merge + 2)
    if row < 0:
        return
    dim = tl.arange(0, DIM_BLOCK)
    in_head = dim < HEAD_DIM
    acc = tl.zeros((DIM_BLOCK,), tl.float32)
    peak = float("-inf")
    total = 0.0
    for begin in tl.range(0, count, BLOCK):
        part = begin + tl.arange(0, BLOCK)
        where_part = (first + part).to(tl.int64) * HEADS + head
        weight = tl.load(weights + where_part, mask=part < count, other=float("-inf"))
        readable = (part < count)[:, None] & in_head[None, :]
        value = tl.load(parts + (where_part * HEAD_DIM)[:, None] + dim[None, :], mask=readable, other=0.0)
        higher = tl.maximum(peak, tl.max(weight, 0))
        weight = tl.exp2(weight - higher)
        fade = tl.exp2(peak - higher)
        acc = acc * fade + tl.sum(weight[:, None] * value, 0)
        total = total * fade + tl.sum(weight, 0)
        peak = higher
    token = tl.load(row_starts + row).to(tl.int64)
    tl.store(out + token * out_stride + head * HEAD_DIM + dim, (acc / total).to(out.dtype.element_ty), mask=in_head)
