"""Convolutions of each channel with its own last inputs, which are kept between steps."""

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.arguments import StateRows


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, rows: StateRows, silu: bool) -> Tensor:
    """x [T, C], weight [C, width], bias [C], state [entries, C, width - 1] -> [T, C] of x's type. The last inputs of each row
    are its entry of the state afterwards."""
    if x.is_cuda:
        from quire.ops.kernels import convolution

        return convolution.convolve(x, weight, bias, state, rows, silu)
    return reference_convolve(x, weight, bias, state, rows, silu)


def reference_convolve(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, rows: StateRows, silu: bool) -> Tensor:
    kept = weight.shape[1] - 1
    out = torch.empty_like(x)
    if (ones := rows.begun(state)) is not None:
        at, own, before = ones
        window = torch.cat((before.to(x.dtype), x[at].unsqueeze(2)), 2)
        total = (window * weight).sum(2)
        out[at] = total if bias is None else total + bias
        state[own] = window[:, :, 1:].to(state.dtype)
    for first, count, begin, entry in rows.rows:
        if count != 1:
            before = state[entry].to(x.dtype) if begin else x.new_zeros(x.shape[1], kept)
            line = torch.cat((before, x[first : first + count].T), 1)
            out[first : first + count] = F.conv1d(line, weight.unsqueeze(1), bias, groups=len(weight)).T
            state[entry] = line[:, count:].to(state.dtype)
    return F.silu(out) if silu else out
