"""A few tokens through their experts: every slot reads its expert's matrices by itself, nothing is sorted.

Two launches: the gated product of each slot, and the weighted sum over a token's slots of the second product. A program of the
second takes some outputs of one token and adds its slots in their order, so the other tokens cannot change the result.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.arguments import ExpertBiases, Gated
from quire.ops.kernels.activation import constants_of
from quire.ops.kernels.launcher import cdiv, launched, let_next_start, overlapping, power_of_two, wait_for_previous
from quire.ops.kernels.linear import eighths, pair_rows, pair_values, stream


class Program(NamedTuple):
    outputs: int
    warps: int


UP, DOWN, DOWN_MORE = Program(1, 4), Program(1, 4), Program(2, 1)  # by measurement; the last for more than one token


@launched
@triton.jit
def _up(
    x,  # [T, INNER]
    experts,  # [T * TOP_K]
    matrices,  # [E, 2 * outputs, INNER] gate above up
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
    """May begin when all before `_up` has ended: until it waits it reads only what was there then, past the near cache."""
    let_next_start(EARLY)
    at = tl.arange(0, BLOCK_N * TOP_BLOCK)  # all slots of the first output, of the second, ...
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


def experts_forward(
    x: Tensor, weights: Tensor, experts: Tensor, up: Tensor, down: Tensor, activation: Gated, biases: ExpertBiases | None = None
) -> Tensor:
    tokens, top_k = experts.shape
    before, behind = biases or (None, None)
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
        inner, weights, experts, down, down if behind is None else behind, out, size, INNER=inner_size, TOP_K=top_k,
        BIAS=behind is not None, TOP_BLOCK=power_of_two(top_k),
        BLOCK_N=program.outputs, BLOCK_K=256 * program.warps, num_warps=program.warps, **overlapping(),
    )  # fmt: skip
    return out
