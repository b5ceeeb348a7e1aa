"""The gated delta rule: a state [keys, values] decays, and is then corrected towards the value that belongs to a key:

state = decay * state        state = state + k (beta * (v - k state))        out = q state

What a state decays by is a number of each head, or (Kimi) of each of a head's keys.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.arguments import StateRows, TimeSteps

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
    """query and key [T, key heads, n], which are brought to length 1, value [T, heads, m], beta [T, heads] before its sigmoid,
    which is multiplied by `reach`, state [entries, heads, n, m] float32 -> [T, heads, m] float32."""
    if query.is_cuda:
        from quire.ops.kernels import delta_rule as kernel

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
    """[..., heads, n, m] and [..., heads, ...] of one token."""
    state = state * decay.unsqueeze(-1)
    wrong = value - (state * key.unsqueeze(-1)).sum(-2)
    state = state + key.unsqueeze(-1) * (beta.unsqueeze(-1) * wrong).unsqueeze(-2)
    return state, (state * query.unsqueeze(-1)).sum(-2)
