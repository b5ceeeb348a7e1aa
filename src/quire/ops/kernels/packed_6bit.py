"""GEMM with a 6-bit integer matrix (GGUF's Q5 and Q6) with a scale per 16 columns; `packed.py` for 6 bits.

A block of a row has 128 columns, 8 places of 16, in three planes of 16 words of 16 bits. Word j of

    plane 0   has the lower 4 bits of columns j, j + 16, j + 32, j + 48, from the lowest bits on
    plane 1   the same of columns j + 64, j + 80, j + 96, j + 112
    plane 2   the upper 2 bits of all eight

so that two shifts and two masks turn two neighbouring words, one register, into two neighbouring values of the activation's
dtype. A plane of TILE neighbouring rows is contiguous; their next plane and next block follow. The eight scales of a block are
two words of 64 bits in float16, relative to a power of two per row, so that none underflows. Zero points are stored in the same
way.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.kernels.activation import constants_of
from quire.ops.kernels.bit_packing import LARGE, assembles
from quire.ops.kernels.launcher import cdiv, launched, let_next_start, overlapping, power_of_two, prefetch, wait_for_previous
from quire.ops.kernels.packed import AHEAD, PackedConfig, concatenate, scaled
from quire.ops.kernels.tiles import add_shares, put_outputs, turns_of
from quire.ops.quantized_layouts import PackedInts

PLACE, PLACES, PLANES = 16, 8, 3
BLOCK = PLACE * PLACES  # columns
MIDDLE = 128  # the 8-bit integer that stands for 0
LOWEST = MIDDLE - 32
LESS = {"bf16": "0xC320C320", "fp16": "0xE420E420"}  # minus the large number and 32
VALUES_AT_ONCE = 1 << 26  # packed together
MIN_FACTOR = 2.0**-100


@dataclass(frozen=True)
class Packed6Bit:
    words: Tensor  # [outputs, blocks * 48] int16
    scales: Tensor  # [2 * blocks, outputs] int64
    factors: Tensor  # [outputs] float32
    zeros: Tensor | None  # like scales
    tile: int

    form = "int6"
    groups = PLACES  # per block

    @property
    def outputs(self) -> int:
        return self.words.shape[0]

    @property
    def blocks(self) -> int:
        return self.words.shape[1] // (PLANES * PLACE)

    @property
    def columns(self) -> int:
        return self.blocks * BLOCK

    def constants(self, x: Tensor) -> dict[str, Any]:
        return {
            "ZEROS": self.zeros is not None, "PADDED": self.columns > x.shape[-1], "ASM": assembles(x), "TILE": self.tile
        }  # fmt: skip

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.words, self.scales, self.factors, self.scales if self.zeros is None else self.zeros


def pack_6bit(form: PackedInts, tile: int) -> Packed6Bit | None:
    """Pack an 8-bit matrix; None: it has integers beyond 6 bits, or other groups."""
    numbers = form.numbers
    if form.bits != 8 or numbers.dim() > 2 or form.group % PLACE:
        return None
    lowest, largest = torch.stack(numbers.aminmax()).tolist()
    if lowest < LOWEST or largest >= LOWEST + 64:
        return None
    outputs, inputs = numbers.shape
    blocks = cdiv(inputs, BLOCK)
    words = torch.empty(outputs, blocks * PLANES * PLACE, dtype=torch.int16, device=numbers.device)
    step = max(1, VALUES_AT_ONCE // (blocks * BLOCK) // tile) * tile
    for start in range(0, outputs, step):
        some = F.pad(numbers[start : start + step] - LOWEST, (0, blocks * BLOCK - inputs), value=32)
        planes = _planes(some.view(-1, blocks, PLACES, PLACE).int())
        words[start : start + step] = planes.view(-1, tile, *planes.shape[1:]).permute(0, 2, 3, 1, 4).reshape(len(some), -1)
    each = form.group // PLACE
    zeros = None if form.zeros is None else _fours((MIDDLE - form.zeros.float()).half(), each, blocks)
    scale = form.scale.float()
    factors = torch.exp2(scale.abs().amax(-1).clamp(min=MIN_FACTOR).log2().ceil())
    return Packed6Bit(words, _fours((scale / factors[:, None]).half(), each, blocks), factors, zeros, tile)


def _planes(numbers: Tensor) -> Tensor:
    """Return numbers [rows, blocks, places, 16] of 0 ... 63 as [rows, blocks, planes, 16] int16."""
    lower, upper = numbers & 15, numbers >> 4
    found = [sum(lower[:, :, half * 4 + place] << (4 * place) for place in range(4)) for half in range(2)]
    found.append(sum(upper[:, :, place] << (2 * place) for place in range(PLACES)))
    planes = torch.stack(found, dim=2)  # type: ignore[arg-type]
    return (planes - ((planes & 0x8000) << 1)).to(torch.int16)


def _fours(factors: Tensor, each: int, blocks: int) -> Tensor:
    """Return factors [outputs, groups] float16, each for `each` places, as [2 * blocks, outputs] int64."""
    wide = F.pad(factors.repeat_interleave(each, -1), (0, blocks * PLACES - factors.shape[-1] * each))
    return wide.contiguous().view(torch.int64).t().contiguous()


@triton.constexpr_function
def _assembly(place, name, zeros):
    """Return assembly: two words of a lower plane, $1, and of the upper one, $2, to two values, $0 (zeros: + $3)."""
    large, kind, one, _, _ = LARGE[name]
    far = 4 - 2 * place
    lines = [".reg .b32 t, s, c, u;", f"mov.b32 c, {large};", f"shr.b32 t, $1, {place % 4 * 4};"]
    lines += ["lop3.b32 t, t, 0x000F000F, c, 0xEA;", f"sh{'l' if far >= 0 else 'r'}.b32 s, $2, {abs(far)};"]
    lines += ["lop3.b32 t, s, 0x00300030, t, 0xEA;", f"mov.b32 u, {one};", f"mov.b32 s, {LESS[name]};"]
    lines += [f"fma.rn.{kind} t, t, u, s;"]
    if zeros:
        lines += [f"fma.rn.{kind} t, t, u, $3;"]
    return "{ " + " ".join(lines) + " mov.b32 $0, t; }"


@triton.jit
def _half_in(four, PLACE: tl.constexpr):
    """Return the float16 at index PLACE of 64-bit words."""
    return (four >> (PLACE % 4 * 16)).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _unpack(lower, upper, zero, PLACE: tl.constexpr, ZEROS: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr):
    """Return the values at a place of words [N, 16], plus `zero` [N] of that place, in dtype KIND."""
    if ASM:
        name: tl.constexpr = "bf16" if tl.bfloat16 == KIND else "fp16"
        added = _half_in(zero, PLACE).to(KIND)
        if ZEROS:
            all_three = [lower, upper, tl.broadcast_to(added[:, None], lower.shape)]
            return tl.inline_asm_elementwise(_assembly(PLACE, name, True), "=r,r,r,r", all_three, added.dtype, True, 2)
        else:  # noqa: RET505
            return tl.inline_asm_elementwise(_assembly(PLACE, name, False), "=r,r,r", [lower, upper], added.dtype, True, 2)
    else:
        number = ((lower >> (PLACE % 4 * 4)) & 15) + ((upper >> (2 * PLACE)) & 3) * 16
        value = number.to(tl.float32) - 32.0
        if ZEROS:
            value += _half_in(zero, PLACE).to(tl.float32)[:, None]
        return value.to(KIND)


@triton.jit
def _two(
    lower, upper, scale, zero, PLACE: tl.constexpr, ZEROS: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """The values at a place and at the next one, [N, 32]."""
    EXACT: tl.constexpr = tl.float16 == KIND
    a = _unpack(lower, upper, zero, PLACE, ZEROS, KIND, ASM)
    b = _unpack(lower, upper, zero, PLACE + 1, ZEROS, KIND, ASM)
    a = scaled(a, _half_in(scale, PLACE).to(tl.float32), EXACT, ASM)
    b = scaled(b, _half_in(scale, PLACE + 1).to(tl.float32), EXACT, ASM)
    return concatenate(a, b)


@triton.jit
def _row_start(row, BLOCKS, TILE: tl.constexpr):
    """Return the memory index of the first words of rows."""
    return (row // TILE).to(tl.int64) * (BLOCKS * 48 * TILE) + row % TILE * 16


@launched
@triton.jit(do_not_specialize=["rows"])
def _packed_6bit(
    x,  # [rows, inner]
    words,  # [outputs, BLOCKS * 48] int16; gated: [2 * outputs, ...]
    scales,  # [2 * BLOCKS, SCALES] int64
    factors,  # [SCALES] float32
    zeros,  # like scales
    bias,  # one value per row of the matrix
    out,  # [rows, outputs]
    sums,  # float32 partial sums of each program's tile
    turns,  # [tiles] zeros: counters of finished shares
    rows,
    outputs,
    inner,
    BLOCKS,
    SCALES,  # per line of scales
    ZEROS: tl.constexpr,
    PADDED: tl.constexpr,  # whether there are more columns than in x
    ASM: tl.constexpr,
    TILE: tl.constexpr,  # rows of the matrix whose planes are contiguous
    BIAS: tl.constexpr,
    KIND: tl.constexpr,  # activation of a gated matrix; "": not gated
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    FOLD: tl.constexpr,  # whether sums run on in tensor cores
    SHARES: tl.constexpr,
    AHEAD: tl.constexpr,  # blocks that are prefetched before x is ready
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    GATED: tl.constexpr = KIND != ""
    OUTPUTS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    kind: tl.constexpr = x.dtype.element_ty
    STEP: tl.constexpr = 48 * TILE  # words per block
    tile = tl.program_id(0)
    row_tiles = tl.cdiv(rows, ROWS)
    r = (tile % row_tiles * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    exists = r < rows
    begins = tile // row_tiles * OUTPUTS
    at = tl.arange(0, BLOCK_N)
    read = tl.minimum(begins + at % OUTPUTS, outputs - 1) + at // OUTPUTS * outputs
    each = (BLOCKS + SHARES - 1) // SHARES
    begin = tl.program_id(1) * each
    end = tl.minimum(begin + each, BLOCKS)
    first = words + _row_start(read, BLOCKS, TILE)[:, None]
    if EARLY:
        for plane in tl.static_range(3):
            prefetch(first + plane * (16 * TILE), begin, end, STEP, AHEAD)
        wait_for_previous(EARLY)
    k = tl.arange(0, 128)
    columns = x + r[:, None] * inner + k[None, :]
    first += tl.arange(0, 16)[None, :]
    acc = tl.zeros((BLOCK_N, ROWS), tl.float32)
    zero_low, zero_high = read.to(tl.int64), read.to(tl.int64)
    for block in tl.range(begin, end):
        low = tl.load(first + block * STEP)
        high = tl.load(first + block * STEP + 16 * TILE)
        upper = tl.load(first + block * STEP + 32 * TILE)
        real = exists[:, None] & (k < inner - block * 128)[None, :] if PADDED else exists[:, None]
        part = tl.load(columns + block * 128, mask=real, other=0.0)
        line = 2 * block * SCALES + read
        scale_low, scale_high = tl.load(scales + line), tl.load(scales + line + SCALES)
        if ZEROS:
            zero_low, zero_high = tl.load(zeros + line), tl.load(zeros + line + SCALES)
        value = concatenate(
            concatenate(
                _two(low, upper, scale_low, zero_low, 0, ZEROS, kind, ASM),
                _two(low, upper, scale_low, zero_low, 2, ZEROS, kind, ASM),
            ),
            concatenate(
                _two(high, upper, scale_high, zero_high, 4, ZEROS, kind, ASM),
                _two(high, upper, scale_high, zero_high, 6, ZEROS, kind, ASM),
            ),
        )
        if FOLD:
            acc = tl.dot(value, tl.trans(part), acc, input_precision="ieee")
        else:  # times 1, as in `packed.py`
            acc += tl.dot(value, tl.trans(part), input_precision="ieee") * tl.where(read >= 0, 1.0, 0.0)[:, None]
    if SHARES > 1:
        acc, last = add_shares(acc, sums, turns, tile, SHARES)
        if not last:
            return
    acc *= tl.load(factors + read)[:, None]
    put_outputs(acc, bias, out, read, begins, r, exists, outputs, BIAS, KIND, ALPHA, LIMIT)


def product(x: Tensor, matrix: Packed6Bit, bias: Tensor | None, activation: str, config: PackedConfig) -> Tensor:
    """Return x [rows, inputs] times the matrix [rows, outputs]; with an activation: gate rows first -> [rows, outputs / 2]."""
    x = x.contiguous()
    rows, inputs = x.shape
    outputs = matrix.outputs // 2 if activation else matrix.outputs
    out = x.new_empty(rows, outputs)
    tiles = cdiv(rows, config.rows) * cdiv(outputs, config.high // 2 if activation else config.high)
    size = tiles * config.shares * config.rows * config.high if config.shares > 1 else 1
    _packed_6bit[(tiles, config.shares)](
        x, *matrix.tensors, matrix.words if bias is None else bias, out, x.new_empty(size, dtype=torch.float32),
        turns_of(x.device), rows, outputs, inputs, matrix.blocks, matrix.outputs, **matrix.constants(x),
        BIAS=bias is not None, **constants_of(activation), FOLD=config.fold, SHARES=config.shares,
        AHEAD=power_of_two(min(cdiv(matrix.blocks, config.shares), AHEAD)), ROWS=config.rows, BLOCK_N=config.high,
        num_warps=config.warps, num_stages=config.stages, **overlapping(),
    )  # fmt: skip
    return out


@launched
@triton.jit
def _dequantize(
    words,  # [outputs, BLOCKS * 48] int16
    scales,  # [2 * BLOCKS, outputs] int64
    factors,  # [outputs] float32
    zeros,  # like scales
    out,  # [outputs, inner]
    outputs,
    inner,
    BLOCKS,
    ZEROS: tl.constexpr,
    PADDED: tl.constexpr,
    ASM: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    kind: tl.constexpr = out.dtype.element_ty
    block = tl.program_id(1)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = n < outputs
    j = tl.arange(0, 16)
    first = words + _row_start(n, BLOCKS, TILE)[:, None] + block * (48 * TILE) + j[None, :]
    upper = tl.load(first + 32 * TILE, mask=real[:, None], other=0)
    factor = tl.load(factors + n, mask=real, other=0.0)
    for half in tl.static_range(2):
        lower = tl.load(first + half * (16 * TILE), mask=real[:, None], other=0)
        line = (2 * block + half) * outputs + n
        scale = tl.load(scales + line, mask=real, other=0)
        zero = tl.load(zeros + line, mask=real, other=0) if ZEROS else scale
        for place in tl.static_range(4):
            number = _unpack(lower, upper, zero, half * 4 + place, ZEROS, kind, ASM).to(tl.float32)
            column = block * 128 + (half * 4 + place) * 16 + j
            inside = real[:, None] & (column < inner)[None, :] if PADDED else real[:, None]
            value = number * (_half_in(scale, place).to(tl.float32) * factor)[:, None]
            tl.store(out + n.to(tl.int64)[:, None] * inner + column[None, :], value.to(kind), mask=inside)


def dequantize(matrix: Packed6Bit, like: Tensor) -> Tensor:
    """Return the matrix [outputs, inputs] in the dtype and with the inputs of `like` [..., inputs]."""
    out, high = like.new_empty(matrix.outputs, like.shape[-1]), 64
    _dequantize[(cdiv(matrix.outputs, high), matrix.blocks)](
        *matrix.tensors, out, matrix.outputs, out.shape[-1], matrix.blocks, **matrix.constants(like), ROWS=high,
        num_warps=4, **overlapping(),
    )  # fmt: skip
    return out
