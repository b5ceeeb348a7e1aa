"""4-, 6- and 8-bit matrices on a GPU, packed once after loading for the kernels that read them.

    one token     the packed matrix is streamed and multiplied in float32 (`kernels/packed_rows.py`): 8 bits, or small
    some tokens   the packed matrix is streamed and multiplied by tensor cores (`kernels/packed.py`, `kernels/packed_6bit.py`):
                  activations stay in 16 bits
    many tokens   an 8-bit GEMM if the scheme quantizes activations; else a 16-bit GEMM by a library, with a 16-bit copy of the
                  matrix (`quantized.py`) or by dequantizing it each time

The thresholds were measured on an H200. In the fixed order (`order.py`) the number of rows decides nothing: schemes that
quantize activations always do, and the others use the kernel for some tokens.
"""

from dataclasses import dataclass
from math import gcd, lcm
from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.activation import gated
from quire.ops.arguments import ClampedSwiglu, ExpertBiases
from quire.ops.linear import SHORT, gated_linear, linear
from quire.ops.order import order_is_fixed
from quire.ops.quantized_layouts import (
    Activation,
    Activations,
    Float4,
    Float8,
    Int8,
    PackedInts,
    RoundedRows,
    Rounding,
    powers_of_two,
    unpack_nibbles,
)

FILLING_PROGRAMS = 264  # programs that keep an H200 busy
# tiles of int8 matrices as rows, outputs, warps, stages: the smallest with at most one program per processor; and, where there
# are more, by the number of rows
INT_TILES = ((64, 64, 4, 5), (128, 64, 4, 4), (128, 128, 8, 3))
INT_MANY = ((64, 64, 128, 4, 4), (1 << 62, 128, 128, 8, 3))


def choose_program(packed: Any) -> Any:
    """Return the launch configuration of the one-token kernel."""
    from quire.ops.kernels.launcher import power_of_two
    from quire.ops.kernels.packed_rows import Program

    wide = packed.words.shape[-1]
    if packed.form in ("float8", "int8") and wide < 4096 and packed.outputs > 4 * wide:
        return Program(4, 512, 2)
    return Program(8 if wide <= 1024 else 4, max(256, min(1024, power_of_two(wide))), 4)


