"""Kernels of recurrent layers against their torch references, and those against a loop over tokens."""

import pytest
import torch

from quire.ops import order
from quire.ops.arguments import StateRows, TimeSteps
from quire.ops.recurrent import (
    reference_convolve,
    reference_delta_rule,
    reference_gated_norm,
    reference_selective_scan,
    reference_ssd,
)

pytest.importorskip("triton")
from quire.ops.kernels import recurrent as kernel
from quire.ops.kernels import scan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ENTRIES = 6
MIXED = [(3, 0, 2), (1, 5, 0), (70, 9, 4), (1, 0, 1), (2, 1, 3)]  # count, first position, entry
SINGLES = [(1, 4, 3), (1, 0, 0), (1, 1, 5)]


def rows_of(shapes: list[tuple[int, int, int]], padding: int = 0) -> StateRows:
    """`padding`: rows of one token that are nobody's, behind the others."""
    counts = [count for count, _, _ in shapes] + [1] * padding
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    return StateRows(
        torch.tensor([entry for _, _, entry in shapes] + [-1] * padding, device=DEVICE),
        torch.tensor(starts, dtype=torch.int32, device=DEVICE),
        torch.tensor([count + first for count, first, _ in shapes] + [1] * padding, dtype=torch.int32, device=DEVICE),
        tuple((starts[i], count, first, entry) for i, (count, first, entry) in enumerate(shapes)),
        all(count == 1 for count in counts),
    )


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


def same(kernel, reference, state, tokens) -> None:
    """What comes out for the rows' own tokens, and the states behind them."""
    one, other = state.clone(), state.clone()
    torch.testing.assert_close(kernel(one)[:tokens], reference(other)[:tokens], atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(one, other, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(("shapes", "padding"), [(MIXED, 0), (SINGLES, 0), (SINGLES, 2)])
@pytest.mark.parametrize("silu", [True, False])
def test_convolution(shapes, padding, silu):
    rows, tokens = rows_of(shapes, padding), sum(count for count, _, _ in shapes)
    wide = numbers(tokens + padding, 40)
    x, weight, bias = wide[:, 3:27], numbers(24, 4), numbers(24) if silu else None
    same(
        lambda state: kernel.convolve(x, weight, bias, state, rows, silu),
        lambda state: reference_convolve(x, weight, bias, state, rows, silu),
        numbers(ENTRIES, 24, 3),
        tokens,
    )


@pytest.mark.parametrize(("shapes", "padding", "in_order"), [(MIXED, 0, False), (MIXED, 0, True), (SINGLES, 2, False)])
def test_ssd(shapes, padding, in_order, monkeypatch):
    monkeypatch.setattr(order, "_fixed", in_order)
    rows, tokens = rows_of(shapes, padding), sum(count for count, _, _ in shapes)
    total, heads, size, groups, width = tokens + padding, 4, 10, 2, 12
    x, key, query = numbers(total, heads, size), numbers(total, groups, width), numbers(total, groups, width + 1)[..., :width]
    query = query.contiguous()
    steps = TimeSteps(numbers(total, heads), numbers(heads), numbers(heads) * 0.1, 0.001, 1.5)
    same(
        lambda state: kernel.ssd(x, steps, key, query, numbers(heads), state, rows),
        lambda state: reference_ssd(x, steps, key, query, numbers(heads), state, rows),
        numbers(ENTRIES, heads, size, width),
        tokens,
    )


@pytest.mark.parametrize(("shapes", "padding"), [(MIXED, 0), (SINGLES, 2)])
def test_selective_scan(shapes, padding):
    rows, tokens = rows_of(shapes, padding), sum(count for count, _, _ in shapes)
    total, channels, width = tokens + padding, 40, 12
    x, dt, decay = numbers(total, channels), numbers(total, channels).abs(), -numbers(channels, width).abs()
    key, query, skip = numbers(total, width), numbers(total, width + 1)[:, 1:].contiguous(), numbers(channels)
    same(
        lambda state: scan.selective_scan(x, dt, decay, key, query, skip, state, rows),
        lambda state: reference_selective_scan(x, dt, decay, key, query, skip, state, rows),
        numbers(ENTRIES, channels, width),
        tokens,
    )


def test_ssd_reference_is_the_recurrence():
    heads, size, width, tokens = 2, 3, 4, 130
    x, key, query = numbers(tokens, heads, size), numbers(tokens, heads, width), numbers(tokens, heads, width) * 0.9
    steps = TimeSteps(numbers(tokens, heads), numbers(heads), numbers(heads))
    state, states = torch.zeros(heads, size, width, device=DEVICE), torch.zeros(1, heads, size, width, device=DEVICE)
    expected = []
    for t in range(tokens):
        dt = torch.nn.functional.softplus(steps.raw[t] + steps.bias)
        state = state * torch.exp(-dt * steps.rate_log.exp())[:, None, None]
        state = state + (dt[:, None] * x[t])[:, :, None] * key[t][:, None]
        expected.append((state * query[t][:, None]).sum(-1))
    got = reference_ssd(x, steps, key, query, None, states, rows_of([(tokens, 0, 0)]))
    torch.testing.assert_close(got, torch.stack(expected), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(states[0], state, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("groups", "shared", "norm_first"), [(1, False, False), (3, False, True), (3, True, True)])
def test_gated_norm(groups, shared, norm_first):
    x, gate, weight = numbers(4, 30), numbers(4, 44)[:, 5:35], numbers(10 if shared else 30)
    for act in ("silu", "sigmoid"):
        got = kernel.gated_norm(x, gate, weight, 1e-5, groups, norm_first, act)
        torch.testing.assert_close(got, reference_gated_norm(x, gate, weight, 1e-5, groups, norm_first, act))


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize(("shapes", "padding"), [([(3, 0, 2), (1, 5, 0), (9, 9, 4)], 0), (SINGLES, 2)])
def test_delta_rule(shapes, padding, by_key):
    rows, tokens = rows_of(shapes, padding), sum(count for count, _, _ in shapes)
    total, key_heads, heads, keys, values = tokens + padding, 2, 4, 12, 20
    query, key = numbers(total, key_heads, keys), numbers(total, key_heads, keys) + 0.5
    value, beta = numbers(total, heads, values), numbers(total, heads)
    each, reach = ((heads, keys), 2.0) if by_key else ((heads,), 1.0)
    steps = TimeSteps(numbers(total, *each), numbers(*each), numbers(heads) * 0.1)
    same(
        lambda state: kernel.delta_rule(query, key, value, steps, beta, state, rows, reach),
        lambda state: reference_delta_rule(query, key, value, steps, beta, state, rows, reach),
        numbers(ENTRIES, heads, keys, values),
        tokens,
    )
