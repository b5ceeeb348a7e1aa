"""Operations that treat every token by itself."""

import pytest
import torch
import torch.nn.functional as F

from quire.ops.activation import activate, check_activation, gated
from quire.ops.arguments import Rotation
from quire.ops.moe import experts_forward, route
from quire.ops.norm import add_rms_norm, rms_norm
from quire.ops.qkv import turn
from quire.types.errors import ModelError


def test_rms_norm_is_torchs_own_and_may_shift_its_weight():
    x, weight = torch.randn(5, 16), torch.randn(16)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), F.rms_norm(x, (16,), weight, 1e-6))
    torch.testing.assert_close(rms_norm(x, weight, 1e-6, offset=1.0), F.rms_norm(x, (16,), weight + 1, 1e-6))


def test_rms_norm_of_a_short_type_is_computed_wide():
    x, weight = (torch.randn(5, 64) * 300).half(), torch.randn(64).half()
    out = rms_norm(x, weight, 1e-6)  # the squares alone would overflow
    assert out.dtype == torch.float16
    torch.testing.assert_close(out, rms_norm(x.float(), weight.float(), 1e-6).half())


def test_the_residual_is_added_before_the_norm():
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    normed, total = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(x + residual, weight, 1e-6))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_turns_pairs_and_leaves_the_rest(interleaved):
    angles = torch.outer(torch.arange(10.0), torch.tensor([1.0, 0.1]))
    x = torch.randn(3, 2, 6)
    positions = torch.tensor([0, 7, 3])
    out = x.clone()
    turn(out, *Rotation(angles.cos(), angles.sin(), interleaved).rows(positions), interleaved)
    assert torch.equal(out[0], x[0])  # position 0 does not turn
    assert torch.equal(out[..., 4:], x[..., 4:])
    first, second = ([0, 2], [1, 3]) if interleaved else ([0, 1], [2, 3])
    pairs = torch.complex(x[..., first], x[..., second]) * torch.exp(1j * angles[positions]).unsqueeze(1)
    torch.testing.assert_close(out[..., first], pairs.real)
    torch.testing.assert_close(out[..., second], pairs.imag)


@pytest.mark.parametrize(
    ("name", "function"), [("silu", F.silu), ("gelu", F.gelu), ("gelu_pytorch_tanh", lambda x: F.gelu(x, approximate="tanh"))]
)
def test_activations(name, function):
    x = torch.randn(4, 10)
    assert torch.equal(activate(x, name), function(x))
    assert torch.equal(gated(x, name), function(x[:, :5]) * x[:, 5:])


def test_unknown_activation():
    with pytest.raises(ModelError, match="'selu'"):
        check_activation("selu")


@pytest.mark.parametrize("renormalize", [True, False])
def test_experts_run_on_their_own_tokens(renormalize):
    tokens, hidden, inner, count, top_k = 9, 6, 5, 7, 3
    x, logits = torch.randn(tokens, hidden), torch.randn(tokens, count)
    up, down = torch.randn(count, 2 * inner, hidden), torch.randn(count, hidden, inner)
    weights, experts = route(logits, top_k, renormalize)
    out = experts_forward(x, weights, experts, up, down, "silu")
    for t in range(tokens):
        chances = torch.softmax(logits[t], 0)
        best = chances.argsort(descending=True)[:top_k]
        whole = chances[best].sum() if renormalize else 1.0
        expected = sum(
            chances[e] / whole * (down[e] @ (F.silu(up[e, :inner] @ x[t]) * (up[e, inner:] @ x[t]))) for e in best.tolist()
        )
        torch.testing.assert_close(out[t], expected, atol=1e-4, rtol=1e-4)
