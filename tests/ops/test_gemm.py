"""Products with float32 matrices by ONNX Runtime against torch's."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("onnxruntime")
from quire.ops import onnx
from quire.ops.gemm import Gemm


@pytest.mark.parametrize("bias", [False, True])
def test_few_rows_and_many(bias):
    weight, added = torch.randn(96, 64), torch.randn(96) if bias else None
    product = Gemm(weight.clone(), added)
    for rows in (1, 40, 1, 300, 2 * onnx.ROWS_AT_ONCE + 1, 40):
        x = torch.randn(rows, 64)
        torch.testing.assert_close(product(x), F.linear(x, weight, added), atol=1e-4, rtol=1e-4)


def test_many_rows_need_not_lie_behind_each_other():
    weight, wide = torch.randn(128, 64), torch.randn(600, 128)
    torch.testing.assert_close(Gemm(weight, None)(wide[:, 64:]), wide[:, 64:] @ weight.t(), atol=1e-4, rtol=1e-4)


def test_many_rows_go_through_in_equal_parts(monkeypatch):
    product, sizes = Gemm(torch.randn(512, 64), None), []
    bind = onnx.Session.bind
    monkeypatch.setattr(
        onnx.Session, "bind", lambda self, inputs, outputs: sizes.append(len(inputs[0])) or bind(self, inputs, outputs)
    )
    product(torch.randn(2 * onnx.ROWS_AT_ONCE + 10, 64))
    assert sizes == [174, 174, 174]
