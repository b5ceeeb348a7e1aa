"""Matrices of few bits: packed, multiplied as they lie, dequantized, and rows rounded to 8 bits; against their forms."""

import dataclasses

import pytest
import torch
from kernel_support import DTYPES

from quire.ops.activation import reference_gated
from quire.ops.packed import choose_config, pack
from quire.ops.quantized_layouts import (
    FLOAT8_MAX,
    INT8_MAX,
    Activation,
    Float4,
    Float8,
    Int8,
    PackedInts,
    Rounding,
    pack_nibbles,
)

pytest.importorskip("triton")
from quire.ops.kernels.bit_packing import dequantize
from quire.ops.kernels.packed import PackedConfig, product
from quire.ops.kernels.packed_8bit import Tile, blocks_product, library_product
from quire.ops.kernels.rounding import rescale, round_all, round_groups, round_rows

LOOSE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def some(*shape, low=0, high=256):
    return torch.randint(low, high, shape, dtype=torch.uint8)


def ints(bits, outputs, inputs, group, zeros):
    numbers = some(outputs, inputs, high=2**bits)
    scale = torch.rand(outputs, inputs // group) * 2 ** (3 - bits)
    offsets = some(outputs, inputs // group, high=2**bits) if zeros else None
    if zeros == "any":
        offsets = 2 ** (bits - 1) + torch.randint(-64, 64, offsets.shape) / 16
    return PackedInts(bits, group, pack_nibbles(numbers) if bits == 4 else numbers, scale, offsets, None)


def shortened(form, kind):
    return dataclasses.replace(form, scale=form.scale.to(kind))


def float8(outputs, inputs, rows=1, columns=None):
    numbers = torch.randn(outputs, inputs).to(torch.float8_e4m3fn)
    columns = columns or inputs
    scale = torch.rand(-(-outputs // rows), -(-inputs // columns))
    return Float8(rows, columns, numbers, scale, Activation.TOKEN)


def forms():
    yield "int4 of 32", ints(4, 48, 256, 32, False)
    yield "int4 of 64 with zeros, odd groups", ints(4, 70, 192, 64, True)
    yield "int4 of 32 with any zeros", ints(4, 48, 128, 32, "any")
    yield "int8 of 16 with any zeros", ints(8, 32, 64, 16, "any")
    yield "int4 of 128, short scales", shortened(ints(4, 48, 256, 128, False), torch.bfloat16)
    yield "int4 of 64 with zeros, short scales", shortened(ints(4, 48, 192, 64, True), torch.float16)
    yield "int4 of 128 with any zeros, short scales", shortened(ints(4, 48, 384, 128, "any"), torch.float16)
    yield "int8 of 128 with zeros, short scales", shortened(ints(8, 48, 256, 128, True), torch.float16)
    yield "int4 by channel with short scales", shortened(ints(4, 64, 512, 512, True), torch.float16)
    yield "int4 by channel", ints(4, 64, 512, 512, True)
    yield "int8 of 32", ints(8, 64, 128, 32, False)
    yield "int8 by channel with zeros", ints(8, 48, 160, 160, True)
    yield "w8a8", Int8(torch.randint(-128, 128, (64, 192), dtype=torch.int8), torch.rand(64, 1))
    yield "fp8 by channel", float8(96, 192)
    yield "fp8 in blocks", float8(64, 128, 32, 64)
    yield "fp8 in blocks, the last ones smaller", float8(96, 192, 64, 128)
    yield "nvfp4", Float4("e2m1", 16, some(64, 128), torch.rand(64, 16).to(torch.float8_e4m3fn), torch.rand(64, 1))
    yield "nvfp4 without a factor", Float4("e2m1", 16, some(64, 128), torch.rand(64, 16).to(torch.float8_e4m3fn))
    yield "mxfp4, the last block smaller", Float4("e2m1", 32, some(64, 80), some(64, 5, low=120, high=130))
    yield "mxfp4, one group", Float4("e2m1", 32, some(64, 16), some(64, 1, low=120, high=130))
    yield "mxfp4", Float4("e2m1", 32, some(64, 64), some(64, 4, low=120, high=130))


torch.manual_seed(3)
FORMS = dict(forms())


def there(form, device):
    tensors = {
        item.name: getattr(form, item.name).to(device)
        for item in dataclasses.fields(form)
        if isinstance(getattr(form, item.name), torch.Tensor)
    }
    return dataclasses.replace(form, **tensors)


def compare(out, expected):
    worst = (out.float() - expected).abs().max() / expected.abs().max()
    assert worst < LOOSE[out.dtype], worst


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMS)
def test_products(name, dtype, device):
    form = there(FORMS[name], device)
    matrix = pack(form)
    packed = matrix.packed
    floats = form.dequantize()
    bias = torch.randn(form.outputs, device=device).to(dtype)
    for rows in (1, 5, 40, 70) if dtype != torch.float32 else (1, 20):
        x = (torch.randn(rows, form.inputs, device=device) / floats.norm(dim=1).max()).to(dtype)
        expected = x.float() @ floats.T + bias.float()
        ways = [choose_config(packed, rows)]
        if rows == 20:
            ways = [
                way._replace(rows=16, high=16, shares=shares, fold=fold)
                for way in ways
                for shares, fold in ((3, False), (1, True))
            ]
        for way in ways:
            compare(product(x, packed, bias, "", way), expected)
            if form.outputs % 2 == 0 and rows < 40:
                half = way._replace(rows=16, high=16)
                compare(product(x, packed, bias, "silu", half), reference_gated(expected.to(dtype), "silu").float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMS)
def test_dequantized(name, dtype, device):
    form = there(FORMS[name], device)
    x = torch.randn(2, form.inputs, device=device).to(dtype)
    compare(dequantize(pack(form).packed, x), form.dequantize())


def test_a_row_is_the_same_in_any_company(device):
    form = there(FORMS["int4 of 32"], device)
    packed = pack(form).packed
    way = PackedConfig(16, 16, 2, 4, 3)
    x = torch.randn(20, form.inputs, device=device)
    together = product(x, packed, None, "", way)
    for row in (0, 7, 19):
        assert torch.equal(product(x[row : row + 1], packed, None, "", way)[0], together[row])


def test_inputs_in_an_order_of_their_own(device, monkeypatch):
    """Row by row, and dequantized, as the matrix is for more rows."""
    form = there(FORMS["int8 of 32"], device)
    order = torch.randperm(form.inputs, device=device).to(torch.int32)
    matrix = pack(dataclasses.replace(form, order=order))
    x = torch.randn(3, form.inputs, device=device)
    expected = x @ dataclasses.replace(form, order=order).dequantize().T
    compare(matrix.multiply(x, None), expected)
    monkeypatch.setattr("quire.ops.packed.MAX_READ_BYTES", 0)
    compare(matrix.multiply(x, None), expected)


@pytest.mark.parametrize("given", [False, True])
# the interpreter does not round to float8
@pytest.mark.parametrize("name", ["w8a8", pytest.param("fp8 by channel", marks=pytest.mark.gpu)])
def test_rows_rounded_to_8_bits(name, given, device):
    """As the matrix has its columns: the product of both as they lie is that of the rounded rows."""
    form = there(FORMS[name], device)
    packed = pack(form).packed
    # numbers of which none is half-way between two of 8 bits
    x = torch.randn(9, form.inputs, generator=torch.Generator().manual_seed(5)).to(device) / form.dequantize().norm(dim=1).max()
    kind, largest = (torch.int8, INT8_MAX) if name == "w8a8" else (torch.float8_e4m3fn, FLOAT8_MAX)
    known = (x.abs().max() / largest * 0.9).view(1) if given else None
    rounded = round_rows(x, Rounding(kind, packed.columns, packed.value_stride, given=known))
    numbers, scales = rounded.numbers, rounded.scales
    if given:
        assert (scales == known).all()
    else:
        torch.testing.assert_close(scales, x.abs().amax(1) / largest)
    lies = packed.words.view(torch.int8 if name == "w8a8" else torch.float8_e4m3fn).float()
    sums = numbers.float() @ lies.T
    wide = (x / scales[:, None]).clamp(-largest, largest)
    values = wide.round() if name == "w8a8" else wide.to(kind).float()
    expected = (values * scales[:, None]) @ form.dequantize().T
    bias = torch.randn(form.outputs, device=device)
    scale = packed.scales.flatten()
    torch.testing.assert_close(rescale(sums, scales, scale, bias, "", x.dtype), expected + bias, atol=1e-3, rtol=1e-3)
    gated = rescale(sums, scales, scale, None, "silu", x.dtype)
    torch.testing.assert_close(gated, reference_gated(expected, "silu"), atol=1e-3, rtol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMS)
def test_any_number_of_rows(name, dtype, device):
    """By whatever way is chosen; where rows are rounded, within what that rounds."""
    form = there(FORMS[name], device)
    matrix = pack(form)
    for rows in (1, 16, 17, 33, 64, 65, 300, 700):
        x = (torch.randn(rows, form.inputs, device=device) / form.dequantize().norm(dim=1).max()).to(dtype)
        expected = x.float() @ form.dequantize().T
        loose = 0.1 if matrix.activation is not Activation.NONE else LOOSE[dtype]
        for activation in ("", "silu") if form.outputs % 2 == 0 else ("",):
            wanted = reference_gated(expected.to(dtype), "silu").float() if activation else expected
            out = matrix.multiply(x, None, activation).float()
            assert (out - wanted).abs().max() / wanted.abs().max() < loose, (rows, activation)


def test_rows_and_matrix_by_blocks(device):
    """Rows that are rounded by groups, and what they give; more rows may be asked for than there are."""
    numbers, scale = torch.randn(128, 384).to(torch.float8_e4m3fn), torch.rand(1, 3) + 0.5
    form = there(Float8(128, 128, numbers, scale, Activation.GROUP), device)
    x = torch.randn(5, 384, device=device)
    rows = round_groups(x[:, :300].contiguous(), Rounding(torch.float8_e4m3fn, 384, 64, 128))
    rounded, factors = rows.numbers, rows.scales
    assert rounded.shape == (16, 384) and factors.shape == (3, 16)
    values = rounded[:5].float().view(5, 3, 64, 2).transpose(2, 3).reshape(5, 3, 128) * factors[:, :5].t()[..., None]
    values = values.view(5, 384)
    assert (values[:, :300] - x[:, :300]).abs().max() < 0.15 * x.abs().max() and not values[:, 300:].any()
    expected = x @ form.dequantize().T
    rows = round_groups(x, Rounding(torch.float8_e4m3fn, 384, 64, 128))
    found = blocks_product(rows, pack(form).packed, None, Tile(16, 64, 4, 3, 2))
    assert (found - expected).abs().max() < 0.1 * expected.abs().max()


@pytest.mark.gpu
def test_scales_by_block_in_the_library(device, monkeypatch):
    """Any number of rows, those that it does not take too: as our kernel has them, but for the last bit."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("torch has these products on compute capability 9.0 only")
    numbers, scale = torch.randn(384, 1024).to(torch.float8_e4m3fn), torch.rand(3, 8) * 0.01 + 0.001
    matrix = pack(there(Float8(128, 128, numbers, scale, Activation.GROUP), device))
    bias = torch.randn(384, device=device).bfloat16()
    assert not matrix._in_library(torch.empty(128, 1024, device=device, dtype=torch.bfloat16))  # of so few outputs
    for rows in (129, 130, 131, 150, 300, 1023):
        x = torch.randn(rows, 1024, device=device).bfloat16()
        rounded = round_all(x, matrix.rounding(x))
        assert matrix._in_library(x) and library_product(rounded, matrix.packed, matrix.block_scales, None) is not None
        found = [matrix.multiply(x, some, activation) for some in (None, bias) for activation in ("", "silu")]
        with monkeypatch.context() as patch:
            patch.setattr("quire.ops.packed.MIN_CUDA_OF_BLOCKS", "99")
            assert not matrix._in_library(x)
            ours = [matrix.multiply(x, some, activation) for some in (None, bias) for activation in ("", "silu")]
        for a, b in zip(found, ours, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * b.abs().max().item())


def test_what_no_kernel_reads_is_told(device):
    table = there(Float4("nf4", 64, some(8, 64), torch.rand(8, 2)), device)
    odd = there(ints(4, 8, 40, 20, False), device)
    assert pack(table) is None and pack(odd) is None
