"""Matrix products of our own for one, a few and some dozens of rows, against torch's."""

import pytest
import torch
import torch.nn.functional as F
from kernel_support import DTYPES, close, distance, matrix, numbers

from quire.ops.activation import ACTIVATIONS, reference_gated
from quire.ops.linear import (
    DEEP_ROWS,
    GATED_MIN_FILLED,
    GATED_ROWS,
    MAX_READ_VALUES,
    filled,
    gated_linear,
    gates_rows,
    is_deep,
    linear,
    linear_float,
    streams,
)

pytest.importorskip("triton")
from quire.ops.kernels import linear as kernels

SHAPES = [((1, 64), 10), ((3, 40), 7), ((2, 2, 37), 5), ((1, 1100), 3), ((1, 2500), 5), ((2, 4096), 4)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("shape", "outputs"), SHAPES)
def test_linear(shape, outputs, biased, dtype, device):
    x = numbers(*shape, dtype=dtype, device=device)
    weight = matrix(outputs, shape[-1], dtype, device)
    bias = numbers(outputs, dtype=dtype, device=device, seed=2) if biased else None
    close(kernels.linear(x, weight, bias), F.linear(x, weight, bias))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("shape", "outputs"), SHAPES)
def test_gated_linear(shape, outputs, biased, dtype, device):
    x = numbers(*shape, dtype=dtype, device=device)
    weight = matrix(2 * outputs, shape[-1], dtype, device)
    bias = numbers(2 * outputs, dtype=dtype, device=device, seed=2) if biased else None
    close(kernels.linear(x, weight, bias, "silu"), reference_gated(F.linear(x, weight, bias), "silu"))


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activations(name, device):
    x, weight = numbers(2, 24, dtype=torch.float32, device=device), matrix(12, 24, torch.float32, device)
    close(kernels.linear(x, weight, None, name), reference_gated(F.linear(x, weight), name))


def test_a_row_does_not_see_the_others(device):
    x, weight = numbers(4, 96, dtype=torch.float32, device=device), matrix(9, 96, torch.float32, device)
    together = kernels.linear(x, weight, None)
    assert all(torch.equal(kernels.linear(row[None], weight, None)[0], out) for row, out in zip(x, together, strict=True))


def test_views(device):
    """Rows that do not lie one after the other."""
    x, weight = numbers(4, 6, 32, dtype=torch.float32, device=device)[:, 1], matrix(5, 32, torch.float32, device)
    close(kernels.linear(x, weight, None), F.linear(x, weight))


def test_a_product_of_another_type(device):
    """What was summed in float32 need not be rounded to the type of the matrix."""
    x, weight = numbers(1, 96, dtype=torch.float16, device=device), matrix(9, 96, torch.float16, device)
    got = kernels.linear(x, weight, None, kind=torch.float32)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, F.linear(x.float(), weight.float()), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("rows", "outputs", "inner"), [(16, 64, 64), (33, 70, 104), (96, 33, 40), (65, 130, 264), (128, 65, 136)]
)
def test_gated_rows(rows, outputs, inner, biased, dtype, device):
    x, weight = numbers(rows, inner, dtype=dtype, device=device), matrix(2 * outputs, inner, dtype, device)
    bias = numbers(2 * outputs, dtype=dtype, device=device, seed=2) if biased else None
    close(kernels.gated_linear(x, weight, bias, "silu"), reference_gated(F.linear(x, weight, bias), "silu"))


def test_every_number_of_gated_rows_has_a_tile():
    assert max(tile.rows + tile.more for tile in kernels.TILES) == GATED_ROWS[-1]


def test_programs_fill_the_rounds_they_take():
    assert [filled(programs, 264) for programs in (264, 132, 528, 265)] == [1, 0.5, 1, 265 / 528]
    worth = [programs for programs in (128, 152, 192, 224, 296, 400, 448) if filled(programs, 264) >= GATED_MIN_FILLED]
    assert worth == [224, 400, 448]  # those that were measured to be faster than the library


def test_a_cpu_uses_torch():
    x, weight, bias = torch.randn(2, 8), torch.randn(6, 8), torch.randn(6)
    assert not streams(x, weight) and not gates_rows(x, weight) and not is_deep(x, weight)
    assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))
    assert torch.equal(linear_float(x, weight, bias), F.linear(x, weight, bias))
    assert linear_float(x.bfloat16(), weight.bfloat16()).dtype == torch.float32
    assert torch.equal(gated_linear(x, weight, bias, "silu"), reference_gated(F.linear(x, weight, bias), "silu"))


@pytest.mark.gpu
def test_few_rows_of_short_types_are_streamed(device):
    weight = torch.zeros(2048, 2048, device=device, dtype=torch.bfloat16)
    most = MAX_READ_VALUES // weight.numel()
    assert [streams(weight[:rows], weight) for rows in (0, 1, most, most + 1)] == [False, True, True, False]
    assert not streams(weight[:1].float(), weight.float())
    assert not streams(weight[:1], weight.t())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 96, 160, 256])
def test_products_of_large_matrices(rows, dtype, device):
    """Whichever way a product goes, it is the same product; a library may round sums of parts on the way."""
    x = numbers(rows, 4096, dtype=dtype, device=device)
    deep, wide = matrix(4096, 4096, dtype, device), matrix(28672, 4096, dtype, device)
    exact = F.linear(x.float(), deep.float())
    assert distance(linear(x, deep), exact) < 8e-3
    assert distance(linear_float(x, deep), exact) < 1e-4
    assert distance(gated_linear(x, wide, None, "silu"), reference_gated(F.linear(x.float(), wide.float()), "silu")) < 8e-3


@pytest.mark.gpu
def test_a_large_vocabulary(device):
    """More blocks of outputs than the second axis of a grid may have programs."""
    x, head = numbers(1, 2048, dtype=torch.bfloat16, device=device), matrix(151936, 2048, torch.bfloat16, device)
    assert distance(linear_float(x, head), F.linear(x.float(), head.float())) < 1e-4


@pytest.mark.gpu
def test_which_way_a_product_goes(device):
    """On any device: float32, and what the copy engine cannot read, go to the library."""
    deep, wide = (torch.zeros(size, 4096, device=device, dtype=torch.bfloat16) for size in (4096, 28672))
    rows = DEEP_ROWS[-1] + 1
    assert [is_deep(deep[:n], deep) for n in (1, DEEP_ROWS[0], rows - 1, rows)] == [False, True, True, False]
    assert not is_deep(deep[:64], wide) and not is_deep(deep[:64].float(), deep.float())
    assert not gates_rows(deep[:64].float(), wide.float()) and not gates_rows(deep[:64, :4], wide[:, :4].contiguous())
