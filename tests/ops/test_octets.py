"""Matrices rounded to bytes by rows, against the same matrices unfolded: an error of up to 1/254 of a row's largest value in
each number of the matrix, and hardly any in the activations."""

import gguf
import numpy as np
import pytest
import torch

from quire.files.gguf import GGML_TYPES
from quire.ops.blocks import Stored, dequantize, is_narrow

pytest.importorskip("onnxruntime")
from quire.ops.octets import OctetProduct, forgets, is_exact

pytestmark = pytest.mark.skipif(not is_exact(), reason="this CPU adds products of bytes in 16 bits")

NUMBER = {name: number for number, (name, _, _) in GGML_TYPES.items()}
ROUNDING = 0.012


def stored(kind: str = "Q8_0", rows: int = 70, columns: int = 512) -> Stored:
    values = np.random.default_rng(0).normal(0, 0.05, (rows, columns)).astype(np.float32)
    blocks = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    return Stored(NUMBER[kind], columns, torch.from_numpy(blocks).view(rows, -1))


def unfolded(matrix: Stored) -> torch.Tensor:
    return dequantize(matrix.rows.flatten(), matrix.type, (len(matrix), matrix.columns))


@pytest.mark.parametrize("count", [1, 2, 32, 33, 70])
@pytest.mark.parametrize("kind", ["Q8_0", "Q5_0", "Q5_1"])
def test_products(kind, count, monkeypatch):
    monkeypatch.setattr("quire.ops.octets.UNFOLDED_AT_ONCE", 32)
    matrix, bias, x = stored(kind), torch.randn(70), torch.randn(count, 512)
    expected = x @ unfolded(matrix).t()
    assert (OctetProduct(matrix, bias)(x) - bias - expected).norm() <= ROUNDING * expected.norm()


def test_a_large_value_does_not_blur_the_others():
    """As in models whose last hidden states have a few components far beyond the rest."""
    x = torch.randn(3, 512)
    x[:, 7] = 300
    matrix = stored()
    matrix.rows.view(70, 16, 34)[:, 0, 2 + 7] = 0  # it takes no part in the result
    expected = x @ unfolded(matrix).t()
    assert (OctetProduct(matrix, None)(x) - expected).norm() <= ROUNDING * expected.norm()


def test_a_row_does_not_see_the_others():
    product, x = OctetProduct(stored(), None), torch.randn(20, 512)
    x[3], x[5] = 0, torch.nan
    together = product(x)
    for i in range(20):
        assert torch.equal(product(x[i : i + 1])[0].isnan(), together[i].isnan())
        assert torch.equal(product(x[i : i + 1])[0].nan_to_num(), together[i].nan_to_num())
    assert not together[3].any() and together[5].isnan().all()


def test_four_bits_stay_four():
    assert [kind for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0") if is_narrow(stored(kind))] == ["Q4_0", "Q4_1"]


def test_what_was_lent_may_go():
    """Not a must, but a doubled memory would be worth knowing."""
    assert forgets()
