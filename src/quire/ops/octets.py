"""Products with matrices of 8-bit numbers, a scale to each output, through ONNX Runtime's product of integers. Where a CPU
multiplies bytes in tiles, a few rows take as long as one; `ops/choice.py` finds out.

Activations are two numbers of 8 bits, for one alone would follow a row's largest value and lose the others:

    x  =  unit * (high + low / 254)

Sums are whole numbers, so a row's result does not depend on the rows beside it.
"""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from quire.ops.blocks import Stored, dequantize
from quire.ops.onnx import CONTRIB, Array, Binding, Graph, Program, Value

UNFOLDED_AT_ONCE = 4096  # rows of a matrix that is rounded
ROWS_AT_ONCE = 32  # of x
LARGEST, FINER = 127, 254  # the largest number, and how many of the low unit are one of the high
MIDDLE = 128  # the byte that stands for 0 in x


class OctetProduct:
    """x [T, K] -> [T, N], by a matrix [N, K] that is rounded to 8 bits by rows."""

    def __init__(self, stored: Stored, bias: Tensor | None) -> None:
        numbers, scale = torch.empty(stored.columns, len(stored), dtype=torch.int8), torch.empty(len(stored))  # [K, N], [N]
        for start in range(0, len(stored), UNFOLDED_AT_ONCE):
            part = slice(start, min(start + UNFOLDED_AT_ONCE, len(stored)))
            rows = stored.read(part.start, part.stop)
            values = dequantize(rows.flatten(), stored.type, (len(rows), stored.columns)).float()
            unit = _unit(values)
            numbers[:, part] = values.div_(unit).round_().t()
            scale[part] = unit[:, 0]
        stored.forget()
        self._outputs, self._bias = len(stored), bias
        self._program = _program(numbers.numpy(), scale.numpy(), hold=not forgets())

    def __call__(self, x: Tensor) -> Tensor:
        y = x.new_empty(len(x), self._outputs)
        for start in range(0, len(x), ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            unit = _unit(x[part])  # [T, 1]
            exact = x[part] / unit
            high = exact.round()
            low = exact.sub_(high).mul_(FINER).round_()
            digits = torch.cat((high, low)).add_(MIDDLE).to(torch.uint8)  # [2T, K]
            high, low = _run(self._program, digits, self._outputs).chunk(2)
            torch.add(high, low, alpha=1 / FINER, out=y[part]).mul_(unit)
        return y if self._bias is None else y.add_(self._bias)


def _unit(rows: Tensor) -> Tensor:
    """[R, K] -> [R, 1]: what each row is counted in."""
    return rows.abs().amax(1, keepdim=True).div_(LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)


def _program(numbers: Array, scale: Array, hold: bool) -> Program:
    """(bytes [T, K] - MIDDLE) @ numbers [K, N] * scale [N]"""
    graph = Graph()
    one, middle = graph.constant(np.ones((), np.float32)), graph.constant(np.array(MIDDLE, np.uint8))
    inputs = ["x", graph.give(numbers), one, graph.constant(scale), middle]
    graph.place("MatMulIntegerToFloat", inputs, ["y"], CONTRIB)
    return Program(graph, [Value("x", ("rows", len(numbers)), np.uint8)], [Value("y", ("rows", len(scale)))], hold)


def _run(program: Program, digits: Tensor, outputs: int) -> Tensor:
    binding, sums = Binding(program), torch.empty(len(digits), outputs)
    binding.read("x", digits.shape, digits.data_ptr())
    binding.write("y", sums.shape, sums.data_ptr())
    binding.run()
    return sums


@cache
def is_exact() -> bool:
    """Are sums of the largest numbers right? Older CPUs add pairs of products in 16 bits, which is not enough for them."""
    program = _program(np.full((256, 64), LARGEST, np.int8), np.ones(64, np.float32), hold=True)
    largest = torch.full((40, 256), 255, dtype=torch.uint8)
    return all((_run(program, some, 64) == 256 * LARGEST * (255 - MIDDLE)).all() for some in (largest[:2], largest))


@cache
def forgets() -> bool:
    """Does the runtime, on this machine, never look again at a matrix it was lent? Tried on a small one, by changing it."""
    numbers = np.random.default_rng(0).integers(-LARGEST, LARGEST, (128, 96), np.int8)
    program = _program(numbers, np.ones(96, np.float32), hold=True)
    digits = torch.arange(40 * 128, dtype=torch.int32).to(torch.uint8).view(40, 128)
    before = _run(program, digits, 96)
    numbers[:] = 1
    return torch.equal(_run(program, digits, 96), before)
