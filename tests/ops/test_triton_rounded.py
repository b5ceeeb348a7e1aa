"""Rows that are rounded as they are made, against the launches that make them and then round them: the same bits."""

import pytest
import torch
from kernel_support import DTYPES, numbers

from quire.ops.packed import pack
from quire.ops.quantized import rounding_for
from quire.ops.quantized_layouts import Activation, Float8, Int8, RoundedRows, Rounding

pytest.importorskip("triton")
from quire.ops.kernels import norm
from quire.ops.kernels.activation import gated
from quire.ops.kernels.rounding import gate_rounded, round_all

FLOAT8 = torch.float8_e4m3fn
SCHEMES = ["int8", "fp8", "fp8, given", "groups"]


def rounding_of(scheme, inputs, device):
    columns = -(-inputs // 128) * 128
    if scheme == "int8":
        return Rounding(torch.int8, columns, 64)
    if scheme == "groups":
        return Rounding(FLOAT8, columns, 64, 128)
    return Rounding(FLOAT8, columns, 64, given=torch.tensor([0.007], device=device) if "given" in scheme else None)


def same(got, expected):
    assert isinstance(got, RoundedRows) and len(got) == len(expected) and got.dtype == expected.dtype
    count = len(expected)
    assert got.numbers.shape == expected.numbers.shape and got.scales.shape == expected.scales.shape
    assert torch.equal(got.numbers[:count].view(torch.int8), expected.numbers[:count].view(torch.int8))
    assert torch.equal(got.scales[..., :count], expected.scales[..., :count])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(3, 128), (5, 200), (17, 576), pytest.param(70, 4096, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_norms(scheme, rows, size, dtype, device):
    rounding, offset = rounding_of(scheme, size, device), 1.0 if size == 200 else 0.0
    x, residual = (numbers(rows, size, dtype=dtype, device=device, seed=seed) for seed in (1, 2))
    x[0] = 0
    weight = numbers(size, dtype=dtype, device=device, seed=3)
    got, total = norm.rounded_norm(x, None, weight, 1e-5, offset, rounding)
    assert total is x
    same(got, round_all(norm.rms_norm(x, weight, 1e-5, offset), rounding))
    got, total = norm.rounded_norm(x, residual, weight, 1e-5, offset, rounding)
    normed, expected = norm.add_rms_norm(x, residual, weight, 1e-5, offset)
    assert torch.equal(total, expected)
    same(got, round_all(normed, rounding))


@pytest.mark.gpu
@pytest.mark.parametrize("size", [100, 1536, 2048, 3072, 5120, 8192, 16384])
@pytest.mark.parametrize("rows", [2, 333])
def test_norms_of_any_width(rows, size, device):
    for scheme in SCHEMES:
        test_norms(scheme, rows, size, torch.bfloat16, device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "size"),
    [(3, 128), (5, 200), (2, 1300), *(pytest.param(70, size, marks=pytest.mark.gpu) for size in (1536, 14336, 18944))],
)
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_gates(activation, rows, size, dtype, device):
    rounding = rounding_of("groups", size, device)
    x = numbers(rows, 2 * size, dtype=dtype, device=device, seed=1)
    same(gate_rounded(x, activation, rounding), round_all(gated(x, activation), rounding))


def float8(outputs, inputs, device, activation=Activation.TOKEN, block=0):
    matrix = numbers(outputs, inputs, dtype=torch.float32, device=device, seed=7).to(FLOAT8)
    shape = (outputs // block, inputs // block) if block else (outputs, 1)
    scale = torch.rand(shape, generator=torch.Generator().manual_seed(8)).to(device) * 0.01 + 0.001
    given = torch.tensor([0.02], device=device) if activation is Activation.TENSOR else None
    return pack(Float8(block or 1, block or inputs, matrix, scale, activation, given))


def int8(outputs, inputs, device):
    matrix = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8, generator=torch.Generator().manual_seed(7))
    return pack(Int8(matrix.to(device), torch.rand(outputs, 1).to(device) * 0.001))


def make(scheme, outputs, inputs, device):
    match scheme:
        case "int8":
            return int8(outputs, inputs, device)
        case "groups":
            return float8(outputs, inputs, device, Activation.GROUP, 128)
        case _:
            return float8(outputs, inputs, device, Activation.TENSOR if "given" in scheme else Activation.TOKEN)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 32, 33, 48, 49, 300, 2500])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_products_take_them(scheme, rows, device):
    """A norm, a gated product and one more: with rounded rows between them, and with rows as they are."""
    up, down = make(scheme, 3072, 1024, device), make(scheme, 1024, 1536, device)
    x, weight = (numbers(*shape, 1024, dtype=torch.bfloat16, device=device) for shape in ((rows,), ()))
    normed = norm.rms_norm(x, weight, 1e-5, 0.0)
    before = rounding_for(up, x)
    least = {"int8": 33, "groups": 49}.get(scheme, 2)
    assert (before is None) == (rounding_for(down, x) is None) == (rows < least)
    if before is None:
        return
    rounded, _ = norm.rounded_norm(x, None, weight, 1e-5, 0.0, before)
    assert torch.equal(up.multiply(rounded, None), up.multiply(normed, None))
    apart = up.multiply(normed, None, "silu")
    inner = up.multiply(rounded, None, "silu", rounding_for(down, rounded))
    assert isinstance(inner, RoundedRows) == (scheme == "groups")
    assert torch.equal(down.multiply(inner, None), down.multiply(apart, None))


def test_who_takes_rows_as_they_are(device):
    """Too narrow to be rounded as they are made, or in an order of their own, or not rounded at all."""
    x = torch.zeros(100, 64, device=device, dtype=torch.bfloat16)
    assert rounding_for(float8(64, 64, device), x) is None
    assert rounding_for(Float8(1, 64, torch.zeros(64, 64).to(FLOAT8), torch.ones(64, 1), Activation.TOKEN), x) is None