def choose_config(packed: Any, rows: int) -> Any:
    from quire.ops.kernels.packed import PackedConfig

    block = next((block for block in (16, 32, 64, 128) if rows <= block), 256)
    if block == 128 and packed.outputs < 128 * FILLING_PROGRAMS // 2:  # adding shares of so high a tile takes too long
        block = 64
    high = 64 if packed.form in ("int8", "float8") and block <= 64 else 128
    tiles = -(-packed.outputs // high) * -(-rows // block)
    programs = 3 * FILLING_PROGRAMS if block <= 32 else FILLING_PROGRAMS if block <= 128 else FILLING_PROGRAMS // 2
    shares = choose_shares(programs / tiles, packed.blocks)
    warps = 8 if block == 256 or (block > 32 and packed.form == "int6") else 4  # these need more registers
    return PackedConfig(block, high, shares, warps, 4 if block <= 32 else 3, fold=block > 64)


def choose_tile(packed: Any, rows: int) -> Any:
    """Return the tile of the kernel with scales per block."""
    from quire.ops.kernels.packed_8bit import Tile

    block, high = 64 if rows <= 64 else 128, 64
    tiles = -(-packed.outputs // high) * -(-rows // block)
    shares = choose_shares(FILLING_PROGRAMS / tiles, packed.columns // (512 if block == 64 else 2048))
    return Tile(block, high, 4, 3 if tiles >= FILLING_PROGRAMS or block * shares > 256 else 5, shares)


def choose_ints(rows: int, outputs: int, columns: int) -> Any:
    """Return the tile of the int8 kernel."""
    from quire.ops.kernels.packed_8bit import IntTile

    for block, high, warps, stages in INT_TILES:
        tiles = -(-outputs // high) * -(-rows // block)
        if tiles <= FILLING_PROGRAMS // 2:
            return IntTile(block, high, warps, stages, choose_shares(FILLING_PROGRAMS / 2.75 / tiles, columns // 512), 256)
    return IntTile(*next(tile for most, *tile in INT_MANY if rows <= most))


def choose_shares(target: float, most: int) -> int:
    """Return a power of two: a kernel is compiled for each number of shares."""
    return next(shares for shares in (8, 4, 2, 1) if shares == 1 or (shares <= most and shares < 1.42 * target))


def choose_expert_config(packed: Any, rows: float) -> Any:
    """Return the launch configuration for this average number of rows per expert."""
    from quire.ops.kernels.bit_packing import VALUES_PER_WORD
    from quire.ops.kernels.packed import PackedConfig

    block, high = (
        (16, 128) if rows <= 8 else (32, 128 if VALUES_PER_WORD[packed.form] == 4 else 64) if rows <= 40 else (64, 128)
    )
    return PackedConfig(block, high, 1, 4, 3 if block == 64 else 4)


MAX_STREAMED_ROWS = 256  # for more rows it is faster to dequantize
CACHED_VALUES = 1 << 25  # of a matrix that stays in the L2 cache when dequantized: faster from 128 rows on
# rows from which on an 8-bit GEMM is faster: fp8 with a scale per row, int8, fp8 with a scale per block
MIN_QUANTIZED_ROWS = 2, 33, 49
MIN_DEQUANTIZED_ROWS = {"float4": 384, "float8": 768}  # per expert; dequantizing is faster from these on; others: 1024
MAX_DEQUANTIZED_VALUES = 1 << 30  # of all experts' matrices
MAX_FLOAT4_SLOTS = 8  # for which it is faster if each reads its expert's matrices separately
BLOCK = 128  # columns per scale if activations are quantized in blocks
MAX_READ_BYTES = 1 << 23  # of a matrix, read once per row
VALUES_AT_ONCE = 1 << 26  # that are packed at a time
LOW_OUTPUTS, WIDE_OUTPUTS = 4096, 16384  # matrices with as many outputs need fewer rows for a library to be faster
MIN_CUDA_OF_BLOCKS = "12.9"  # whose library multiplies with scales per block
TILE = 128  # rows of a matrix whose blocks are contiguous
MAX_ORDERED_FLOAT8_ROWS = 64  # that our kernel multiplies in fp8 in the fixed order: libraries may use split-K for so few
MAX_INT8_ROWS = 2048  # that our kernel multiplies in int8; a library for more


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix in a packed layout of GPUs (`kernels/bit_packing.py`)."""

    kind: str
    inputs: int
    packed: Any  # kernels.packed.Packed
    order: Tensor | None = None  # [inputs] input of each column; None: in order
    activation: Activation = Activation.NONE
    input_scale: Tensor | None = None
    block_scales: Tensor | None = None  # [inputs / BLOCK, outputs / BLOCK], as libraries require
    copy: Tensor | None = None  # [outputs, inputs] in a 16-bit dtype
    copied_from: int = 0  # rows from which on the copy is faster

    @property
    def outputs(self) -> int:
        return int(self.packed.outputs)

    @overload
    def multiply(self, x: Activations, bias: Tensor | None, activation: str = "") -> Tensor: ...
    @overload
    def multiply(self, x: Activations, bias: Tensor | None, activation: str, rounding: Rounding | None) -> Activations: ...
    def multiply(
        self, x: Activations, bias: Tensor | None, activation: str = "", rounding: Rounding | None = None
    ) -> Activations:
        """Return x [..., inputs] times the matrix [..., outputs]; with an activation: gate rows first -> [..., outputs / 2].

        rounding: activation quantization of the only reader; by groups, it is fused.
        """
        if isinstance(x, RoundedRows):
            return self._multiply(x, bias, activation, rounding)
        if self.order is not None:
            x = x.index_select(-1, self.order)
        out = self._multiply(x.reshape(-1, x.shape[-1]), bias, activation, rounding)
        return out if isinstance(out, RoundedRows) else out.view(*x.shape[:-1], out.shape[-1])

    def rounding(self, x: Activations) -> Rounding | None:
        """Return the activation quantization for inputs shaped like x; None: inputs stay as they are."""
        packed = self.packed
        float8_rows, int8_rows, block_rows = (1, 1, 1) if order_is_fixed() else MIN_QUANTIZED_ROWS
        if len(x) >= (float8_rows if packed.form == "float8" else int8_rows) and self._rounds(x):
            if packed.form == "int8":
                return Rounding(torch.int8, packed.columns, packed.value_stride)
            return Rounding(torch.float8_e4m3fn, packed.columns, packed.value_stride, given=self.input_scale)
        if len(x) >= block_rows and self._rounds_blocks(x):
            return Rounding(torch.float8_e4m3fn, packed.columns, packed.value_stride, BLOCK)
        return None

    def _multiply(self, x: Activations, bias: Tensor | None, activation: str, after: Rounding | None) -> Activations:
        if (rounding := self.rounding(x)) is not None:
            from quire.ops.kernels.rounding import round_all

            rounded = x if isinstance(x, RoundedRows) else round_all(x, rounding)
            if rounding.group:
                return self._multiply_blocks(rounded, bias, activation, after)
            return self._multiply_rounded(rounded, bias, activation)
        assert isinstance(x, Tensor)
        if order_is_fixed() and x.dtype in SHORT:
            return self._multiply_in_order(x, bias, activation)
        if self.copy is not None and len(x) >= self.copied_from:
            return multiply_floats(x, self.copy, bias, activation)
        from quire.ops.kernels.packed import product
        from quire.ops.kernels.packed_rows import linear as linear_one_row

        rows, packed = len(x), self.packed
        if packed.form == "int6":
            from quire.ops.kernels import packed_6bit

            if self._streams(x):
                return packed_6bit.product(x, packed, bias, activation, choose_config(packed, rows))
        elif (rows == 1 and not self._by_tensor_cores(x)) or rows * packed.words.nbytes <= MAX_READ_BYTES:
            return linear_one_row(x, packed, bias, activation, choose_program(packed))
        if self._streams(x):
            return product(x, packed, bias, activation, choose_config(packed, rows))
        return multiply_floats(x, self.dequantize(x), bias, activation)

    def _multiply_in_order(self, x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        """Multiply 16-bit activations in the fixed order: without split-K, and with scales multiplied into the weights."""
        from quire.ops.kernels import packed, packed_6bit

        if len(x) > MAX_STREAMED_ROWS and self.multiplies_dequantized(x.dtype):
            return multiply_floats(x, self.dequantize(x), bias, activation)
        run = packed_6bit.product if self.packed.form == "int6" else packed.product
        return run(x, self.packed, bias, activation, choose_config(self.packed, len(x))._replace(shares=1, fold=True))

    def multiplies_dequantized(self, dtype: torch.dtype) -> bool:
        """Return whether the kernel in the fixed order multiplies by the values of `dequantize`: then both have the same bits.

        The kernel rounds an integer times its scale once, as `dequantize` does, if the scale is exactly the sum of two values
        of `dtype` and the integer times the second one is exact. It applies a single scale per output to the sum.
        """
        from quire.ops.kernels.bit_packing import ANY_ZEROS

        packed = self.packed
        if packed.groups == 1:
            return False
        match packed.form:
            case "int4":
                exact = packed.scaled == "fp16" or (packed.scaled == "bf16" and dtype == torch.bfloat16)
                return exact and bool(packed.offset != ANY_ZEROS)
            case "float4":
                return bool(packed.scaled == "e8m0") and dtype == torch.bfloat16  # float16 lacks small powers of two
            case form:
                return bool(form == "int6") and packed.zeros is None and dtype == torch.bfloat16

    def dequantize(self, like: Tensor) -> Tensor:
        """Return the matrix [outputs, inputs] in the dtype of `like` [..., inputs], with the inputs in packed order."""
        if self.packed.form == "int6":
            from quire.ops.kernels.packed_6bit import dequantize as dequantize_6bit

            return dequantize_6bit(self.packed, like)
        from quire.ops.kernels.bit_packing import dequantize

        return dequantize(self.packed, like)

    def _streams(self, x: Tensor) -> bool:
        """Return whether unpacking the matrix in registers is faster than dequantizing it."""
        packed, rows = self.packed, len(x)
        return (
            rows <= MAX_STREAMED_ROWS and x.dtype in SHORT and (rows <= 128 or packed.outputs * packed.columns > CACHED_VALUES)
        )

    def _by_tensor_cores(self, x: Tensor) -> bool:
        """Return whether tensor cores are faster for one row, too: where unpacking takes longer than reading."""
        return self.packed.form in ("int4", "float4") and x.dtype in SHORT

    def _rounds(self, x: Activations) -> bool:
        """Return whether activations are quantized with a scale per row, for an 8-bit GEMM."""
        if self.activation not in (Activation.TOKEN, Activation.TENSOR) or self.packed.groups > 1:
            return False
        if self._by_int8_kernel(x):
            return True
        if self.packed.form == "float8" and torch.cuda.get_device_capability(x.device) < (8, 9):
            return False
        return self.outputs % 16 == 0 and self.packed.columns % 16 == 0 and x.dtype in SHORT

    def _by_int8_kernel(self, x: Activations) -> bool:
        """Return whether our int8 kernel is used: up to MAX_INT8_ROWS rows, and for sizes that torch does not support."""
        if self.packed.form != "int8" or x.dtype not in SHORT or (len(x) > MAX_INT8_ROWS and self.outputs % 16 == 0):
            return False
        return torch.cuda.get_device_capability(x.device) >= (9, 0)

    def _rounds_blocks(self, x: Activations) -> bool:
        """Return whether activations are quantized with a scale per block of columns, for our fp8 kernel."""
        if self.activation is not Activation.GROUP or self.packed.group != BLOCK or self.packed.value_stride != BLOCK // 2:
            return False
        return x.dtype in SHORT and torch.cuda.get_device_capability(x.device) >= (8, 9)

    def _in_library(self, x: Activations) -> bool:
        """Return whether torch multiplies with scales per block (Hopper only), and is faster."""
        if order_is_fixed() or x.dtype != torch.bfloat16 or torch.cuda.get_device_capability(x.device) != (9, 0):
            return False
        least = 64 if self.outputs >= WIDE_OUTPUTS else 128 if self.outputs > LOW_OUTPUTS else 129
        return len(x) >= least and (torch.version.cuda or "") >= MIN_CUDA_OF_BLOCKS

    def _multiply_blocks(self, x: RoundedRows, bias: Tensor | None, activation: str, after: Rounding | None) -> Activations:
        from quire.ops.kernels.packed_8bit import blocks_product, library_product

        out = None
        if self.block_scales is not None and self._in_library(x):
            out = library_product(x, self.packed, self.block_scales, bias)
        if out is None:
            tile = choose_tile(self.packed, len(x))
            out = blocks_product(x, self.packed, bias, tile._replace(shares=1) if order_is_fixed() else tile)
        if after is not None and after.group:
            from quire.ops.kernels.rounding import gate_rounded

            return gate_rounded(out, activation, after)
        return gated(out, activation) if activation else out

    def _multiply_float8_in_order(self, x: RoundedRows) -> Tensor:
        """Return unscaled sums with the bits that the library has for more rows."""
        from quire.ops.kernels.linear import FewRowsConfig, few_rows_linear

        matrix = self.packed.words.view(torch.float8_e4m3fn)
        config = FewRowsConfig(256, 4, 1, 16 if len(x) <= 16 else MAX_ORDERED_FLOAT8_ROWS)
        return few_rows_linear(x.numbers, matrix, None, config, kind=_float8_sums(x.dtype))

    def _multiply_rounded(self, x: RoundedRows, bias: Tensor | None, activation: str) -> Tensor:
        from quire.ops.kernels.rounding import rescale

        packed = self.packed
        scale = packed.scales.flatten()
        if len(scale) < self.outputs:
            scale = scale.repeat_interleave(self.outputs // len(scale))
        if self._by_int8_kernel(x):
            from quire.ops.kernels.packed_8bit import ints_product

            tile = choose_ints(len(x), self.outputs, packed.columns)
            return ints_product(x.numbers, x.scales, packed.words.view(torch.int8), scale, bias, activation, tile, x.dtype)
        if packed.form == "int8":
            sums = torch._int_mm(x.numbers, packed.words.view(torch.int8).t())
        elif order_is_fixed() and len(x) <= MAX_ORDERED_FLOAT8_ROWS:
            sums = self._multiply_float8_in_order(x)
        else:
            one = _one(x.device)
            matrix = packed.words.view(torch.float8_e4m3fn).t()
            sums = torch._scaled_mm(x.numbers, matrix, one, one, out_dtype=_float8_sums(x.dtype), use_fast_accum=True)
        return rescale(sums, x.scales, scale, bias, activation, x.dtype)


def multiply_floats(x: Tensor, matrix: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    return gated_linear(x, matrix, bias, activation) if activation else linear(x, matrix, bias)


def _float8_sums(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums; they may exceed float16."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


_ones: dict[torch.device, Tensor] = {}


def _one(device: torch.device) -> Tensor:
    if device not in _ones:
        _ones[device] = torch.ones((), device=device)
    return _ones[device]


def pack(form: Any) -> PackedMatrix | None:
    """Return the matrix packed for GPU kernels; None: no kernel supports it."""
    if form.numbers.dim() > 2 and getattr(form, "order", None) is not None:  # each expert has its own order
        return None
    match form:
        case PackedInts(bits=4):
            packed = _pack("int4", form.unpacked(), form.group, form.scale, _short(form.zeros), fill=8)
        case PackedInts(bits=8) if (packed := _pack_6bit(form)) is not None:
            pass
        case PackedInts(bits=8):
            zeros = form.zeros
            if zeros is not None:
                zeros = (zeros if zeros.is_floating_point() else zeros.to(torch.int16)) - 128
            packed = _pack("int8", (form.numbers ^ 128), form.group, form.scale, _short(zeros), fill=0)
        case Int8():
            packed = _pack("int8", form.numbers.view(torch.uint8), form.inputs, form.scale, None, fill=0, tiled=False)
        case Float8():
            scale = form.scale
            if form.rows > 1 and form.outputs % form.rows:
                scale = scale.repeat_interleave(form.rows, -2)[: form.outputs]
            group = min(form.columns, form.inputs)
            packed = _pack("float8", form.numbers.view(torch.uint8), group, scale, None, fill=0, tiled=False)
        case Float4(code="e2m1"):
            scale, factor = form.scale, form.factor
            # four scales of a block are read together
            fours = form.group == (32 if scale.dtype == torch.uint8 else 16) and scale.shape[-1] > 1
            if not fours or scale.dtype == torch.float32 or (scale.dtype == torch.uint8) != (factor is None):
                scale = powers_of_two(scale) if scale.dtype == torch.uint8 else scale.float()
                scale, factor = scale if factor is None else scale * factor, None
            packed = _pack("float4", unpack_nibbles(form.numbers), form.group, scale, None, fill=0, factor=factor)
        case _:
            return None
    if packed is None:
        return None
    return PackedMatrix(
        form.kind, form.inputs, packed, getattr(form, "order", None),
        getattr(form, "activation", Activation.NONE), getattr(form, "input_scale", None), _block_scales(form),
    )  # fmt: skip


def _pack_6bit(form: PackedInts) -> Any:
    from quire.ops.kernels.packed_6bit import pack_6bit

    return pack_6bit(form, gcd(TILE, form.outputs))


def _block_scales(form: Any) -> Tensor | None:
    if not isinstance(form, Float8) or form.numbers.dim() > 2 or (form.rows, form.columns) != (BLOCK, BLOCK):
        return None
    if form.outputs % BLOCK or form.inputs % (4 * BLOCK):  # four scales are copied at a time
        return None
    return form.scale.float().contiguous().t()


def _short(zeros: Tensor | None) -> Tensor | None:
    return zeros.half() if zeros is not None and zeros.is_floating_point() else zeros


def _pack(
    name: str, numbers: Tensor, group: int, scale: Tensor, zeros: Tensor | None, fill: int,
    factor: Tensor | None = None, tiled: bool = True,
) -> Any:  # fmt: skip
    """Pack numbers [..., outputs, inputs] uint8, one per byte."""
    from quire.ops.kernels.bit_packing import ANY_ZEROS, NO_ZEROS, VALUES_PER_WORD, WHOLE_ZEROS, Packed

    inputs, per = numbers.shape[-1], VALUES_PER_WORD[name]
    groups = scale.shape[-1]
    if groups > 1 and group % 16:
        return None
    value_stride = gcd(128 // per, group) if groups > 1 else 128 // per
    block = per * value_stride
    grain = lcm(block, group) if groups > 1 else block
    columns = -(-inputs // grain) * grain
    if groups > 1:
        more = columns // group - groups
        scale = F.pad(scale, (0, more))
        zeros = None if zeros is None else F.pad(zeros, (0, more))
    else:
        group = columns
    tile = gcd(TILE, numbers.shape[-2]) if tiled else 1
    words = torch.empty(*numbers.shape[:-1], columns // per, dtype=torch.int16, device=numbers.device)
    flat, out = numbers.reshape(-1, inputs), words.view(-1, words.shape[-1])
    step = max(1, VALUES_AT_ONCE // columns // tile) * tile
    for start in range(0, len(flat), step):
        some = F.pad(flat[start : start + step], (0, columns - inputs), value=fill)
        parts = some.view(len(some), -1, per, value_stride).to(torch.int32)
        joined = torch.zeros_like(parts[:, :, 0])
        for index in range(per):
            joined |= parts[:, :, index] << (16 // per * index)
        joined = (joined - ((joined & 0x8000) << 1)).to(torch.int16)  # [rows, blocks, value_stride]
        out[start : start + step] = joined.view(-1, tile, *joined.shape[1:]).transpose(1, 2).reshape(len(some), -1)
    scale = scale.transpose(-1, -2).contiguous()
    zeros = None if zeros is None else zeros.transpose(-1, -2).contiguous()
    offset = NO_ZEROS if zeros is None else ANY_ZEROS if zeros.is_floating_point() else WHOLE_ZEROS
    scaled = ""
    if scale.element_size() == 1:
        scaled = "e8m0" if scale.dtype == torch.uint8 else "e4m3"
        scale = _fours(scale.view(torch.uint8), factor)
    elif scale.dtype in SHORT:
        scaled = "bf16" if scale.dtype == torch.bfloat16 else "fp16"
        if zeros is None and name == "int4":  # one kernel variant less, and scales are prefetched
            zeros, offset = torch.full_like(scale, 8), WHOLE_ZEROS
        above = (torch.zeros_like(scale) if zeros is None else zeros).half()
        scale, zeros = (scale.view(torch.int16).int() & 0xFFFF) | (above.view(torch.int16).int() << 16), None
    return Packed(name, words, scale, zeros, value_stride, group, tile, scaled, offset)


def _fours(scale: Tensor, factor: Tensor | None) -> Tensor:
    """Return scale [..., groups, outputs] uint8 as [..., groups / 4, outputs] int32; with a factor [..., outputs, 1], one line
    more."""
    four = scale.view(*scale.shape[:-2], -1, 4, scale.shape[-1]).int()
    words = four[..., 0, :] | four[..., 1, :] << 8 | four[..., 2, :] << 16 | four[..., 3, :] << 24
    return words if factor is None else torch.cat((words, factor.float().transpose(-1, -2).contiguous().view(torch.int32)), -2)


def packed_experts_forward(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    up: PackedMatrix,
    down: PackedMatrix,
    activation: str | ClampedSwiglu,
    biases: ExpertBiases | None = None,
) -> Tensor:
    """Return the same as `moe.experts_forward`."""
    from quire.ops.kernels import experts as sorted_experts
    from quire.ops.kernels import packed_rows
    from quire.ops.kernels.bit_packing import dequantize
    from quire.ops.kernels.moe import FEW_SLOTS
    from quire.ops.kernels.packed import Slots, product

    tokens, top_k = experts.shape
    if not tokens:
        return torch.empty_like(x)
    x = x.contiguous()
    in_order = order_is_fixed() and x.dtype in SHORT
    if not in_order and experts.numel() <= (MAX_FLOAT4_SLOTS if up.packed.form == "float4" and x.dtype in SHORT else FEW_SLOTS):
        outputs = 16 if x.dtype == torch.float32 else 1
        programs = packed_rows.Program(outputs, 256, 1), packed_rows.Program(outputs, 128, 1)
        return packed_rows.experts_forward(x, weights, experts, up.packed, down.packed, activation, biases, programs)
    before, after = biases or (None, None)
    order, ends = sorted_experts.sort_slots(experts.flatten(), len(up.packed.words))
    each = experts.numel() / len(up.packed.words)
    all_values = up.packed.outputs * up.inputs * len(up.packed.words)
    many = each >= MIN_DEQUANTIZED_ROWS.get(up.packed.form, 1024) and x.dtype in SHORT and all_values <= MAX_DEQUANTIZED_VALUES
    if many and not in_order:
        block = sorted_experts.blocks(each, x.dtype)
        inner = sorted_experts.product(x, dequantize(up.packed, x), before, order, ends, block, top_k, activation)
        y = sorted_experts.product(inner, dequantize(down.packed, inner), after, order, ends, block, 1)
        return sorted_experts.weighted_sum(y, weights, torch.empty_like(x))
    slots = Slots(order, ends, top_k)
    config = choose_expert_config(up.packed, each)._replace(fold=in_order)
    inner = product(x, up.packed, before, activation, config, slots)
    slots = slots._replace(sharing=1)
    y = product(inner, down.packed, after, "", choose_expert_config(down.packed, each)._replace(fold=in_order), slots)
    return sorted_experts.weighted_sum(y, weights, torch.empty_like(x))
