"""Whole numbers of 8 bits times such: sums are exact, so everything here is an equality."""

import pytest
import torch

from quire.ops.activation import reference_gated
from quire.ops.packed import choose_ints, pack
from quire.ops.quantized_layouts import INT8_MAX, Int8, Rounding

pytest.importorskip("triton")
from quire.ops.kernels.packed_8bit import IntTile, ints_product
from quire.ops.kernels.rounding import rescale, round_rows

TILES = [IntTile(16, 32, 4, 2), IntTile(32, 16, 4, 2, 3), IntTile(64, 64, 4, 2, 2, 256)]


def some(rows, columns, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, (rows, columns), dtype=torch.int8, generator=generator).to(device)


def scales(count, device, seed=1):
    return (torch.rand(count, generator=torch.Generator().manual_seed(seed)) * 0.01 + 0.001).to(device)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("rows", "outputs", "columns"), [(1, 16, 128), (17, 70, 384), (40, 33, 256), (65, 130, 640)])
def test_products(tile, rows, outputs, columns, device):
    x, matrix, by_row, by_output = (
        some(rows, columns, device), some(outputs, columns, device, 7), scales(rows, device), scales(outputs, device, 2)
    )  # fmt: skip
    bias = torch.randn(outputs, generator=torch.Generator().manual_seed(3)).to(device)
    sums = (x.double() @ matrix.double().t()).float()
    expected = sums * (by_row[:, None] * by_output)
    assert torch.equal(ints_product(x, by_row, matrix, by_output, None, "", tile, torch.float32), expected)
    got = ints_product(x, by_row, matrix, by_output, bias, "", tile, torch.float32)
    torch.testing.assert_close(got, expected + bias, rtol=1e-6, atol=1e-6)
    assert torch.equal(got, ints_product(x, by_row, matrix, by_output, bias, "", tile._replace(shares=1), torch.float32))


@pytest.mark.parametrize("tile", TILES)
def test_gates(tile, device):
    rows, outputs, columns = 37, 41, 256
    x, matrix = some(rows, columns, device), some(2 * outputs, columns, device, 7)
    by_row, by_output = scales(rows, device), scales(2 * outputs, device, 2)
    bias = torch.randn(2 * outputs, generator=torch.Generator().manual_seed(3)).to(device)
    whole = (x.double() @ matrix.double().t()).float() * (by_row[:, None] * by_output) + bias
    got = ints_product(x, by_row, matrix, by_output, bias, "silu", tile, torch.float32)
    torch.testing.assert_close(got, reference_gated(whole, "silu"), rtol=1e-5, atol=1e-5)


def test_the_largest_sums_are_exact(device):
    x, matrix = torch.full((2, 1024), -128, dtype=torch.int8), torch.full((16, 1024), 127, dtype=torch.int8)
    one = torch.ones(16, device=device)
    for other in (matrix, -matrix):
        got = ints_product(x.to(device), one[:2], other.to(device), one, None, "", TILES[1], torch.float32)
        assert torch.equal(got.cpu(), x.float() @ other.float().t())


def test_the_same_as_by_the_library(device):
    """Rounded rows as the matrix lies, in whatever tile is chosen for so many."""
    form = Int8(some(96, 192, device), scales(96, device)[:, None])
    packed = pack(form).packed
    words, scale = packed.words.view(torch.int8), packed.scales.flatten()
    for rows in (17, 70):
        x = torch.randn(rows, 192, generator=torch.Generator().manual_seed(rows)).to(device)
        rounded = round_rows(x, Rounding(torch.int8, packed.columns, packed.value_stride))
        numbers, by_row = rounded.numbers, rounded.scales
        sums = (numbers.double() @ words.double().t()).to(torch.int32)
        for activation in ("", "silu"):
            tile = choose_ints(rows, 96, packed.columns)
            got = ints_product(numbers, by_row, words, scale, None, activation, tile, x.dtype)
            assert torch.equal(got, rescale(sums, by_row, scale, None, activation, x.dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [17, 64, 100, 256, 1000, 2048])
@pytest.mark.parametrize(("outputs", "columns"), [(6144, 4096), (4096, 14336), (200, 128), (30, 256)])
def test_on_a_gpu(rows, outputs, columns, device):
    """In bfloat16, exactly what torch's library has; and where that takes no such size, what doubles have."""
    x, matrix = some(rows, columns, device), some(outputs, columns, device, 7)
    by_row, by_output = scales(rows, device), scales(outputs, device, 2)
    exact = x.double() @ matrix.double().t()
    sums = exact.to(torch.int32) if outputs % 16 else torch._int_mm(x, matrix.t())
    for activation in ("", "silu") if outputs % 2 == 0 else ("",):
        tile = choose_ints(rows, outputs, columns)
        got = ints_product(x, by_row, matrix, by_output, None, activation, tile, torch.bfloat16)
        assert torch.equal(got, rescale(sums, by_row, by_output, None, activation, torch.bfloat16))


@pytest.mark.parametrize(("outputs", "most", "ours"), [(96, 64, True), (96, 16, False), (70, 16, True)])
def test_who_multiplies(outputs, most, ours, device, monkeypatch):
    """Our kernel some rows, torch's library more of them, unless it does not take such sizes."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr("quire.ops.packed.MAX_INT8_ROWS", most)
    asked = []
    library = torch._int_mm
    monkeypatch.setattr("torch._int_mm", lambda *given: asked.append(1) or library(*given))
    form = Int8(some(outputs, 200, device), scales(outputs, device)[:, None])
    matrix, bias = pack(form), torch.randn(outputs, generator=torch.Generator().manual_seed(3)).to(device).half()
    x = torch.randn(40, 200, generator=torch.Generator().manual_seed(4)).to(device).half()
    by_row = (x.float().abs().amax(1).clamp(min=1e-10) / INT8_MAX)[:, None]
    rounded = (x.float() / by_row).abs().add(0.5).floor() * x.float().sign()
    expected = (rounded.double() @ form.numbers.double().t()).float() * (by_row * form.scale.t()) + bias.float()
    got = matrix.multiply(x, bias)
    if device == "cpu":  # a GPU divides less exactly when it rounds rows
        assert torch.equal(got, expected.half())
    assert (got - expected).norm() < 0.01 * expected.norm()
    assert asked == ([] if ours else [1])
    wanted = reference_gated(expected.half(), "silu").float()
    assert (matrix.multiply(x, bias, "silu") - wanted).norm() < 0.01 * wanted.norm()
