"""Products with matrices of 8-bit numbers, a scale to each output, by torch's own product of integers. Where a CPU multiplies
bytes in tiles, a few rows take as long as one; `ops/choice.py` finds out.

Activations are two numbers of 8 bits, for one alone would follow a row's largest value and lose the others:

    x  =  unit * (high + low / 254)

Sums are whole numbers, so a row's result does not depend on the rows beside it.
"""

import torch
from torch import Tensor

from quire.ops.blocks import Stored, dequantize

ROWS_AT_ONCE = 4096  # unfolded while a matrix is rounded
LARGEST, FINER = 127, 254  # the largest number, and how many of the low unit are one of the high


class OctetProduct:
    """x [T, K] -> [T, N], by a matrix [N, K] that was rounded to 8 bits by rows."""

    def __init__(self, stored: Stored, bias: Tensor | None) -> None:
        self._numbers = torch.empty(len(stored), stored.columns, dtype=torch.int8)  # [N, K]
        self._scale = torch.empty(len(stored))  # [N]
        self._bias = bias
        for start in range(0, len(stored), ROWS_AT_ONCE):
            part = slice(start, min(start + ROWS_AT_ONCE, len(stored)))
            rows = stored.read(part.start, part.stop)
            values = dequantize(rows.flatten(), stored.type, (len(rows), stored.columns)).float()
            unit = _unit(values)
            self._numbers[part] = values.div_(unit).round_()
            self._scale[part] = unit[:, 0]
        stored.forget()

    def __call__(self, x: Tensor) -> Tensor:
        unit = _unit(x)  # [T, 1]
        exact = x / unit
        high = exact.round()
        low = exact.sub_(high).mul_(FINER).round_()
        digits = torch.cat((high, low)).to(torch.int8)  # [2T, K]
        if len(x) == 1:  # this way round is quicker
            high, low = torch._int_mm(self._numbers, digits.t()).t().float()[:, None]
        else:
            high, low = torch._int_mm(digits, self._numbers.t()).float().chunk(2)
        y = low.mul(1 / FINER).add_(high).mul_(unit).mul_(self._scale)
        return y if self._bias is None else y.add_(self._bias)


def _unit(rows: Tensor) -> Tensor:
    """[R, K] -> [R, 1]: what each row is counted in."""
    return rows.abs().amax(1, keepdim=True).div_(LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
