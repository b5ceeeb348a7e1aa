"""How a checkpoint has a matrix of few bits: which tensors, what their dimensions are, and what form it is turned into."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from quire.layers.claims import Ranges
from quire.types.errors import ModelError

# what to do about a matrix that ranks cannot share
UNDIVIDED = "with tensor_parallel_size; take a smaller one, or pipeline_parallel_size, which leaves matrices whole"
LARGEST = 448.0 * 6.0  # that a scale is multiplied by: one of fp8, and a number of 4 bits


@dataclass(frozen=True)
class Dim:
    """Of a tensor in a checkpoint: along it are the outputs or the inputs of a matrix, all of its numbers row by row, or
    neither; `per` of them are one entry (neither: there are `per` entries)."""

    along: Literal["outputs", "inputs", "all", "neither"]
    per: int = 1

    def size(self, outputs: int, inputs: int) -> int:
        count = {"outputs": outputs, "inputs": inputs, "all": outputs * inputs, "neither": self.per * self.per}[self.along]
        return -(-count // self.per)

    def cut(self, outputs: range, inputs: range, whole: tuple[int, int], where: str) -> tuple[int, int]:
        """Which entries are of some outputs and inputs; whole: how many of both there are."""
        if self.along == "neither":
            return 0, self.per
        if self.along == "inputs" and self.per >= whole[1]:
            return 0, 1  # of all inputs, so of any
        some, total = (outputs, whole[0]) if self.along != "inputs" else (inputs, whole[1])
        start, stop = some.start, some.stop
        if self.along == "all":
            if len(inputs) < whole[1]:
                raise ModelError(f"{where} lies row by row, and cannot be divided along its inputs {UNDIVIDED}")
            start, stop, total = start * whole[1], stop * whole[1], total * whole[1]
        if start % self.per or (stop % self.per and stop != total):
            share = f"{start} to {stop} of {total} {self.along}"
            raise ModelError(f"{where}: {share} are not whole groups of {self.per}: it cannot be divided so {UNDIVIDED}")
        return start // self.per, -(-stop // self.per)


@dataclass(frozen=True)
class Raw:
    """One tensor."""

    dims: tuple[Dim, ...]
    dtype: torch.dtype | None = None  # None = the model's

    def shape(self, outputs: int, inputs: int) -> tuple[int, ...]:
        return tuple(dim.size(outputs, inputs) for dim in self.dims)

    def ranges(self, outputs: range, inputs: range, whole: tuple[int, int], where: str) -> Ranges:
        return tuple(dim.cut(outputs, inputs, whole, where) for dim in self.dims)

    @property
    def outputs(self) -> int | None:
        """The dimension along which the outputs are, if there is one."""
        return next((at for at, dim in enumerate(self.dims) if dim.along in ("outputs", "all")), None)


class Layout(Protocol):
    @property
    def raw(self) -> Mapping[str, Raw]:
        """What is read, by the name behind the matrix's own."""
        ...

    @property
    def skipped(self) -> tuple[str, ...]:
        """What may be there, and is not read."""
        ...

    @property
    def scales(self) -> tuple[str, ...]:
        """Those of `raw` that no matrix can have a 0, an infinity or a NaN in."""
        ...

    @property
    def signed(self) -> bool:
        """Whether scales of weights may be below 0: of whole numbers some tools write them so, to use one number more. Those of
        floats are made of largest absolute values, and kernels take them so."""
        ...

    def convert(self, tensors: Mapping[str, Tensor], where: str) -> Any:
        """-> a form, or plain floats [..., N, K]. The tensors may have more dimensions in front, all the same ones."""
        ...


@dataclass(frozen=True)
class Floats:
    """A matrix that is not quantized, among some that are."""

    raw: Mapping[str, Raw]
    skipped: tuple[str, ...] = ()
    scales: tuple[str, ...] = ()
    signed: bool = False

    def convert(self, tensors: Mapping[str, Tensor], where: str) -> Tensor:  # noqa: ARG002
        return tensors["weight"]


def check_scales(layout: Layout, tensors: Mapping[str, Tensor], where: str) -> None:
    for name in layout.scales:
        check_scale(tensors[name], f"{where}.{name}", signed=layout.signed and not name.startswith("input"))


def check_scale(found: Tensor, where: str, signed: bool = False) -> None:
    values = (found.view(torch.float8_e8m0fnu) if found.dtype == torch.uint8 else found).float()
    if not bool(((values * LARGEST).isfinite() & (values != 0)).all()):
        what = "NaN" if values.isnan().any() else "0" if (values == 0).any() else "an infinity, or nearly"
        raise ModelError(f"{where} has a scale of {what}; the checkpoint is damaged")
    if not signed:
        check_sign(values, where)


def check_sign(values: Tensor, where: str) -> None:
    if bool((values < 0).any()):
        raise ModelError(f"{where} has a scale below 0; the checkpoint is damaged")


def check_numbers(numbers: Tensor, where: str) -> None:
    """Of float8_e4m3fn, where a NaN has all bits but the sign."""
    if bool(((numbers.view(torch.uint8) & 127) == 127).any()):
        raise ModelError(f"{where} has a NaN; the checkpoint is damaged")


def check_group(inputs: int, group: int, where: str) -> None:
    if group <= 0 or inputs % group:
        raise ModelError(f"{where}: groups of {group} do not divide its {inputs} inputs")
