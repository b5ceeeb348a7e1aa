"""GEMM with unquantized weights for few tokens: one token, 2 to 16 tokens, and gated layers with some dozens."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, dtype
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.ops.kernels.activation import KINDS, activate, constants_of, gate_by
from quire.ops.kernels.launcher import cdiv, launched, let_next_start, overlapping, prefetch, wait_for_previous
from quire.ops.kernels.tiles import add_shares, put_outputs, turns_of


@triton.jit
def eighths(tile):
    """Return sums of eight neighbours, which one thread has loaded: [R, K] -> [R, K // 8]."""
    return tl.sum(tl.reshape(tile, (tile.shape[0], tile.shape[1] // 8, 8)), 2)


@triton.jit
def stream(
    x,  # [INNER]
    matrix,  # [., INNER]
    row,  # [R] rows of the matrix
    inside,  # [R]
    INNER: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Return matrix rows times x, [R] float32. Waits for the previous kernel between the first load of the matrix and that of
    x."""
    places = matrix + row.to(tl.int64)[:, None] * INNER + tl.arange(0, BLOCK_K)[None, :]
    return stream_from(x, places, inside, INNER, BLOCK_K, EARLY)


@triton.jit
def stream_from(x, places, inside, INNER: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr):
    """Return the same for rows that begin at pointers places [R, BLOCK_K]."""
    k = tl.arange(0, BLOCK_K)
    tile = tl.load(places, mask=inside[:, None] & (k < INNER)[None, :], other=0.0)
    wait_for_previous(EARLY)
    acc = tl.zeros((places.shape[0], BLOCK_K // 8), tl.float32)
    for begin in tl.range(0, INNER, BLOCK_K):
        following = begin + BLOCK_K
        coming = tl.load(places + following, mask=inside[:, None] & (k < INNER - following)[None, :], other=0.0)
        part = tl.load(x + begin + k, mask=k < INNER - begin, other=0.0).to(tl.float32)
        acc += eighths(tile.to(tl.float32) * part[None, :])
        tile = coming
    return tl.sum(acc, 1)


@triton.jit
def pair_rows(first, outputs, PAIRS: tl.constexpr):
    """Return alternating gate and up rows of outputs first ... first + PAIRS, and which of them exist."""
    at = tl.arange(0, 2 * PAIRS)
    output = first + at // 2
    return (at % 2) * outputs + output, output < outputs


@triton.jit
def pair_values(both, PAIRS: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, DTYPE: tl.constexpr):
    """Return activation(gate) * up [PAIRS] for both [2 * PAIRS] = g0 u0 g1 u1 ..."""
    gate, up = tl.split(tl.reshape(both, (PAIRS, 2)))
    return gate_by(gate, up, KIND, ALPHA, LIMIT, DTYPE)


@launched
@triton.jit
def _linear(
    x,  # [rows, INNER]
    matrix,  # [outputs, INNER]; gated: [2 * outputs, INNER]
    bias,  # one value per row of the matrix
    out,  # [rows, outputs]
    outputs,
    INNER: tl.constexpr,
    BIAS: tl.constexpr,
    KIND: tl.constexpr,  # activation of a gated matrix; "": not gated
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    rows = tl.num_programs(0) // tl.cdiv(outputs, BLOCK_N)
    x += tl.program_id(0) % rows * INNER
    out += tl.program_id(0) % rows * outputs
    first = tl.program_id(0) // rows * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    if KIND == "":
        row, inside = n, n < outputs
    else:
        row, inside = pair_rows(first, outputs, BLOCK_N)
    value = stream(x, matrix, row, inside, INNER, BLOCK_K, EARLY)
    if BIAS:
        value += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
    if KIND != "":
        value = pair_values(value, BLOCK_N, KIND, 0.0, 0.0, out.dtype.element_ty)
    tl.store(out + n, value.to(out.dtype.element_ty), mask=n < outputs)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "", kind: dtype | None = None) -> Tensor:
    """Return x [..., inner] times weight [outputs, inner], in x's dtype or `kind`; with an activation the weight is
    [2 * outputs, inner] and gated.
    """
    x = x.contiguous()
    inner = x.shape[-1]
    outputs = len(weight) // 2 if activation else len(weight)
    out = x.new_empty(*x.shape[:-1], outputs, dtype=kind)
    # as many loads in flight as the row length allows, by measurement
    matrix_rows, warps = (2, 8) if inner >= 2048 else (4, 4)
    block = matrix_rows // 2 if activation else matrix_rows
    # one axis: a vocabulary has more blocks than a second axis may have programs
    _linear[(x.numel() // inner * cdiv(outputs, block),)](
        x, weight, weight if bias is None else bias, out, outputs, INNER=inner, BIAS=bias is not None,
        KIND=KINDS[activation] if activation else "", BLOCK_N=block, BLOCK_K=256 * warps, num_warps=warps, **overlapping(),
    )  # fmt: skip
    return out


MAX_FEW_ROWS = 16
FEW_OUTPUTS = 64  # rows of the matrix per program
FEW_WARPS = 4
LINE = 64  # values per prefetched cache line
AHEAD = 2  # prefetched lines; more compete with the reads of the previous kernel


@launched
@triton.jit(do_not_specialize=["rows"])
def _few(
    x,  # [rows, inner]
    matrix,  # [outputs, inner]; gated: [2 * outputs, inner]
    bias,  # one value per row of the matrix
    out,  # [rows, outputs]
    sums,  # float32 partial sums of each program's tile
    turns,  # [tiles] zeros: counters of finished shares
    rows,  # at most ROWS if there are several shares
    outputs,
    inner,
    PADDED: tl.constexpr,  # whether the last block exceeds the columns
    BIAS: tl.constexpr,
    KIND: tl.constexpr,  # activation of a gated matrix; "": not gated
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    SHARES: tl.constexpr,
    LINE: tl.constexpr,
    AHEAD: tl.constexpr,  # lines of each row that are prefetched before x is ready
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    GATED: tl.constexpr = KIND != ""
    OUTPUTS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    tile = tl.program_id(0)
    begins = tile * OUTPUTS
    at = tl.arange(0, BLOCK_N)
    read = tl.minimum(begins + at % OUTPUTS, outputs - 1) + at // OUTPUTS * outputs
    each = tl.cdiv(tl.cdiv(inner, BLOCK_K), SHARES) * BLOCK_K
    begin = tl.program_id(1) * each
    end = tl.minimum(begin + each, inner)
    matrix += read.to(tl.int64)[:, None] * inner
    if EARLY:
        prefetch(matrix, begin // LINE, tl.maximum(end // LINE, 1), LINE, AHEAD)
        wait_for_previous(EARLY)
    k = tl.arange(0, BLOCK_K)
    r = (tl.program_id(2) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    exists = r < rows
    columns = x + r[:, None] * inner + k[None, :]
    numbers = matrix + k[None, :]
    acc = tl.zeros((BLOCK_N, ROWS), tl.float32)
    for from_here in tl.range(begin, end, BLOCK_K):
        if PADDED:
            inside = (k < inner - from_here)[None, :]
            block = tl.load(numbers + from_here, mask=inside, other=0.0)
            part = tl.load(columns + from_here, mask=exists[:, None] & inside, other=0.0)
        else:
            block = tl.load(numbers + from_here)
            part = tl.load(columns + from_here, mask=exists[:, None], other=0.0)
        acc = tl.dot(block, tl.trans(part), acc, input_precision="ieee")
    if SHARES > 1:
        acc, last = add_shares(acc, sums, turns, tile, SHARES)
        if not last:
            return
    put_outputs(acc, bias, out, read, begins, r, exists, outputs, BIAS, KIND, ALPHA, LIMIT)


class FewRowsConfig(NamedTuple):
    """Launch configuration of `few_rows_linear`."""

    columns: int  # per iteration
    stages: int
    shares: int  # that the columns are divided into
    rows: int = MAX_FEW_ROWS  # per program


def few_rows_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, config: FewRowsConfig, activation: str = "", kind: torch.dtype | None = None
) -> Tensor:
    """Return x [..., inner] times weight [outputs, inner], in x's dtype or `kind`; with an activation the weight is
    [2 * outputs, inner] and gated. With several shares at most `config.rows` rows.
    """
    x = x.contiguous()
    inner = x.shape[-1]
    outputs = len(weight) // 2 if activation else len(weight)
    out = x.new_empty(*x.shape[:-1], outputs, dtype=kind)
    tiles = cdiv(outputs, FEW_OUTPUTS // 2 if activation else FEW_OUTPUTS)
    rows = x.numel() // inner
    size = tiles * config.shares * config.rows * FEW_OUTPUTS if config.shares > 1 else 1
    _few[(tiles, config.shares, cdiv(rows, config.rows))](
        x, weight, weight if bias is None else bias, out, x.new_empty(size, dtype=torch.float32), turns_of(x.device),
        rows, outputs, inner, PADDED=inner % config.columns > 0, BIAS=bias is not None, **constants_of(activation),
        SHARES=config.shares, LINE=LINE, AHEAD=AHEAD, ROWS=config.rows, BLOCK_N=FEW_OUTPUTS, BLOCK_K=config.columns,
        num_warps=FEW_WARPS, num_stages=config.stages, **overlapping(),
    )  # fmt: skip
    return out


GATED_OUTPUTS = 64  # per program
BLOCK_K = 64  # columns per iteration: 128 bytes, the maximum of the copy engine
GATED_PROGRAMS_PER_SM = 2
GATED_WARPS = 4


class Tile(NamedTuple):
    rows: int
    more: int
    stages: int  # as many as leave shared memory for a second program


TILES = (Tile(32, 0, 5), Tile(64, 0, 4), Tile(64, 32, 3), Tile(128, 0, 3))


@triton.jit
def _put(gate, up, bias, out, n, r, rows, outputs, BIAS: tl.constexpr, KIND: tl.constexpr):
    """Store gate, up [n, r] float32 as out [r, n], each step rounded as separate operators would."""
    kind: tl.constexpr = out.dtype.element_ty
    if BIAS:
        gate += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[:, None]
        up += tl.load(bias + outputs + n, mask=n < outputs, other=0.0).to(tl.float32)[:, None]
    active = activate(gate.to(kind).to(tl.float32), KIND).to(kind).to(tl.float32)
    value = (active * up.to(kind).to(tl.float32)).to(kind)
    tl.store(out + r[None, :] * outputs + n[:, None], value, mask=(n < outputs)[:, None] & (r < rows)[None, :])


@launched
@triton.jit(do_not_specialize=["rows"])
def _gated_rows(
    bias,  # [2 * outputs]
    out,  # [rows, outputs]
    rows,
    outputs,
    inner,
    x,  # descriptor of [rows, inner], ROWS at a time
    x_more,  # the same with MORE rows at a time
    matrix,  # descriptor of [2 * outputs, inner], gate rows first
    BIAS: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    MORE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    first = tl.program_id(0) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    wait_for_previous(EARLY)
    gate = tl.zeros((BLOCK_N, ROWS), tl.float32)
    up = tl.zeros((BLOCK_N, ROWS), tl.float32)
    if MORE:
        gate_more = tl.zeros((BLOCK_N, MORE), tl.float32)
        up_more = tl.zeros((BLOCK_N, MORE), tl.float32)
    for k in tl.range(0, inner, BLOCK_K):
        gates = matrix.load([first, k])
        ups = matrix.load([first + outputs, k])
        columns = tl.trans(x.load([0, k]))
        gate = tl.dot(gates, columns, gate, input_precision="ieee")
        up = tl.dot(ups, columns, up, input_precision="ieee")
        if MORE:
            columns = tl.trans(x_more.load([ROWS, k]))
            gate_more = tl.dot(gates, columns, gate_more, input_precision="ieee")
            up_more = tl.dot(ups, columns, up_more, input_precision="ieee")
    _put(gate, up, bias, out, n, tl.arange(0, ROWS), rows, outputs, BIAS, KIND)
    if MORE:
        _put(gate_more, up_more, bias, out, n, ROWS + tl.arange(0, MORE), rows, outputs, BIAS, KIND)


def _blocks(matrix: Tensor, rows: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(matrix, [rows, BLOCK_K])


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Return activation(gate) * up [rows, n] for x [rows, inner], one tile, and weight [2n, inner], gate rows first."""
    x = x.contiguous()
    rows, inner = x.shape
    outputs = len(weight) // 2
    out = x.new_empty(rows, outputs)
    tile = next(tile for tile in TILES if tile.rows + tile.more >= rows)
    _gated_rows[(cdiv(outputs, GATED_OUTPUTS),)](
        weight if bias is None else bias, out, rows, outputs, inner,
        _blocks(x, tile.rows), _blocks(x, tile.more or tile.rows), _blocks(weight, GATED_OUTPUTS),
        BIAS=bias is not None, KIND=KINDS[activation], ROWS=tile.rows, MORE=tile.more, BLOCK_N=GATED_OUTPUTS, BLOCK_K=BLOCK_K,
        num_warps=GATED_WARPS, num_stages=tile.stages, **overlapping(),
    )  # fmt: skip
    return out
