"""Whole numbers of 6 bits: packed, multiplied as they lie, and dequantized; against their forms."""

import pytest
import torch
from kernel_support import DTYPES
from test_triton_packed import compare, ints, some, there

from quire.files.gguf import GGML_TYPES
from quire.ops.activation import reference_gated
from quire.ops.blocks import QuantizedMatrix, to_layout
from quire.ops.blocks import dequantize as dequantize_blocks
from quire.ops.packed import choose_config, pack
from quire.ops.quantized_layouts import PackedInts

pytest.importorskip("triton")
from quire.ops.kernels.packed import PackedConfig
from quire.ops.kernels.packed_6bit import Packed6Bit, dequantize, product


def six(outputs, inputs, group, zeros=False, seed=0, size=0.1):
    torch.manual_seed(seed)
    numbers, count = some(outputs, inputs, low=96, high=160), inputs // group
    scale = ((torch.rand(outputs, count) - 0.3) * 0.1).half()  # Q6_K has some below 0
    scale = scale if size == 0.1 else scale.float() * size
    offsets = 128 + torch.randint(-64, 64, (outputs, count)) / 16 if zeros else None
    return PackedInts(8, group, numbers, scale, offsets, None)


FORMS = {
    "of 16": six(128, 256, 16),
    "of 16, odd sizes": six(70, 272, 16),
    "of 32": six(48, 128, 32),
    "of 32 with zeros, odd sizes": six(33, 160, 32, zeros=True),
    "of 16 with zeros": six(64, 384, 16, zeros=True),
    "of 16, scales that half precision does not have": six(32, 256, 16, size=2.0**-20),
}
CASES = [
    pytest.param(name, *(kind.values if hasattr(kind, "values") else (kind,)), marks=getattr(kind, "marks", ()))
    for name in FORMS
    for kind in DTYPES
    if "half precision" not in name or "torch.float16" not in repr(kind)  # which has neither such values nor their rows
]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_products(name, dtype, device):
    form = there(FORMS[name], device)
    packed, floats = pack(form).packed, form.dequantize()
    assert isinstance(packed, Packed6Bit)
    bias = torch.randn(form.outputs, device=device).to(dtype)
    for rows in (1, 16, 40, 100, 200) if dtype != torch.float32 else (1, 20):
        x = (torch.randn(rows, form.inputs, device=device) / floats.norm(dim=1).max()).to(dtype)
        expected = x.float() @ floats.T + bias.float()
        ways = (
            [choose_config(packed, rows)]
            if rows != 20
            else [PackedConfig(16, 32, 3, 4, 3), PackedConfig(16, 16, 1, 4, 3, True)]
        )
        for way in ways:
            compare(product(x, packed, bias, "", way), expected)
            if form.outputs % 2 == 0:
                gates = reference_gated(expected.to(dtype), "silu").float()
                compare(product(x, packed, bias, "silu", way._replace(rows=16, high=16)), gates)


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_dequantized(name, dtype, device):
    form = there(FORMS[name], device)
    found = dequantize(pack(form).packed, torch.empty(1, form.inputs, device=device, dtype=dtype))
    if dtype == torch.float32:
        assert torch.equal(found, form.dequantize())
    compare(found, form.dequantize())


@pytest.mark.parametrize(("type_", "factors"), [(13, slice(0, 4)), (14, slice(208, 210))])
def test_blocks_of_a_file(type_, factors, device):
    """Q5_K and Q6_K, of any bytes but their factors: the form's values, which are the file's, within half precision."""
    _, elements, nbytes = GGML_TYPES[type_]
    blocks = torch.randint(0, 256, (24 * 2, nbytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    blocks[:, factors] = torch.tensor([0.001, 0.0005], dtype=torch.float16).view(torch.uint8)[: factors.stop - factors.start]
    form = to_layout(QuantizedMatrix(type_, 2 * elements, blocks.view(24, -1)), torch.device(device))
    packed = pack(form).packed
    assert isinstance(packed, Packed6Bit) and packed.words.nbytes == 24 * 2 * elements * 6 // 8
    found = dequantize(packed, torch.empty(1, 2 * elements, device=device))
    expected = dequantize_blocks(blocks.flatten(), type_, (24, 2 * elements)).to(device)
    assert (found - expected).abs().max() < 2e-3 * expected.abs().max()


def test_a_row_is_the_same_in_any_company(device):
    packed = pack(there(FORMS["of 16"], device)).packed
    way = PackedConfig(16, 32, 2, 4, 3)
    x = torch.randn(20, 256, device=device)
    together = product(x, packed, None, "", way)
    for row in (0, 7, 19):
        assert torch.equal(product(x[row : row + 1], packed, None, "", way)[0], together[row])


def test_other_numbers_take_8_bits(device):
    """Those beyond 6; experts have a kernel for 8 only."""
    form = there(FORMS["of 16"], device)
    for bound in (95, 160):
        numbers = form.numbers.clone()
        numbers[-1, -1] = bound
        assert pack(PackedInts(8, 16, numbers, form.scale, None, None)).packed.form == "int8"
    assert pack(PackedInts(8, 16, form.numbers[None], form.scale[None], None, None)).packed.form == "int8"
    assert pack(there(ints(4, 48, 128, 32, False), device)).packed.form == "int4"


@pytest.mark.parametrize("rows", [1, 3, pytest.param(130, marks=pytest.mark.gpu), pytest.param(600, marks=pytest.mark.gpu)])
def test_any_number_of_rows(rows, device):
    """By whatever way is chosen, with inputs in an order of their own."""
    form = there(FORMS["of 16"], device)
    order = torch.randperm(256, device=device).to(torch.int32)
    form = PackedInts(8, 16, form.numbers, form.scale, None, order)
    dtype = torch.float16 if device == "cpu" else torch.bfloat16
    x = (torch.randn(rows, 256, device=device) / form.dequantize().norm(dim=1).max()).to(dtype)
    for kind in (dtype, torch.float32):  # streamed, and dequantized
        compare(pack(form).multiply(x.to(kind), None), x.float() @ form.dequantize().T)
