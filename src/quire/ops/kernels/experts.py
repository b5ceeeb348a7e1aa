"""Experts: a few slots stream their own matrices, many slots are sorted by expert for a grouped GEMM."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.activation import activate
from quire.ops.arguments import ExpertBiases, Gated
from quire.ops.kernels.activation import constants_of, gate_by
from quire.ops.kernels.launcher import cdiv, launched, let_next_start, overlapping, power_of_two, wait_for_previous
from quire.ops.kernels.linear import eighths, pair_rows, pair_values, stream
from quire.ops.kernels.tiles import find_tile


class Program(NamedTuple):
    outputs: int
    warps: int


UP, DOWN, DOWN_MORE = Program(1, 4), Program(1, 4), Program(2, 1)  # by measurement; the last one for several tokens


@launched
@triton.jit
def _up(
    x,  # [T, INNER]
    experts,  # [T * TOP_K]
    matrices,  # [E, 2 * outputs, INNER] gate rows first
    biases,  # [E, 2 * outputs]
    out,  # [T * TOP_K, outputs]
    outputs,
    INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    BIAS: tl.constexpr,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_previous(EARLY)
    let_next_start(EARLY)
    slot = tl.program_id(0)
    first = tl.program_id(1) * BLOCK_N
    expert = tl.load(experts + slot)
    row, inside = pair_rows(first, outputs, BLOCK_N)
    both = stream(x + slot // TOP_K * INNER, matrices + expert * 2 * outputs * INNER, row, inside, INNER, BLOCK_K, False)
    if BIAS:
        both += tl.load(biases + expert * 2 * outputs + row, mask=inside, other=0.0).to(tl.float32)
    value = pair_values(both, BLOCK_N, KIND, ALPHA, LIMIT, out.dtype.element_ty)
    n = first + tl.arange(0, BLOCK_N)
    tl.store(out + slot * outputs + n, value.to(out.dtype.element_ty), mask=n < outputs)


@launched
@triton.jit
def _down(
    inner,  # [T * TOP_K, INNER]
    weights,  # [T * TOP_K] float32
    experts,  # [T * TOP_K]
    matrices,  # [E, outputs, INNER]
    biases,  # [E, outputs]
    out,  # [T, outputs]
    outputs,
    INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    BIAS: tl.constexpr,
    TOP_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    """May begin before `_up` has ended: until it waits, it only reads what earlier kernels wrote, bypassing L1."""
    let_next_start(EARLY)
    at = tl.arange(0, BLOCK_N * TOP_BLOCK)  # all slots of the first output, then of the second, ...
    output = tl.program_id(1) * BLOCK_N + at // TOP_BLOCK
    slot = tl.program_id(0) * TOP_K + at % TOP_BLOCK
    inside = (output < outputs) & (at % TOP_BLOCK < TOP_K)
    expert = tl.load(experts + slot, mask=inside, other=0, cache_modifier=".cg")
    weight = tl.load(weights + slot, mask=inside, other=0.0, cache_modifier=".cg")
    k = tl.arange(0, BLOCK_K)
    rows = matrices + ((expert * outputs + output) * INNER)[:, None] + k[None, :]
    parts = inner + (slot * INNER)[:, None] + k[None, :]
    tile = tl.load(rows, mask=inside[:, None] & (k < INNER)[None, :], other=0.0)
    wait_for_previous(EARLY)
    acc = tl.zeros((BLOCK_N * TOP_BLOCK, BLOCK_K // 8), tl.float32)
    for begin in tl.range(0, INNER, BLOCK_K):
        following = begin + BLOCK_K
        coming = tl.load(rows + following, mask=inside[:, None] & (k < INNER - following)[None, :], other=0.0)
        part = tl.load(parts + begin, mask=inside[:, None] & (k < INNER - begin)[None, :], other=0.0)
        acc += eighths(tile.to(tl.float32) * part.to(tl.float32))
        tile = coming
    each = tl.sum(acc, 1)
    if BIAS:
        each += tl.load(biases + expert * outputs + output, mask=inside, other=0.0).to(tl.float32)
    value = tl.sum(tl.reshape(each * weight, (BLOCK_N, TOP_BLOCK)), 1)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(out + tl.program_id(0) * outputs + n, value.to(out.dtype.element_ty), mask=n < outputs)


def few_slots_forward(
    x: Tensor, weights: Tensor, experts: Tensor, up: Tensor, down: Tensor, activation: Gated, biases: ExpertBiases | None = None
) -> Tensor:
    tokens, top_k = experts.shape
    before, after = biases or (None, None)
    _, size, inner_size = down.shape
    inner = x.new_empty(tokens * top_k, inner_size)
    out = torch.empty_like(x)
    _up[(tokens * top_k, cdiv(inner_size, UP.outputs))](
        x, experts, up, up if before is None else before, inner, inner_size, INNER=size, TOP_K=top_k,
        BIAS=before is not None, **constants_of(activation),
        BLOCK_N=UP.outputs, BLOCK_K=256 * UP.warps, num_warps=UP.warps, **overlapping(),
    )  # fmt: skip
    program = DOWN if tokens == 1 else DOWN_MORE
    _down[(tokens, cdiv(size, program.outputs))](
        inner, weights, experts, down, down if after is None else after, out, size, INNER=inner_size, TOP_K=top_k,
        BIAS=after is not None, TOP_BLOCK=power_of_two(top_k),
        BLOCK_N=program.outputs, BLOCK_K=256 * program.warps, num_warps=program.warps, **overlapping(),
    )  # fmt: skip
    return out


SUM_BLOCK = 1024
STEP = 128  # slots per iteration


@launched
@triton.jit(do_not_specialize=["slots"])
def _count(
    experts,  # [slots]
    counts,  # [chunks, EXPERTS]
    slots,
    EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    expert = tl.arange(0, EXPERT_BLOCK)
    count = tl.zeros((EXPERT_BLOCK,), tl.int32)
    for begin in tl.range(tl.program_id(0) * CHUNK, tl.minimum(tl.program_id(0) * CHUNK + CHUNK, slots), STEP):
        slot = begin + tl.arange(0, STEP)
        own = tl.load(experts + slot, mask=slot < slots, other=EXPERTS)
        count += tl.sum((own[:, None] == expert[None, :]).to(tl.int32), 0)
    tl.store(counts + tl.program_id(0) * EXPERTS + expert, count, mask=expert < EXPERTS)


@launched
@triton.jit(do_not_specialize=["slots", "chunks"])
def _place(
    experts,  # [slots]
    counts,  # [chunks, EXPERTS]
    order,  # [slots]
    ends,  # [EXPERTS]
    slots,
    chunks,
    EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Find a slot's index: after all slots of lower experts, its expert's in earlier chunks, and its expert's before it in the
    chunk."""
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    mine = tl.program_id(0)
    expert = tl.arange(0, EXPERT_BLOCK)
    total = tl.zeros((EXPERT_BLOCK,), tl.int32)
    earlier = tl.zeros((EXPERT_BLOCK,), tl.int32)
    for first in tl.range(0, chunks, ROWS):
        chunk = first + tl.arange(0, ROWS)
        inside = (chunk < chunks)[:, None] & (expert < EXPERTS)[None, :]
        count = tl.load(counts + chunk[:, None] * EXPERTS + expert[None, :], mask=inside, other=0)
        total += tl.sum(count, 0)
        earlier += tl.sum(tl.where((chunk < mine)[:, None], count, 0), 0)
    end = tl.cumsum(total, 0)
    if mine == 0:
        tl.store(ends + expert, end, mask=expert < EXPERTS)
    place = end - total + earlier  # of the expert's next slot
    at = tl.arange(0, STEP)
    for begin in tl.range(mine * CHUNK, tl.minimum(mine * CHUNK + CHUNK, slots), STEP):
        slot = begin + at
        own = tl.load(experts + slot, mask=slot < slots, other=EXPERTS).to(tl.int32)
        before = tl.sum(((own[:, None] == own[None, :]) & (at[:, None] < at[None, :])).to(tl.int32), 0)
        start = tl.sum(tl.where(expert[:, None] == own[None, :], place[:, None], 0), 0)
        tl.store(order + start + before, slot.to(tl.int64), mask=slot < slots)
        place += tl.sum((own[:, None] == expert[None, :]).to(tl.int32), 0)


