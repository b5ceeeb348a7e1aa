"""The recurrence of Mamba 2, a number for each head and token that its state decays by:

    state = exp(dt * A) * state + dt * x B        y = state C + D x

Several tokens at once are a product of matrices over pieces of a row: within a piece every token attends to those before it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.arguments import StateRows, TimeSteps

PIECE = 64  # tokens


def ssd(x: Tensor, steps: TimeSteps, key: Tensor, query: Tensor, skip: Tensor | None, state: Tensor, rows: StateRows) -> Tensor:
    """x [T, heads, size], key and query (B and C) [T, groups, n], skip (D) [heads] float32, state [entries, heads, size, n]
    float32 -> [T, heads, size] float32."""
    if x.is_cuda:
        from quire.ops.kernels import ssd as kernel

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
        for start in range(first, first + count, PIECE):
            part = slice(start, min(start + PIECE, first + count))
            out[part], current = _piece(values[part], dt[part], decay, key[part], query[part], current)
        state[entry] = current
    return out if skip is None else out + values * skip.float()[:, None]


def _piece(x: Tensor, dt: Tensor, decay: Tensor, key: Tensor, query: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """x [n, heads, size], state [heads, size, width] -> what comes out, and the state behind it."""
    total = torch.cumsum(dt * decay, 0).T  # [heads, n]
    lag = total.unsqueeze(2) - total.unsqueeze(1)  # [heads, query, key]
    weight = torch.exp(lag.masked_fill(torch.ones_like(lag, dtype=torch.bool).triu(1), float("-inf"))) * dt.T.unsqueeze(1)
    scores = torch.einsum("qhn,khn->hqk", query, key) * weight
    out = torch.einsum("hqk,khp->qhp", scores, x)
    out += torch.einsum("qhn,hpn->qhp", query * torch.exp(total).T.unsqueeze(-1), state)
    left = (torch.exp(total[:, -1:] - total) * dt.T).T.unsqueeze(-1)  # [n, heads, 1]
    return out, state * torch.exp(total[:, -1])[:, None, None] + torch.einsum("khp,khn->hpn", x * left, key)
