"""Matrices of few bits against the same matrices dequantized.

The operator rounds activations to 8 bits by groups of 32: an error of up to 1/254 of a group's largest value in each, about
0.6 % of a result's size for normal numbers. With a scale or an offset in the wrong place, results are off by tens of percent.
"""

import sys

import gguf
import numpy as np
import pytest
import torch
from quantized_models import skip_if_wrong

from quire.device.cpu.device import has_openvino
from quire.device.cpu.graph import Runtime
from quire.device.cpu.repack import lay_out, pack, repack
from quire.device.cpu.session import packed_product
from quire.files.gguf import GGML_TYPES
from quire.ops.blocks import QuantizedMatrix, dequantize, to_integers
from quire.ops.dequantized_linear import dequantized_linear, round_up
from quire.ops.native import multiplies

OTHERS = [Runtime.OPENVINO] if has_openvino() else []
RUNTIMES = [*OTHERS, *([Runtime.OWN] if multiplies() else [])]
ROUNDING = 0.012
EXACT = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K")
NUMBER = {name: number for number, (name, _, _) in GGML_TYPES.items()}


@pytest.fixture(autouse=True)
def right(request):
    if "runtime" in request.fixturenames:
        skip_if_wrong(request.getfixturevalue("runtime"))


@pytest.fixture(autouse=True)
def same_activations():
    """Their errors are as random as they are: one row in fifty is off by more than ROUNDING where offsets are folded."""
    torch.manual_seed(0)


def stored(kind: str, rows: int = 48, columns: int = 512, seed: int = 0) -> QuantizedMatrix:
    """A random matrix with uneven columns, in blocks of that type."""
    return QuantizedMatrix(NUMBER[kind], columns, blocks_of(kind, rows, columns, seed))


def blocks_of(kind: str, rows: int, columns: int, seed: int) -> torch.Tensor:
    values = np.random.default_rng(seed).normal(0.01, 0.05, (rows, columns)).astype(np.float32)
    if kind in ("Q4_K", "Q6_K"):  # the package cannot make these: any bytes are a valid block, but scales must be sane
        _, elements, nbytes = GGML_TYPES[NUMBER[kind]]
        blocks = np.random.default_rng(seed).integers(0, 256, (rows * columns // elements, nbytes), np.uint8)
        halves = np.array([0.001, 0.0005], np.float16).view(np.uint8)
        blocks[:, slice(0, 4) if kind == "Q4_K" else slice(208, 210)] = halves if kind == "Q4_K" else halves[:2]
        return torch.from_numpy(blocks).view(rows, -1)
    return torch.from_numpy(gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])).view(rows, -1)


def dequantized(matrix: QuantizedMatrix) -> torch.Tensor:
    return dequantize(matrix.rows.flatten(), matrix.type, (len(matrix), matrix.columns))


@pytest.mark.parametrize("kind", [*EXACT, "Q6_K"])
def test_taken_apart_and_put_together(kind):
    matrix = stored(kind)
    expected, found = dequantized(matrix), to_integers(matrix)
    for integers in (found, found.widened()):
        values = (integers.numbers.float() - 2 ** (integers.bits - 1)).view(48, -1, 32) * integers.scale[..., None]
        if integers.offset is not None:
            values = values + integers.offset[..., None]
        worst = 1e-6 if kind in EXACT else expected.view(48, -1, 32).abs().amax(-1, keepdim=True) / 250
        assert ((values - expected.view(48, -1, 32)).abs() <= worst).all()


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("count", [1, 2, 33])
@pytest.mark.parametrize("kind", [*EXACT, "Q6_K"])
def test_products(kind, count, runtime):
    matrix, bias = stored(kind), torch.randn(48)
    x = torch.randn(count, 512)
    expected = x @ dequantized(matrix).t() + bias
    found = packed_product(repack([matrix], bias, runtime), runtime)(x)
    assert (found - expected).norm() <= ROUNDING * (expected - bias).norm()


@pytest.mark.parametrize("runtime", OTHERS)
def test_folded_offsets_are_in_the_numbers(runtime):
    """Those of Q4_1 follow its scales; offsets far beyond them stay a product of their own, and exact."""
    matrix = stored("Q4_1", columns=1056)  # 33 groups: their rests take two more
    packed = pack([matrix], None)
    assert packed.offset is None and packed.zeros.shape == (48, 18) and packed.scale.shape == (48, 35)
    x = torch.randn(3, 1056) + 0.5
    expected = x @ dequantized(matrix).t()
    assert (packed_product(packed, runtime)(x) - expected).norm() <= ROUNDING * expected.norm()
    halves = matrix.rows.view(-1, 20)[:, :4].view(torch.float16)
    halves[::5, 1] += 40 * halves[::5, 0]
    packed, expected = pack([matrix], None), x @ dequantized(matrix).t()
    assert packed.offset is not None and packed.zeros is None
    assert (packed_product(packed, runtime)(x) - expected).norm() <= ROUNDING * expected.norm()


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_parts_of_different_types_become_one_matrix(runtime):
    kinds = ("Q4_1", "Q8_0", "Q4_0")
    parts = [stored(kind, seed=seed) for seed, kind in enumerate(kinds)]
    x = torch.randn(5, 512)
    expected = torch.cat([x @ dequantized(part).t() for part in parts], dim=1)
    packed = repack(parts, None, runtime)
    assert (packed_product(packed, runtime)(x) - expected).norm() <= ROUNDING * expected.norm()