def sort_slots(experts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Sort slots by expert: experts [slots] -> order [slots] int64, ends [count] int32; slots of one expert stay in order."""
    slots = len(experts)
    chunk = STEP if slots <= 64 * STEP else 8 * STEP
    chunks = cdiv(slots, chunk)
    sizes = {"EXPERTS": count, "EXPERT_BLOCK": power_of_two(count), "CHUNK": chunk, "STEP": STEP}
    counts = torch.empty(chunks, count, dtype=torch.int32, device=experts.device)
    order = torch.empty_like(experts)
    ends = torch.empty(count, dtype=torch.int32, device=experts.device)
    _count[(chunks,)](experts, counts, slots, **sizes, **overlapping())
    _place[(chunks,)](experts, counts, order, ends, slots, chunks, **sizes, ROWS=16, **overlapping())
    return order, ends


@launched
@triton.jit
def _product(
    x,  # [rows, INNER]
    matrices,  # [EXPERTS, outputs, INNER]; gated: [EXPERTS, 2 * outputs, INNER], gate rows first
    biases,  # [EXPERTS, rows of a matrix]
    out,  # [slots, outputs]
    order,  # [slots] slots sorted by expert
    ends,  # [EXPERTS]
    outputs,
    INNER: tl.constexpr,
    EXPERTS: tl.constexpr,
    SHARING: tl.constexpr,  # slots that read the same row of x
    BIAS: tl.constexpr,
    KIND: tl.constexpr,  # activation of gated matrices; "": not gated
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    tile = tl.program_id(1)
    expert, first, stop = find_tile(ends, tile, EXPERTS, EXPERT_BLOCK, BLOCK_M)
    if expert < EXPERTS:
        at = first + tl.arange(0, BLOCK_M)
        slot = tl.load(order + at, mask=at < stop, other=0)
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        high, row = outputs, n.to(tl.int64)
        if KIND != "":  # gate and up rows alternate, so that a tile has both
            high, row = 2 * outputs, (n % 2) * outputs + (n // 2).to(tl.int64)
        k = tl.arange(0, BLOCK_K)
        rows = x + (slot // SHARING)[:, None] * INNER + k[None, :]
        columns = matrices + expert.to(tl.int64) * high * INNER + row[:, None] * INNER + k[None, :]
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for done in tl.range(0, INNER, BLOCK_K):
            inside = (k < INNER - done)[None, :]
            a = tl.load(rows + done, mask=(at < stop)[:, None] & inside, other=0.0)
            b = tl.load(columns + done, mask=(n < high)[:, None] & inside, other=0.0)
            acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
        if BIAS:
            acc += tl.load(biases + expert.to(tl.int64) * high + row, mask=n < high, other=0.0).to(tl.float32)[None, :]
        value = acc.to(out.dtype.element_ty)
        if KIND != "":
            gate, up = tl.split(tl.reshape(value, (BLOCK_M, BLOCK_N // 2, 2)))
            value = gate_by(gate, up, KIND, ALPHA, LIMIT, out.dtype.element_ty).to(out.dtype.element_ty)
            n = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        tl.store(out + slot[:, None] * outputs + n[None, :], value, mask=(at < stop)[:, None] & (n < outputs)[None, :])


class Blocks(NamedTuple):
    m: int  # rows of x
    n: int  # rows of the matrix
    k: int
    warps: int
    stages: int


def blocks(rows: float, dtype: torch.dtype) -> Blocks:
    """Return block sizes for this average number of rows per expert."""
    if dtype == torch.float32:
        return Blocks(16, 32, 32, 4, 1)
    if rows <= 2:
        return Blocks(16, 128, 128, 4, 3)
    if rows <= 20:
        return Blocks(32, 128, 128, 4, 3)
    if rows <= 80:
        return Blocks(64, 128, 64, 4, 4)
    return Blocks(128, 256, 64, 8, 3)


def product(
    x: Tensor,
    matrices: Tensor,
    biases: Tensor | None,
    order: Tensor,
    ends: Tensor,
    block: Blocks,
    sharing: int,
    activation: Gated = "",
) -> Tensor:
    """Multiply each slot's row by its expert: x [slots / sharing, inner], matrices [E, outputs, inner] -> [slots, outputs].

    With an activation the matrices are [E, 2 * outputs, inner], gate rows first.
    """
    experts, high, inner = matrices.shape
    slots, outputs = len(order), high // 2 if activation else high
    out = x.new_empty(slots, outputs)
    most = min(slots, slots // block.m + experts)  # upper bound of tiles with rows
    _product[(cdiv(high, block.n), most)](
        x, matrices, matrices if biases is None else biases, out, order, ends, outputs, INNER=inner, EXPERTS=experts,
        SHARING=sharing, BIAS=biases is not None, **constants_of(activation), EXPERT_BLOCK=power_of_two(experts),
        BLOCK_M=block.m, BLOCK_N=block.n, BLOCK_K=block.k, num_warps=block.warps, num_stages=block.stages,
        **overlapping(),
    )  # fmt: skip
    return out


@launched
@triton.jit
def _weighted_sum(
    y,  # [T, TOP_K, size]
    weights,  # [T, TOP_K] float32
    out,  # [T, size]
    size,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(TOP_K):
        part = tl.load(y + (token * TOP_K + i) * size + at, mask=at < size, other=0.0).to(tl.float32)
        acc += part * tl.load(weights + token * TOP_K + i)
    tl.store(out + token * size + at, acc.to(out.dtype.element_ty), mask=at < size)


def weighted_sum(y: Tensor, weights: Tensor, out: Tensor) -> Tensor:
    """Return out [T, size], the weighted sum of y [T * top_k, size] with weights [T, top_k]."""
    tokens, size = out.shape
    _weighted_sum[(tokens, cdiv(size, SUM_BLOCK))](
        y, weights, out, size, TOP_K=weights.shape[1], BLOCK=SUM_BLOCK, **overlapping()
    )
    return out


def sorted_forward(
    x: Tensor, weights: Tensor, experts: Tensor, up: Tensor, down: Tensor, activation: Gated, biases: ExpertBiases | None = None
) -> Tensor:
    top_k = experts.shape[1]
    before, after = biases or (None, None)
    out = torch.empty_like(x)
    block = blocks(experts.numel() / len(up), x.dtype)
    order, ends = sort_slots(experts.flatten(), len(up))
    inner = product(x, up, before, order, ends, block, top_k, activation)
    y = product(inner, down, after, order, ends, block, 1)
    return weighted_sum(y, weights, out)


def ungated_forward(x: Tensor, weights: Tensor, experts: Tensor, up: Tensor, down: Tensor, activation: str) -> Tensor:
    """Run experts without gates; up [E, I, H]."""
    block = blocks(experts.numel() / len(up), x.dtype)
    order, ends = sort_slots(experts.flatten(), len(up))
    inner = activate(product(x, up, None, order, ends, block, experts.shape[1]), activation)
    return weighted_sum(product(inner, down, None, order, ends, block, 1), weights, torch.empty_like(x))
