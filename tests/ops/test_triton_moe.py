"""Routing and the grouped products in Triton, against their torch references."""

import pytest
import torch
from kernel_support import DTYPES, close, numbers

from quire.ops.moe import reference_experts_forward, reference_route

pytest.importorskip("triton")
from quire.ops.kernels import moe


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(5, 128, 8), (3, 6, 3), (1, 5, 1), (0, 4, 2)])
def test_routing(tokens, experts, top_k, renormalize, device):
    logits = numbers(tokens, experts, dtype=torch.float32, device=device)
    weights, chosen = moe.route(logits, top_k, renormalize)
    expected_weights, expected = reference_route(logits, top_k, renormalize)
    assert torch.equal(chosen, expected)
    close(weights, expected_weights)


@pytest.mark.parametrize(("slots", "experts"), [(1, 4), (100, 3), (300, 128), (33, 60)])
@pytest.mark.parametrize("few", [0, 4096], ids=["many", "few"])
def test_sorting(slots, experts, few, device, monkeypatch):
    monkeypatch.setattr(moe, "FEW_SLOTS", few)
    chosen = torch.randint(experts, (slots,), generator=torch.Generator().manual_seed(1)).to(device)
    order, ends = moe.sort_slots(chosen, experts)
    assert torch.equal(order, chosen.argsort(stable=True))
    assert torch.equal(ends, torch.bincount(chosen, minlength=experts).cumsum(0).int())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "hidden", "inner"),
    [(1, 8, 2, 48, 24), (13, 5, 2, 40, 72), (40, 3, 1, 32, 16), (9, 6, 6, 64, 20), (0, 4, 2, 16, 16)],
)
def test_experts(tokens, experts, top_k, hidden, inner, dtype, device):
    x = numbers(tokens, hidden, dtype=dtype, device=device)
    up, down = (
        numbers(experts, *shape, dtype=dtype, device=device, seed=5) * 0.1 for shape in ((2 * inner, hidden), (hidden, inner))
    )
    weights, chosen = reference_route(numbers(tokens, experts, dtype=torch.float32, device=device, seed=6), top_k, True)
    expected = reference_experts_forward(x, weights, chosen, up, down, "silu")
    close(moe.experts_forward(x, weights, chosen, up, down, "silu"), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 300, 700, 2000, 9000])
def test_many_experts(tokens, device):
    """Every size of block."""
    x = numbers(tokens, 256, dtype=torch.bfloat16, device=device)
    up, down = (numbers(64, *shape, dtype=torch.bfloat16, device=device, seed=5) * 0.1 for shape in ((192, 256), (256, 96)))
    weights, chosen = reference_route(numbers(tokens, 64, dtype=torch.float32, device=device, seed=6), 4, True)
    wide = reference_experts_forward(x.float(), weights, chosen, up.float(), down.float(), "silu")
    got = moe.experts_forward(x, weights, chosen, up, down, "silu")
    assert (got.float() - wide).norm() < 1e-2 * wide.norm()
