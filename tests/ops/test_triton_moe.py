"""Routing, sorting and both ways through the experts in Triton, against their torch references."""

import pytest
import torch
from kernel_support import DTYPES, close, numbers

from quire.ops.activation import ACTIVATIONS
from quire.ops.arguments import ClampedSwiglu, ExpertBiases, Ungated
from quire.ops.moe import reference_experts_forward, reference_route, reference_route_by_scores

pytest.importorskip("triton")
from quire.ops.kernels import experts as kernels
from quire.ops.kernels import moe

WAYS = pytest.mark.parametrize("way", [kernels.few_slots_forward, kernels.sorted_forward], ids=["few", "many"])


def problem(tokens, experts, top_k, hidden, inner, dtype, device):
    """x, weights, experts, up, down."""
    x = numbers(tokens, hidden, dtype=dtype, device=device)
    up, down = (
        numbers(experts, *shape, dtype=dtype, device=device, seed=5) * 0.1 for shape in ((2 * inner, hidden), (hidden, inner))
    )
    logits = numbers(tokens, experts, dtype=torch.float32, device=device, seed=6)
    return x, *reference_route(logits, top_k, True), up, down


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(5, 128, 8), (3, 6, 3), (1, 5, 1), (2, 70, 4), (0, 4, 2)])
def test_routing(tokens, experts, top_k, renormalize, device):
    logits = numbers(tokens, experts, dtype=torch.float32, device=device)
    weights, chosen = moe.route(logits, top_k, renormalize)
    expected_weights, expected = reference_route(logits, top_k, renormalize)
    assert torch.equal(chosen, expected)
    close(weights, expected_weights)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_routing_of_equal_and_broken_logits(device):
    """The lower number goes first; what is not a number is greatest, and every place still names an expert."""
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0], [torch.nan] * 5, [0.0, torch.nan, 1.0, torch.nan, 2.0]], device=device)
    weights, chosen = moe.route(logits, 4, True)
    assert chosen.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3], [1, 3, 4, 2]]
    assert weights[0].isfinite().all()
    assert weights[1:].isnan().all()


@pytest.mark.parametrize(
    ("experts", "top_k", "groups", "settings"),
    [
        (256, 8, (8, 4, 2), {"scoring": "sigmoid", "renormalize": True, "scale": 2.5}),  # DeepSeek V3
        (160, 6, (8, 3, 1), {"scoring": "softmax", "renormalize": False, "scale": 16.0}),  # V2
        (64, 4, (1, 1, 2), {"scoring": "sigmoid", "renormalize": True, "scale": 1.8}),  # GLM 4.7 Flash
        (6, 3, (3, 2, 2), {"scoring": "softmax", "renormalize": True, "scale": 1.0}),
    ],
)
@pytest.mark.parametrize("corrected", [True, False])
def test_routing_by_scores(experts, top_k, groups, settings, corrected, device):
    logits = numbers(5, experts, dtype=torch.float32, device=device)
    correction = numbers(experts, dtype=torch.float32, device=device, seed=1) if corrected else None
    more = settings | {"correction": correction, "groups": groups[0], "top_groups": groups[1], "group_best": groups[2]}
    weights, chosen = moe.route_by_scores(logits, top_k, **more)
    expected_weights, expected = reference_route_by_scores(logits, top_k, **more)
    assert torch.equal(chosen, expected)
    close(weights, expected_weights)


