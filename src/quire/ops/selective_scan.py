"""The recurrence of Mamba: every channel has a time step of its own, and decays by a number for each of its states:

state = exp(dt * A) * state + dt * x B        y = state C + D x
"""

import torch
from torch import Tensor

from quire.ops.arguments import StateRows


def selective_scan(
    x: Tensor, dt: Tensor, decay: Tensor, key: Tensor, query: Tensor, skip: Tensor, state: Tensor, rows: StateRows
) -> Tensor:
    """x, dt [T, channels] float32, decay [channels, n] (A, below 0), key and query (B and C) [T, n], skip (D) [channels],
    state [entries, channels, n] float32 -> [T, channels] float32. By torch everywhere: rows of several tokens are a loop."""
    out = torch.empty_like(x)
    if (ones := rows.begun(state)) is not None:
        at, own, before = ones
        after = _step(before, x[at], dt[at], decay, key[at])
        state[own] = after
        out[at] = (after * query[at].unsqueeze(1)).sum(-1)
    for first, count, begin, entry in rows.rows:
        if count == 1:
            continue
        current = state[entry] if begin else torch.zeros_like(state[entry])
        part = slice(first, first + count)
        kept = torch.exp(dt[part].unsqueeze(-1) * decay)  # [n, channels, states]
        added = (dt[part] * x[part]).unsqueeze(-1) * key[part].unsqueeze(1)
        for index in range(count):
            current = current * kept[index] + added[index]
            out[first + index] = current @ query[first + index]
        state[entry] = current
    return out + x * skip


def _step(state: Tensor, x: Tensor, dt: Tensor, decay: Tensor, key: Tensor) -> Tensor:
    return state * torch.exp(dt.unsqueeze(-1) * decay) + (dt * x).unsqueeze(-1) * key.unsqueeze(1)
