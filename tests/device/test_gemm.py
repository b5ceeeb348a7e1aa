"""Products with float32 matrices, by OpenVINO and by kernels of our own, against torch's."""

import pytest
import torch
import torch.nn.functional as F

from quire.device.cpu import openvino, session
from quire.device.cpu.device import has_openvino
from quire.device.cpu.graph import Runtime
from quire.device.cpu.session import float_product
from quire.ops.native import multiplies_floats

RUNTIMES = [*([Runtime.OPENVINO] if has_openvino() else []), *([Runtime.OWN] if multiplies_floats() else [])]


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("outputs, inputs", [(96, 64), (97, 33), (5, 1)])
@pytest.mark.parametrize("bias", [False, True])
def test_few_rows_and_many(bias, outputs, inputs, runtime):
    weight, added = torch.randn(outputs, inputs), torch.randn(outputs) if bias else None
    product = float_product(weight.clone(), added, runtime)
    for rows in (1, 40, 1, 2, 3, 4, 5, 6, 7, 300, 600, 40):
        x = torch.randn(rows, inputs)
        torch.testing.assert_close(product(x), F.linear(x, weight, added), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_many_rows_need_not_lie_behind_each_other(runtime):
    weight, wide = torch.randn(128, 64), torch.randn(600, 128)
    torch.testing.assert_close(
        float_product(weight, None, runtime)(wide[:, 64:]), wide[:, 64:] @ weight.t(), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_many_rows_go_through_in_equal_parts(runtime, monkeypatch):
    monkeypatch.setattr(openvino.Network, "max_tokens", openvino.MAX_TOKENS)  # fewer on some CPUs
    product, sizes, bind = float_product(torch.randn(512, 64), None, runtime), [], session.Session._bind
    monkeypatch.setattr(
        session.Session, "_bind", lambda self, inputs, outputs: sizes.append(len(inputs[0])) or bind(self, inputs, outputs)
    )
    product(torch.randn(522, 64))
    assert sizes == ([58] * 9 if runtime is Runtime.OPENVINO else [105] * 4 + [102])


@pytest.mark.skipif(not multiplies_floats(), reason="there are no kernels of our own for this CPU")
@pytest.mark.parametrize("outputs, inputs", [(97, 33), (128, 400), (41, 300)])
def test_by_kernels_of_our_own_a_row_does_not_see_the_others(outputs, inputs):
    product, x = float_product(torch.randn(outputs, inputs), torch.randn(outputs), Runtime.OWN), torch.randn(29, inputs)
    together = product(x).clone()
    for count in (1, 3, 9):
        assert torch.equal(product(x[:count]), together[:count])
    assert all(torch.equal(product(x[i : i + 1])[0], together[i]) for i in range(29))
