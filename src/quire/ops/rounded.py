"""Rows rounded to 8 bits, as products in 8 bits read them. Who makes rows for such a product alone may round them as it writes
them, and else they are read again and rounded by a launch of their own; the numbers are the same."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

FLOAT8_MAX, INT8_MAX = 448.0, 127.0
ALIGNED = 16  # rows, to a multiple of which there is room where scales lie side by side by group


@dataclass(frozen=True)
class Rounding:
    """How a product wants its rows: of two columns that are `apart`, one beside the other, as words of its matrix lie."""

    kind: torch.dtype  # int8 or float8_e4m3fn
    columns: int  # those that rows do not have are zeros
    apart: int
    group: int = 0  # columns of a scale; 0 = a row has one
    given: Tensor | None = None  # the scale of all rows, float32

    @property
    def largest(self) -> float:
        return INT8_MAX if self.kind == torch.int8 else FLOAT8_MAX

    def make_room(self, count: int, like: Tensor, dtype: torch.dtype) -> "RoundedRows":
        """For so many rows of that type, on the device of `like`."""
        height = -(-count // ALIGNED) * ALIGNED if self.group else count
        numbers = torch.empty(height, self.columns, dtype=self.kind, device=like.device)
        shape = (self.columns // self.group, height) if self.group else (count,)
        return RoundedRows(numbers, torch.empty(shape, dtype=torch.float32, device=like.device), count, dtype)


@dataclass(frozen=True)
class RoundedRows:
    """Rows [count, inputs] of `dtype` that are there as numbers of 8 bits only."""

    numbers: Tensor  # [count or more, columns]: those above count are any
    scales: Tensor  # float32 [count], or [columns / group, as many as there are numbers]
    count: int
    dtype: torch.dtype

    def __len__(self) -> int:
        return self.count

    @cached_property
    def device(self) -> torch.device:
        return self.numbers.device


Rows = Tensor | RoundedRows
