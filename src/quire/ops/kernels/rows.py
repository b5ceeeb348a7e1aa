"""Small copies of a step: the inputs of rows, gathered by slot, and words scattered over device memory."""

import triton
import triton.language as tl
from torch import Tensor

from quire.ops.arguments import RowInputs
from quire.ops.kernels.launcher import launched

BLOCK = 512
STRIDES = ["token_stride", "group_stride", "slot_stride", "row_group_stride", "row_stride", "write_stride"]


# strides change with every step, and specialization on them gains nothing
@launched
@triton.jit(do_not_specialize=STRIDES, do_not_specialize_on_alignment=["slots", "ends"])
def _fill_rows(
    slots,  # [R] int64
    ends,  # [R] int64
    starts,  # [R + 1] int32
    tokens,  # [S, L] int32
    tables,  # [G, S, P] int32
    ids,  # [T] int64
    positions,  # [T] int64
    kv_lengths,  # [R] int32
    row_tables,  # [G, R, P] int32
    write,  # [G, T] int64
    token_stride,
    group_stride,
    slot_stride,
    row_group_stride,
    row_stride,
    write_stride,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row)
    end = tl.load(ends + row)
    real = slot >= 0
    held = tl.maximum(slot, 0)
    first = tl.load(starts + row)
    count = tl.load(starts + row + 1) - first
    source = tables + group * group_stride + held * slot_stride
    target = row_tables + group * row_group_stride + row * row_stride
    for begin in tl.range(0, count, BLOCK):
        lane = begin + tl.arange(0, BLOCK)
        inside = lane < count
        position = tl.where(real, end - count + lane, 0)
        own = tl.where(real, tl.load(source + position // PAGE_SIZE, mask=inside, other=0), 0).to(tl.int64)
        tl.store(write + group * write_stride + first + lane, own * PAGE_SIZE + position % PAGE_SIZE, mask=inside)
        if group == 0:
            token = tl.load(tokens + held * token_stride + position, mask=inside, other=0)
            tl.store(ids + first + lane, tl.where(real, token, 0).to(tl.int64), mask=inside)
            tl.store(positions + first + lane, position, mask=inside)
    last = (end - 1) // PAGE_SIZE
    for begin in tl.range(0, last + 1, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        page = tl.load(source + at, mask=at <= last, other=0)
        tl.store(target + at, tl.where(real, page, 0), mask=at <= last)
    if group == 0:
        tl.store(kv_lengths + row, end.to(tl.int32))


def fill_rows(
    slot: Tensor,
    end: Tensor,
    starts: Tensor,
    tokens: Tensor,
    tables: Tensor,
    page_size: int,
    out: RowInputs,
) -> None:
    _fill_rows[(len(slot), len(tables))](
        slot, end, starts, tokens, tables, out.ids, out.positions, out.kv_lengths, out.tables, out.write,
        tokens.stride(0), tables.stride(0), tables.stride(1), out.tables.stride(0), out.tables.stride(1), out.write.stride(0),
        PAGE_SIZE=page_size, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


@launched
@triton.jit
def _deliver(
    runs,  # [runs, 4] int64: address, index of the first word, words available, words to write
    words,  # [.] int32
    BLOCK: tl.constexpr,
):
    run = runs + tl.program_id(0).to(tl.int64) * 4
    target = tl.load(run).to(tl.pointer_type(tl.int32))
    source = words + tl.load(run + 1)
    at = tl.arange(0, BLOCK)
    word = tl.load(source + at, mask=at < tl.load(run + 2), other=0)
    tl.store(target + at, word, mask=at < tl.load(run + 3))


def deliver(runs: Tensor, words: Tensor, count: int, most: int) -> None:
    """Write the first `count` runs, each of at most `most` words (a power of two) and to disjoint memory. Words beyond the
    available ones are 0.
    """
    _deliver[(count,)](runs, words, BLOCK=most, num_warps=8)
