"""Matrices of few bits times single rows, and experts of few bits; against their forms."""

import pytest
import torch
from kernel_support import DTYPES
from test_triton_packed import FORMS, compare, some, there

from quire.ops.activation import reference_gated
from quire.ops.arguments import ClampedSwiglu, ExpertBiases
from quire.ops.moe import reference_experts_forward
from quire.ops.packed import pack, packed_experts_forward
from quire.ops.quantized_layouts import Activation, Float4, Float8, PackedInts, pack_nibbles

pytest.importorskip("triton")
from quire.ops.kernels.packed_rows import Program, linear


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMS)
def test_rows(name, dtype, device):
    form = there(FORMS[name], device)
    packed, floats = pack(form).packed, form.dequantize()
    bias = torch.randn(form.outputs, device=device).to(dtype)
    x = (torch.randn(2, form.inputs, device=device) / floats.norm(dim=1).max()).to(dtype)
    expected = x.float() @ floats.T
    compare(linear(x, packed, None, "", Program(32, 64, 1)), expected)
    if form.outputs % 2 == 0:
        wanted = reference_gated((expected + bias.float()).to(dtype), "silu").float()
        compare(linear(x, packed, bias, "silu", Program(32, 512, 4)), wanted)


def stacks():
    """[experts, 2 * inner, hidden] and [experts, hidden, inner]."""
    shapes = ((5, 96, 128), (5, 128, 48))
    yield (
        "int4 with zeros",
        [
            PackedInts(
                4, 16, pack_nibbles(some(e, n, k, high=16)), torch.rand(e, n, k // 16), some(e, n, k // 16, high=16), None
            )
            for e, n, k in shapes
        ],
    )
    yield (
        "fp8 in blocks",
        [
            Float8(
                16, 128, torch.randn(e, n, k).to(torch.float8_e4m3fn), torch.rand(e, n // 16, -(-k // 128)), Activation.GROUP
            )
            for e, n, k in shapes
        ],
    )
    yield "mxfp4", [Float4("e2m1", 16, some(e, n, k // 2), some(e, n, k // 16, low=120, high=130)) for e, n, k in shapes]


STACKS = dict(stacks())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "biased"), [(3, True), (70, False), pytest.param(900, True, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", STACKS)
def test_experts(name, tokens, biased, dtype, device):
    up, down = (there(form, device) for form in STACKS[name])
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, 128, generator=generator).to(device, dtype)
    experts = torch.rand(tokens, 5, generator=generator).argsort(1)[:, :2].contiguous().to(device)
    weights = torch.rand(tokens, 2, generator=generator).to(device)
    gating = ClampedSwiglu(1.702, 7.0) if biased else "silu"
    biases = ExpertBiases(*(torch.randn(5, n, generator=generator).to(device, dtype) for n in (96, 128))) if biased else None
    x = (x.float() / up.dequantize().norm(dim=-1).max()).to(dtype)
    expected = reference_experts_forward(
        x.float(), weights, experts, up.dequantize(), down.dequantize(), gating,
        None if biases is None else ExpertBiases(*(bias.float() for bias in biases)),
    )  # fmt: skip
    compare(packed_experts_forward(x, weights, experts, pack(up), pack(down), gating, biases), expected)
