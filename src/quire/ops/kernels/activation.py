"""Gated activation: the activation of the first half of each row times the second half."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from quire.ops.arguments import ClampedSwiglu
from quire.ops.kernels.launcher import cdiv, launched, let_next_start, overlapping, tanh, wait_for_previous

BLOCK = 1024
KINDS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
CLAMPED = "clamped_swiglu"


def constants_of(gating: str | ClampedSwiglu) -> dict[str, Any]:
    """Return the constants of kernels that call `gate_by`; "": no gate."""
    if isinstance(gating, ClampedSwiglu):
        return {"KIND": CLAMPED, "ALPHA": gating.alpha, "LIMIT": gating.limit}
    return {"KIND": KINDS[gating] if gating else "", "ALPHA": 0.0, "LIMIT": 0.0}


@triton.jit
def activate(x, KIND: tl.constexpr):
    if KIND == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif KIND == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        y = 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif KIND == "relu2":
        y = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    else:
        y = tl.maximum(x, 0.0)
    return y


@triton.jit
def gate_by(gate, up, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, DTYPE: tl.constexpr):
    """Return the gated activation in float32; gate and up are rounded to DTYPE first, as a GEMM's output would be."""
    gate = gate.to(DTYPE).to(tl.float32)
    up = up.to(DTYPE).to(tl.float32)
    if KIND == "clamped_swiglu":
        gate = tl.where(gate > LIMIT, LIMIT, gate)  # NaN stays NaN
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        value = (up + 1.0) * (gate / (1.0 + tl.exp(-ALPHA * gate)))
    else:
        value = activate(gate, KIND).to(DTYPE).to(tl.float32) * up
    return value


@launched
@triton.jit
def _gated(
    x,  # [rows, 2 * size] gate, up
    out,  # [rows, size]
    size,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(x + row * 2 * size + at, mask=inside, other=0.0)
    up = tl.load(x + row * 2 * size + size + at, mask=inside, other=0.0)
    active = activate(gate.to(tl.float32), KIND).to(gate.dtype).to(tl.float32)
    tl.store(out + row * size + at, (active * up.to(tl.float32)).to(gate.dtype), mask=inside)


def gated(x: Tensor, name: str) -> Tensor:
    x = x.contiguous()
    size = x.shape[-1] // 2
    out = x.new_empty(*x.shape[:-1], size)
    rows = out.numel() // size
    if rows:
        _gated[(rows, cdiv(size, BLOCK))](x, out, size, KIND=KINDS[name], BLOCK=BLOCK, **overlapping())
    return out
