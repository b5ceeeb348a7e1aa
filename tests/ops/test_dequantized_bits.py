"""Formats whose kernel multiplies by the dequantized values in the fixed order, so that many rows may be dequantized.

A row of x has two ones. Its product is then the rounded sum of two weights, which differs if the kernel scales the sum instead.
"""

import pytest
import torch
from test_triton_packed import ints, shortened, there
from test_triton_packed_six import six

from quire.ops.packed import pack
from quire.ops.quantized_layouts import Float4

pytest.importorskip("triton")

HALF, BF16 = torch.float16, torch.bfloat16
ROWS = 64


def powers(outputs, inputs):
    """Return MXFP4 weights."""
    scale = torch.randint(118, 124, (outputs, inputs // 32), dtype=torch.uint8)
    return Float4("e2m1", 32, torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8), scale)


# format: the dtypes in which its kernel multiplies by dequantized values
FORMS = {
    "int4, float16 scales": (shortened(ints(4, 48, 256, 64, False), HALF), {HALF, BF16}),
    "int4, float16 scales, integer zero points": (shortened(ints(4, 48, 256, 64, True), HALF), {HALF, BF16}),
    "int4, bfloat16 scales": (shortened(ints(4, 48, 256, 64, False), BF16), {BF16}),
    "int4, float32 scales": (ints(4, 48, 256, 64, False), set()),
    "int4, any zero points": (shortened(ints(4, 48, 256, 64, "any"), HALF), set()),
    "int4, one scale per output": (shortened(ints(4, 48, 256, 256, False), HALF), set()),
    "int8": (shortened(ints(8, 48, 256, 64, False), HALF), set()),
    "mxfp4": (powers(48, 256), {BF16}),
    "6 bits": (six(48, 256, 16), {BF16}),
    "6 bits with zero points": (six(48, 256, 32, zeros=True), set()),
}

CASES = [
    pytest.param(name, dtype, marks=pytest.mark.gpu if dtype is BF16 else ())  # the interpreter has no bfloat16
    for name, (_, dtypes) in FORMS.items()
    for dtype in dtypes
]


def pairs_of_ones(inputs, dtype, device):
    x = torch.zeros(ROWS, inputs, dtype=dtype, device=device)
    for row in range(ROWS):
        x[row, [row, (row * 37 + 101) % inputs]] = 1
    return x


@pytest.mark.parametrize("dtype", [HALF, BF16])
@pytest.mark.parametrize("name", FORMS)
def test_which_do(name, dtype):
    form, expected = FORMS[name]
    assert pack(form).multiplies_dequantized(dtype) == (dtype in expected)


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_bits(name, dtype, device):
    form, _ = FORMS[name]
    matrix = pack(there(form, device))
    x = pairs_of_ones(form.inputs, dtype, device)
    found = matrix._multiply_in_order(x, None, "")
    values = matrix.dequantize(x).float()
    expected = x.float() @ values.T  # exact: two values
    assert torch.equal(found, expected.to(dtype))


def test_one_scale_per_output_is_applied_to_the_sum(device):
    form, _ = FORMS["int4, one scale per output"]
    matrix = pack(there(form, device))
    x = pairs_of_ones(form.inputs, HALF, device)
    dequantized = (x.float() @ matrix.dequantize(x).float().T).half()
    assert not torch.equal(matrix._multiply_in_order(x, None, ""), dequantized)
