"""From the sums of a tile to outputs: with a bias, gated, rounded, and put where they belong."""

import triton
import triton.language as tl

from quire.ops.kernels.activation import gate_by


@triton.jit
def put_outputs(
    acc, bias, out, read, begins, target, there, outputs,
    BIAS: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """acc [N, R] float32 of matrix rows `read` [N], of a gated matrix gates above what they gate -> out [., outputs], from
    `begins` on, in the rows target [R] that are there."""
    kind: tl.constexpr = out.dtype.element_ty
    if BIAS:
        acc += tl.load(bias + read).to(tl.float32)[:, None]
    if KIND != "":
        both = tl.reshape(acc, (2, acc.shape[0] // 2, acc.shape[1]))
        gate, up = tl.split(tl.permute(both, (1, 2, 0)))
        acc = gate_by(gate, up, KIND, ALPHA, LIMIT, kind)
    n = begins + tl.arange(0, acc.shape[0])
    tl.store(out + target[None, :] * outputs + n[:, None], acc.to(kind), mask=(n < outputs)[:, None] & there[None, :])
