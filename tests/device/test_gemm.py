"""Products with float32 matrices, by ONNX Runtime and by kernels of our own, against torch's."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("onnxruntime")
from patience import PATIENCE
from quire.device.cpu import session
from quire.device.cpu.gemm import Gemm
from quire.device.cpu.graph import Runtime
from quire.ops.native import multiplies_floats

RUNTIMES = [Runtime.ONNX, *([Runtime.OWN] if multiplies_floats() else [])]


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("outputs, inputs", [(96, 64), (97, 33), (5, 1)])
@pytest.mark.parametrize("bias", [False, True])
def test_few_rows_and_many(bias, outputs, inputs, runtime, monkeypatch):
    weight, added = torch.randn(outputs, inputs), torch.randn(outputs) if bias else None
    monkeypatch.setattr(session, "ELEMENTS_AT_ONCE", 0)  # 256 rows at once
    product = Gemm(weight.clone(), added, runtime)
    for rows in (1, 40, 1, 2, 3, 4, 5, 6, 7, 300, 600, 40):
        x = torch.randn(rows, inputs)
        torch.testing.assert_close(product(x), F.linear(x, weight, added), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_many_rows_need_not_lie_behind_each_other(runtime):
    weight, wide = torch.randn(128, 64), torch.randn(600, 128)
    torch.testing.assert_close(Gemm(weight, None, runtime)(wide[:, 64:]), wide[:, 64:] @ weight.t(), atol=1e-4, rtol=1e-4)


def test_many_rows_go_through_in_equal_parts(monkeypatch):
    monkeypatch.setattr(session, "ELEMENTS_AT_ONCE", 256 * (64 + 512))
    product, sizes = Gemm(torch.randn(512, 64), None, Runtime.ONNX), []
    bind = session.Session._bind
    monkeypatch.setattr(
        session.Session, "_bind", lambda self, inputs, outputs: sizes.append(len(inputs[0])) or bind(self, inputs, outputs)
    )
    product(torch.randn(522, 64))
    assert sizes == [174, 174, 174]


def test_the_runtime_tells_its_makers_nothing(tmp_path):
    """It would open a database of what it has to report, in the user's cache."""
    code = (
        "import torch; from quire.device.cpu.gemm import Gemm; from quire.device.cpu.graph import Runtime; "
        "Gemm(torch.ones(8, 8), None, Runtime.ONNX)(torch.ones(2, 8))"
    )
    unset = ("CI", "ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME", "PYTEST_CURRENT_TEST")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    subprocess.run([sys.executable, "-c", code], env={**environment, "HOME": str(tmp_path)}, check=True, timeout=PATIENCE)
    assert list(tmp_path.rglob("*")) == []