@pytest.mark.parametrize(("slots", "experts"), [(1, 4), (100, 3), (300, 128), (33, 60), (1111, 5), (2049, 7), (9000, 20)])
def test_sorting(slots, experts, device):
    chosen = torch.randint(experts, (slots,), generator=torch.Generator().manual_seed(1)).to(device)
    order, ends = kernels.sort_slots(chosen, experts)
    assert torch.equal(order, chosen.argsort(stable=True))
    assert torch.equal(ends, torch.bincount(chosen, minlength=experts).cumsum(0).int())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("way", "tokens", "experts", "top_k", "hidden", "inner"),
    [
        # a program for every number of every slot: the interpreter takes them one after the other
        *(
            (kernels.few_slots_forward, *shape)
            for shape in ((1, 8, 2, 12, 7), (5, 3, 2, 10, 6), (18, 2, 1, 4, 3), (2, 6, 6, 8, 5), (2, 4, 3, 7, 3))
        ),
        *(
            (kernels.sorted_forward, *shape)
            for shape in ((1, 8, 2, 48, 24), (5, 3, 2, 40, 30), (18, 2, 1, 8, 16), (2, 6, 6, 32, 20), (2, 4, 3, 37, 11))
        ),
    ],
)
def test_experts(way, tokens, experts, top_k, hidden, inner, dtype, device):
    x, weights, chosen, up, down = problem(tokens, experts, top_k, hidden, inner, dtype, device)
    expected = reference_experts_forward(x, weights, chosen, up, down, "silu")
    close(way(x, weights, chosen, up, down, "silu"), expected)


@WAYS
@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activations_of_experts(way, name, device):
    x, weights, chosen, up, down = problem(1, 4, 2, 7, 4, torch.float32, device)
    expected = reference_experts_forward(x, weights, chosen, up, down, name)
    close(way(x, weights, chosen, up, down, name), expected)


def test_experts_without_gates(device):
    x, weights, chosen, up, down = problem(5, 4, 2, 10, 6, torch.float32, device)
    up = up[:, :6].contiguous()
    expected = reference_experts_forward(x, weights, chosen, up, down, Ungated("relu2"))
    close(moe.experts_forward(x, weights, chosen, up, down, Ungated("relu2")), expected)


@WAYS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("behind", [True, False])
def test_biases_and_clamps(way, behind, dtype, device):
    """As gpt-oss has them; a limit that many numbers are beyond. Without the second bias: another rank adds it."""
    x, weights, chosen, up, down = problem(4, 5, 3, 10, 6, dtype, device)
    first, second = (numbers(5, size, dtype=dtype, device=device, seed=size) for size in (12, 10))
    biases, gating = ExpertBiases(first, second if behind else None), ClampedSwiglu(1.702, 0.5)
    got = way(x, weights, chosen, up, down, gating, biases)
    close(got, reference_experts_forward(x, weights, chosen, up, down, gating, biases))
    x[1, 0] = torch.nan
    broken = way(x, weights, chosen, up, down, gating, biases)
    assert broken[1].isnan().all() and torch.equal(broken[0], got[0])


def test_no_tokens(device):
    x, weights, chosen, up, down = problem(0, 4, 2, 16, 16, torch.float32, device)
    assert moe.experts_forward(x, weights, chosen, up, down, "silu").shape == (0, 16)


@pytest.mark.parametrize("tokens", [2, 33])
def test_other_tokens_change_nothing(tokens, device):
    """Among as many others, whatever they are."""
    x, weights, chosen, up, down = problem(tokens, 5, 2, 16, 8, torch.float32, device)
    before = moe.experts_forward(x, weights, chosen, up, down, "silu")[0]
    others, _, elsewhere, _, _ = problem(tokens, 5, 2, 16, 8, torch.float32, device)
    others, elsewhere = others.flip(0) * 3, elsewhere.flip(0)
    others[0], elsewhere[0] = x[0], chosen[0]
    assert torch.equal(moe.experts_forward(others, weights, elsewhere, up, down, "silu")[0], before)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 16, 100, 300, 700, 2000, 9000])
def test_many_experts(tokens, device):
    """Every size of block."""
    x, weights, chosen, up, down = problem(tokens, 64, 4, 256, 96, torch.bfloat16, device)
    wide = reference_experts_forward(x.float(), weights, chosen, up.float(), down.float(), "silu")
    got = moe.experts_forward(x, weights, chosen, up, down, "silu")
    assert (got.float() - wide).norm() < 1e-2 * wide.norm()
