"""Operations of recurrent layers: causal convolution, delta rule, gated norm, selective scan and SSD."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.arguments import StateRows, TimeSteps


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, rows: StateRows, silu: bool) -> Tensor:
    """Return the causal convolution [T, C] of x [T, C].

    weight: [C, width]
    bias: [C]
    state: [entries, C, width - 1] the last inputs of each row; updated
    """
    if x.is_cuda:
        from quire.ops.kernels import recurrent as kernel

        return kernel.convolve(x, weight, bias, state, rows, silu)
    return reference_convolve(x, weight, bias, state, rows, silu)


def reference_convolve(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, rows: StateRows, silu: bool) -> Tensor:
    history = weight.shape[1] - 1
    out = torch.empty_like(x)
    if (ones := rows.begun(state)) is not None:
        at, own, before = ones
        window = torch.cat((before.to(x.dtype), x[at].unsqueeze(2)), 2)
        total = (window * weight).sum(2)
        out[at] = total if bias is None else total + bias
        state[own] = window[:, :, 1:].to(state.dtype)
    for first, count, begin, entry in rows.rows:
        if count != 1:
            before = state[entry].to(x.dtype) if begin else x.new_zeros(x.shape[1], history)
            line = torch.cat((before, x[first : first + count].T), 1)
            out[first : first + count] = F.conv1d(line, weight.unsqueeze(1), bias, groups=len(weight)).T
            state[entry] = line[:, count:].to(state.dtype)
    return F.silu(out) if silu else out


EPS = 1e-6


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    steps: TimeSteps,
    beta: Tensor,
    state: Tensor,
    rows: StateRows,
    reach: float = 1.0,
) -> Tensor:
    """Return the gated delta rule's output [T, heads, m] float32.

    query, key: [T, key heads, n], normalized to length 1 here
    value: [T, heads, m]
    beta: [T, heads] before its sigmoid, which is multiplied by `reach`
    state: [entries, heads, n, m] float32, updated
    """
    if query.is_cuda:
        from quire.ops.kernels import recurrent as kernel

        return kernel.delta_rule(query, key, value, steps, beta, state, rows, reach)
    return reference_delta_rule(query, key, value, steps, beta, state, rows, reach)


def reference_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    steps: TimeSteps,
    beta: Tensor,
    state: Tensor,
    rows: StateRows,
    reach: float = 1.0,
) -> Tensor:
    repeats = value.shape[1] // key.shape[1]
    query, key = (_unit(part.float()).repeat_interleave(repeats, 1) for part in (query, key))
    query, value, beta = query * query.shape[-1] ** -0.5, value.float(), beta.float().sigmoid() * reach
    dt = F.softplus(steps.raw.float() + steps.bias).clamp(steps.low, steps.high)
    dt = dt if dt.ndim == 3 else dt.unsqueeze(-1)
    decay = torch.exp(-dt * torch.exp(steps.rate_log)[:, None])  # [T, heads, 1 or n]
    out = torch.empty_like(value)
    if (ones := rows.begun(state)) is not None:
        at, own, before = ones
        state[own], out[at] = _step(before, query[at], key[at], value[at], decay[at], beta[at])
    for first, count, begin, entry in rows.rows:
        if count != 1:
            current = state[entry] if begin else torch.zeros_like(state[entry])
            for at_ in range(first, first + count):
                current, out[at_] = _step(current, query[at_], key[at_], value[at_], decay[at_], beta[at_])
            state[entry] = current
    return out


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


def _step(state: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Return the state [..., heads, n, m] after one token, and its output."""
    state = state * decay.unsqueeze(-1)
    wrong = value - (state * key.unsqueeze(-1)).sum(-2)
    state = state + key.unsqueeze(-1) * (beta.unsqueeze(-1) * wrong).unsqueeze(-2)
    return state, (state * query.unsqueeze(-1)).sum(-2)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int, norm_first: bool, act: str = "silu") -> Tensor:
    """Return the gated norm [T, n] of x and gate [T, n] in the gate's dtype.

    weight: [n], or [n / groups] for all of the `groups` equal parts that are normalized separately
    norm_first: the gate comes after the norm
    act: the gate's activation, silu or sigmoid
    """
    if x.is_cuda:
        from quire.ops.kernels import recurrent as kernel

        return kernel.gated_norm(x, gate, weight, eps, groups, norm_first, act)
    return reference_gated_norm(x, gate, weight, eps, groups, norm_first, act)


def _mean_square(parts: Tensor) -> Tensor:
    return parts.square().mean(-1, keepdim=True)


def reference_gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    groups: int,
    norm_first: bool,
    act: str = "silu",
    mean_square: Callable[[Tensor], Tensor] = _mean_square,
) -> Tensor:
    """As `gated_norm`. mean_square: of [T, groups, n], each group a part of one that ranks divide -> [T, groups, 1]"""
    opened = gate.float().sigmoid() if act == "sigmoid" else F.silu(gate.float())
    values = x.float() if norm_first else x.float() * opened
    parts = values.view(len(x), groups, -1)
    parts = parts * (mean_square(parts) + eps).rsqrt()
    values = (parts * weight.float().view(-1, parts.shape[-1])).view_as(values)
    return (values * opened if norm_first else values).to(gate.dtype)


