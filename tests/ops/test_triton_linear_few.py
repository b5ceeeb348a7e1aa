"""The kernel for a few rows, against torch's products; and which way a matrix goes."""

import pytest
import torch
import torch.nn.functional as F
from kernel_support import DTYPES, close, distance, matrix, numbers

from quire.ops.activation import ACTIVATIONS, reference_gated
from quire.ops.linear import FEW_ROWS, choose_few_rows_config, few_rows_config, gated_linear, linear, linear_float

pytest.importorskip("triton")
from quire.ops.kernels import linear as kernels
from quire.ops.kernels.linear import FewRowsConfig

H200 = 132  # processors
# rows, inner, outputs
SIZES = [(2, 64, 64), (5, 104, 70), (16, 264, 130), (9, 520, 33), (3, 40, 7)]
WAYS = [
    FewRowsConfig(64, 3, 1),
    FewRowsConfig(64, 3, 4),
    FewRowsConfig(128, 2, 2),
]  # of float32, for which shared memory is small


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "inner", "outputs"), SIZES)
def test_linear(rows, inner, outputs, biased, way, dtype, device):
    x, weight = numbers(rows, inner, dtype=dtype, device=device), matrix(outputs, inner, dtype, device)
    bias = numbers(outputs, dtype=dtype, device=device, seed=2) if biased else None
    close(kernels.few_rows_linear(x, weight, bias, way), F.linear(x, weight, bias))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "inner", "outputs"), SIZES)
def test_gated_linear(rows, inner, outputs, biased, way, dtype, device):
    x, weight = numbers(rows, inner, dtype=dtype, device=device), matrix(2 * outputs, inner, dtype, device)
    bias = numbers(2 * outputs, dtype=dtype, device=device, seed=2) if biased else None
    close(kernels.few_rows_linear(x, weight, bias, way, "silu"), reference_gated(F.linear(x, weight, bias), "silu"))


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activations(name, device):
    x, weight = numbers(2, 24, dtype=torch.float32, device=device), matrix(12, 24, torch.float32, device)
    close(kernels.few_rows_linear(x, weight, None, WAYS[0], name), reference_gated(F.linear(x, weight), name))


@pytest.mark.parametrize("way", [*WAYS, FewRowsConfig(128, 6, 2), FewRowsConfig(256, 3, 1)])
def test_a_product_of_another_type(way, device):
    """What was summed in float32 need not be rounded to the type of the matrix."""
    x, weight = numbers(7, 528, dtype=torch.float16, device=device), matrix(100, 528, torch.float16, device)
    got = kernels.few_rows_linear(x, weight, None, way, kind=torch.float32)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, F.linear(x.float(), weight.float()), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_a_row_does_not_see_the_others(way, device):
    x, weight = numbers(16, 300, dtype=torch.float32, device=device), matrix(66, 300, torch.float32, device)
    together = kernels.few_rows_linear(x, weight, None, way)
    for rows in (2, 5, 15):
        assert torch.equal(kernels.few_rows_linear(x[:rows], weight, None, way), together[:rows])
        assert torch.equal(kernels.few_rows_linear(x[16 - rows :], weight, None, way), together[16 - rows :])


def test_rows_that_do_not_lie_one_after_the_other(device):
    x, weight = numbers(4, 6, 32, dtype=torch.float32, device=device)[:, 1:3], matrix(5, 32, torch.float32, device)
    close(kernels.few_rows_linear(x, weight, None, WAYS[0]), F.linear(x, weight))


def test_ways_that_were_measured():
    """outputs, inner -> shares; None where the library is faster."""
    ways = {
        (6144, 4096): 1, (4096, 4096): 2, (28672, 4096): 1, (4096, 14336): 2, (128256, 4096): 1,
        (4096, 1024): 2, (1024, 2048): 8, (6144, 1024): 1, (1024, 3072): 8, (151936, 1024): 1,
        (5120, 2048): None, (2048, 4096): 4, (128, 2048): None,
    }  # fmt: skip
    chosen = {size: choose_few_rows_config(*size, H200) for size in ways}
    assert {size: way and way.shares for size, way in chosen.items()} == ways
    assert [chosen[size][:2] for size in ((6144, 4096), (4096, 4096), (28672, 4096))] == [(256, 3), (128, 6), (128, 4)]


def test_programs_of_one_round_fit_on_the_processors():
    """And shares are not so small that adding them takes longer."""
    for outputs in range(64, 40000, 1000):
        for inner in (64, 512, 2048, 16384):
            way = choose_few_rows_config(outputs, inner, H200)
            if way is not None and way.shares > 1:
                assert way.shares * -(-outputs // kernels.FEW_OUTPUTS) <= H200 and inner >= 256 * way.shares


def test_a_cpu_uses_torch():
    assert few_rows_config(torch.zeros(4, 64, dtype=torch.bfloat16), torch.zeros(4096, 64, dtype=torch.bfloat16)) is None


@pytest.mark.gpu
def test_which_rows_are_few(device):
    weight = torch.zeros(4096, 4096, device=device, dtype=torch.bfloat16)
    expected = choose_few_rows_config(4096, 4096, torch.cuda.get_device_properties(device).multi_processor_count)
    if torch.cuda.get_device_capability(device)[0] != 9:
        expected = None
    assert [few_rows_config(weight[:rows], weight) for rows in (0, 1, 2, 16, 17)] == [None, None, expected, expected, None]
    assert few_rows_config(weight[:4].float(), weight.float()) is None
    assert few_rows_config(weight[:4], weight.t()) is None
    assert (
        few_rows_config(weight[:4, :4088], weight[:, :4088].contiguous()) is None
    )  # rows begin where a thread cannot read 16 bytes
    assert few_rows_config(weight.view(-1)[1:8193].view(2, 4096), weight) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inner"), [(6144, 4096), (4096, 4096), (4096, 14336), (1024, 2048), (28672, 4096)])
def test_every_number_of_rows_has_the_same_product(outputs, inner, dtype, device):
    x, weight = numbers(16, inner, dtype=dtype, device=device), matrix(outputs, inner, dtype, device)
    bias = numbers(outputs, dtype=dtype, device=device, seed=2)
    exact = F.linear(x.float(), weight.float(), bias.float())
    all_rows = [product(x, weight, bias) for product in (linear, linear_float)]
    gated = gated_linear(x, weight, None, "silu")
    assert distance(all_rows[0], exact) < 8e-3 and distance(all_rows[1], exact) < 1e-4
    assert distance(gated, reference_gated(F.linear(x.float(), weight.float()), "silu")) < 8e-3
    if few_rows_config(x, weight) is None:  # a library may take another way for another number
        return
    for rows in FEW_ROWS:
        assert torch.equal(linear(x[:rows], weight, bias), all_rows[0][:rows])
        assert torch.equal(linear_float(x[:rows], weight, bias), all_rows[1][:rows])
        assert torch.equal(gated_linear(x[:rows], weight, None, "silu"), gated[:rows])