@pytest.mark.parametrize("kinds", [("Q4_0", "Q4_1", "Q4_1"), (*EXACT, "Q6_K")], ids=["by torch's operator", "of all kinds"])
@pytest.mark.parametrize("slab", [1 << 21, 20 * 512])
def test_dequantized_parts_are_one_matrix(slab, kinds, monkeypatch):
    """bfloat16 keeps 8 bits of a number: an error of up to 1/512 in each, much less in a sum. Rows may lie in another order."""
    monkeypatch.setattr("quire.ops.dequantized_linear.SLAB_ELEMENTS", slab)
    parts = [stored(kind, seed=seed) for seed, kind in enumerate(kinds)]
    order = torch.randperm(48)
    parts[1] = QuantizedMatrix(parts[1].type, 512, parts[1].rows, order)
    x, bias = torch.randn(33, 512), torch.randn(48 * len(parts))
    matrices = [dequantized(part) for part in parts]
    matrices[1] = matrices[1][order]
    expected = x @ torch.cat(matrices).t()
    assert (dequantized_linear(x, parts, bias) - bias - expected).norm() <= 0.005 * expected.norm()


def test_few_numbers_of_rows_are_multiplied():
    assert [round_up(rows) for rows in (1, 64, 65, 512, 513, 1024)] == [64, 64, 128, 512, 768, 1024]
    assert len({round_up(rows) for rows in range(1, 2049)}) == 14


@pytest.mark.parametrize("runtime", OTHERS)
def test_what_was_given_is_not_kept(runtime):
    """The runtime has its own copy of numbers, scales and offsets, and reads no others."""
    packed = pack([stored("Q4_1", rows=2048)], None)
    product, x = packed_product(packed, runtime), torch.randn(3, 512)
    expected = x @ dequantized(stored("Q4_1", rows=2048)).t()
    assert (product(x) - expected).norm() <= ROUNDING * expected.norm()
    if sys.platform == "linux":
        assert not packed.scale[1000:1040].any()


def test_dequantizing_changes_no_other_products():
    setting, x, weight = torch.backends.mkldnn.matmul.fp32_precision, torch.randn(33, 512), torch.randn(48, 512)
    before = x @ weight.t()
    dequantized_linear(x, [stored("Q4_0")], None)
    assert torch.backends.mkldnn.matmul.fp32_precision == setting
    assert torch.equal(x @ weight.t(), before)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_a_row_does_not_see_the_others(kind, runtime):
    product = packed_product(repack([stored(kind)], None, runtime), runtime)
    x = torch.randn(40, 512)
    together = product(x).clone()
    assert all(torch.equal(product(x[i : i + 1])[0], together[i]) for i in range(40))


@pytest.mark.skipif(Runtime.OPENVINO not in RUNTIMES, reason="OpenVINO is for x86 CPUs, and is not installed here")
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_openvino_reads_what_it_was_given_once(kind):
    """Whatever it was given is zeros by now, and numbers of rows that are new to it make no difference."""
    skip_if_wrong(Runtime.OPENVINO)
    product, x = packed_product(pack([stored(kind, rows=2048)], None), Runtime.OPENVINO), torch.randn(40, 512)
    expected = x @ dequantized(stored(kind, rows=2048)).t()
    for count in (40, 3, 17):
        assert (product(x[:count]) - expected[:count]).norm() <= ROUNDING * expected[:count].norm()


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_a_large_activation_spoils_its_own_group_only(kind, runtime):
    matrix, x = stored(kind), torch.randn(3, 512)
    x[:, 5] = 3000.0
    weight = dequantized(matrix).t()
    weight[:32] = 0
    matrix.rows.view(48, 16, -1)[:, 0] = 0  # numbers, scale and offset of the first group
    if kind == "Q4_0":
        matrix.rows.view(48, 16, -1)[:, 0, 2:] = 0x88
    found, expected = packed_product(repack([matrix], None, runtime), runtime)(x), x @ weight
    assert (found - expected).norm() < 2 * ROUNDING * expected.norm()


@pytest.mark.skipif(Runtime.OWN not in RUNTIMES, reason="there are no kernels of our own for this CPU")
@pytest.mark.parametrize("rows", [48, 49, 50, 51])
@pytest.mark.parametrize("kind", EXACT)
def test_tiles_that_are_not_whole(kind, rows):
    """By kernels of our own, for one row up to more than are multiplied together."""
    matrix, bias, x = stored(kind, rows=rows), torch.randn(rows), torch.randn(11, 512)
    product = packed_product(lay_out([matrix], bias), Runtime.OWN)
    expected = x @ dequantized(matrix).t()
    for count in range(1, 12):
        assert (product(x[:count]) - bias - expected[:count]).norm() <= ROUNDING * expected[:count].norm()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_tiles_are_as_large_as_in_the_file(kind):
    matrix = stored(kind)
    assert lay_out([matrix], None).memory.nbytes == matrix.rows.nbytes
