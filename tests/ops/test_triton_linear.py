"""The streamed matrix product for a few rows, against torch's own."""

import pytest
import torch
import torch.nn.functional as F
from kernel_support import DTYPES, close, numbers

from quire.ops.activation import ACTIVATIONS, reference_gated
from quire.ops.linear import MOST_READ, gated_linear, linear, streams

pytest.importorskip("triton")
from quire.ops.kernels import linear as kernels

SHAPES = [((1, 64), 10), ((3, 40), 7), ((2, 2, 37), 5), ((1, 1100), 3), ((1, 2500), 5), ((2, 4096), 4)]


def matrix(outputs, inner, dtype, device):
    """Weights may be read before the previous kernel has ended, so they are finished here."""
    weight = numbers(outputs, inner, dtype=dtype, device=device, seed=1) * inner**-0.5
    if weight.is_cuda:
        torch.cuda.synchronize()
    return weight


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


def test_a_cpu_uses_torch():
    x, weight, bias = torch.randn(2, 8), torch.randn(6, 8), torch.randn(6)
    assert not streams(x, weight)
    assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))
    assert torch.equal(gated_linear(x, weight, bias, "silu"), reference_gated(F.linear(x, weight, bias), "silu"))


@pytest.mark.gpu
def test_few_rows_of_short_types_are_streamed(device):
    weight = torch.zeros(2048, 2048, device=device, dtype=torch.bfloat16)
    most = MOST_READ // weight.numel()
    assert [streams(weight[:rows], weight) for rows in (0, 1, most, most + 1)] == [False, True, True, False]
    assert not streams(weight[:1].float(), weight.float())
    assert not streams(weight[:1], weight.t())
