"""Layers that hand rounded rows to each other: the same as if each product rounded for itself."""

import pytest
import torch

from quire.attn.batch import PLAIN
from quire.layers.linear import Linear
from quire.layers.lora import LinearBank
from quire.layers.mlp import GatedMLP, SparseGatedMLP
from quire.layers.norm import RMSNorm
from quire.layers.parameter import Method
from quire.layers.quant.stored import QuantizedLinear
from quire.models.blocks import fused_norm
from quire.ops.packed import pack
from quire.ops.quantized_layouts import Activation, Float8, Int8, RoundedRows

pytest.importorskip("triton")
from quire.ops.kernels import norm as kernels


class Held(QuantizedLinear, Method):
    def __init__(self, matrix):
        self.matrix = matrix

    def shapes(self, inputs, outputs):
        return {}


@pytest.fixture
def layers(device, monkeypatch):
    """A norm and a gated layer behind it, of the sizes that fit no block."""
    if device == "cpu":
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: (9, 0))
    norm, mlp = RMSNorm(200, 1e-5), GatedMLP(200, 144, "silu")
    norm.weight.data = torch.linspace(0.5, 1.5, 200, dtype=torch.float16, device=device)
    for linear in (mlp.gate_up, mlp.down_proj):
        generator = torch.Generator().manual_seed(linear.outputs)
        numbers = torch.randint(-128, 128, (linear.outputs, linear.inputs), dtype=torch.int8, generator=generator)
        linear.use(Held(pack(Int8(numbers.to(device), torch.full((linear.outputs, 1), 0.001, device=device)))))
    return norm, mlp


def some(rows, device, seed=1):
    return torch.randn(rows, 200, generator=torch.Generator().manual_seed(seed)).to(device, torch.float16)


@pytest.mark.parametrize("rows", [33, 70])
def test_a_norm_rounds_for_who_alone_reads_it(layers, device, rows):
    norm, mlp = layers
    x, residual = some(rows, device), some(rows, device, 2)
    got, total = fused_norm(mlp, norm, x, residual)
    normed, expected = kernels.add_rms_norm(x, residual, norm.weight, 1e-5, 0.0)
    assert isinstance(got, RoundedRows) and torch.equal(total, expected)
    assert torch.equal(mlp(got, PLAIN), mlp(normed, PLAIN))


@pytest.mark.gpu
def test_a_gate_rounds_for_who_alone_reads_it(device):
    """By groups of columns: a program that gates has all of one."""
    mlp, matrices = GatedMLP(256, 384, "silu"), []
    for linear in (mlp.gate_up, mlp.down_proj):
        numbers = torch.randn(linear.outputs, linear.inputs, generator=torch.Generator().manual_seed(3)).to(torch.float8_e4m3fn)
        scale = torch.full((linear.outputs // 128, linear.inputs // 128), 0.01, device=device)
        matrices.append(pack(Float8(128, 128, numbers.to(device), scale, Activation.GROUP)))
        linear.use(Held(matrices[-1]))
    x = torch.randn(60, 256, generator=torch.Generator().manual_seed(4)).to(device, torch.bfloat16)
    assert isinstance(mlp.gate_up.gated(x, "silu", PLAIN, reader=mlp.down_proj), RoundedRows)
    assert torch.equal(mlp(x, PLAIN), matrices[1].multiply(matrices[0].multiply(x, None, "silu"), None))


def test_who_is_given_rows_as_they_are(layers, device, monkeypatch):
    """Few rows, layers with adapters, layers that read them twice, and layers of floats."""
    norm, mlp = layers
    if device == "cpu":  # as a GPU would, but for the launches
        monkeypatch.setattr(norm, "add", lambda x, residual: (kernels.rms_norm(x, norm.weight, 1e-5, 0.0), residual))
    x = some(33, device)
    assert isinstance(fused_norm(mlp, norm, x, None)[0], RoundedRows)
    assert isinstance(fused_norm(mlp, norm, x[:32], None)[0], torch.Tensor)
    assert mlp.gate_up.rounding(x.float()) is None and Linear(200, 10).rounding(x) is None
    twice = SparseGatedMLP(200, 144, "silu", 0.5)
    twice.gate_up, twice.down_proj = mlp.gate_up, mlp.down_proj
    assert isinstance(fused_norm(twice, norm, x, None)[0], torch.Tensor)
    mlp.gate_up.bank = LinearBank()
    assert isinstance(fused_norm(mlp, norm, x, None)[0], torch.Tensor)