def selective_scan(
    x: Tensor, dt: Tensor, decay: Tensor, key: Tensor, query: Tensor, skip: Tensor, state: Tensor, rows: StateRows
) -> Tensor:
    """Return Mamba's selective scan [T, channels] float32.

    x, dt: [T, channels] float32, contiguous, as are key and query
    decay: [channels, n] A, negative
    key, query: [T, n] B and C
    skip: [channels] D
    state: [entries, channels, n] float32, updated
    """
    if x.is_cuda:
        from quire.ops.kernels import scan as kernel

        return kernel.selective_scan(x, dt, decay, key, query, skip, state, rows)
    return reference_selective_scan(x, dt, decay, key, query, skip, state, rows)


def reference_selective_scan(
    x: Tensor, dt: Tensor, decay: Tensor, key: Tensor, query: Tensor, skip: Tensor, state: Tensor, rows: StateRows
) -> Tensor:
    out = torch.empty_like(x)
    if (ones := rows.begun(state)) is not None:
        at, own, before = ones
        after = _scan_step(before, x[at], dt[at], decay, key[at])
        state[own] = after
        out[at] = (after * query[at].unsqueeze(1)).sum(-1)
    for first, count, begin, entry in rows.rows:
        if count == 1:
            continue
        current = state[entry] if begin else torch.zeros_like(state[entry])
        part = slice(first, first + count)
        decays = torch.exp(dt[part].unsqueeze(-1) * decay)  # [n, channels, states]
        added = (dt[part] * x[part]).unsqueeze(-1) * key[part].unsqueeze(1)
        for index in range(count):
            current = current * decays[index] + added[index]
            out[first + index] = current @ query[first + index]
        state[entry] = current
    return out + x * skip


def _scan_step(state: Tensor, x: Tensor, dt: Tensor, decay: Tensor, key: Tensor) -> Tensor:
    return state * torch.exp(dt.unsqueeze(-1) * decay) + (dt * x).unsqueeze(-1) * key.unsqueeze(1)


CHUNK_TOKENS = 64


def ssd(x: Tensor, steps: TimeSteps, key: Tensor, query: Tensor, skip: Tensor | None, state: Tensor, rows: StateRows) -> Tensor:
    """Return the state space dual's output [T, heads, size] float32 (Mamba 2).

    x: [T, heads, size]
    key, query: [T, groups, n] B and C
    skip: [heads] D, float32
    state: [entries, heads, size, n] float32, updated
    """
    if x.is_cuda:
        from quire.ops.kernels import recurrent as kernel

        return kernel.ssd(x, steps, key, query, skip, state, rows)
    return reference_ssd(x, steps, key, query, skip, state, rows)


def reference_ssd(
    x: Tensor, steps: TimeSteps, key: Tensor, query: Tensor, skip: Tensor | None, state: Tensor, rows: StateRows
) -> Tensor:
    dt = F.softplus(steps.raw.float() + steps.bias).clamp(steps.low, steps.high)
    decay = -torch.exp(steps.rate_log)
    heads = x.shape[1]
    values, repeats = x.float(), heads // key.shape[1]
    key, query = (part.float().repeat_interleave(repeats, 1) for part in (key, query))
    out = torch.empty_like(values)
    if (ones := rows.begun(state)) is not None:
        at, own, before = ones
        added = (dt[at].unsqueeze(-1) * values[at]).unsqueeze(-1) * key[at].unsqueeze(2)
        after = before * torch.exp(dt[at] * decay)[:, :, None, None] + added
        state[own] = after
        out[at] = (after * query[at].unsqueeze(2)).sum(-1)
    for first, count, begin, entry in rows.rows:
        if count == 1:
            continue
        current = state[entry] if begin else torch.zeros_like(state[entry])
        for start in range(first, first + count, CHUNK_TOKENS):
            part = slice(start, min(start + CHUNK_TOKENS, first + count))
            out[part], current = _chunk(values[part], dt[part], decay, key[part], query[part], current)
        state[entry] = current
    return out if skip is None else out + values * skip.float()[:, None]


def _chunk(x: Tensor, dt: Tensor, decay: Tensor, key: Tensor, query: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output of x [n, heads, size], and the state after it; state [heads, size, width]."""
    total = torch.cumsum(dt * decay, 0).T  # [heads, n]
    lag = total.unsqueeze(2) - total.unsqueeze(1)  # [heads, query, key]
    weight = torch.exp(lag.masked_fill(torch.ones_like(lag, dtype=torch.bool).triu(1), float("-inf"))) * dt.T.unsqueeze(1)
    scores = torch.einsum("qhn,khn->hqk", query, key) * weight
    out = torch.einsum("hqk,khp->qhp", scores, x)
    out += torch.einsum("qhn,hpn->qhp", query * torch.exp(total).T.unsqueeze(-1), state)
    left = (torch.exp(total[:, -1:] - total) * dt.T).T.unsqueeze(-1)  # [n, heads, 1]
    return out, state * torch.exp(total[:, -1])[:, None, None] + torch.einsum("khp,khn->hpn", x * left, key)
