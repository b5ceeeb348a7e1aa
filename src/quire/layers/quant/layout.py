"""How checkpoints store a quantized matrix: its tensors, their dimensions, and the conversion to a layout of `ops`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

from quire.files.reading import shown, told
from quire.layers.parameter import Ranges
from quire.ops.quantized_layouts import (
    TABLES,
    Activation,
    Code,
    Float4,
    Float8,
    Int8,
    PackedInts,
    in_groups,
    pack_nibbles,
    powers_of_two,
    unpack_nibbles,
)
from quire.types.errors import ModelError
from quire.types.json_text import read_json

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


NEAR = 1e-3  # a table that is stored in fewer bits is the same one: neighbours in it are farther apart


@dataclass(frozen=True)
class Float8Layout:
    """weight [N, K] and `scale`: one for all, for each output, or for blocks; with Activation.TENSOR also input_scale."""

    raw: Mapping[str, Raw]
    scale: str  # its name
    rows: int  # outputs and inputs of a block; 0 = all
    columns: int
    activation: Activation
    skipped: tuple[str, ...] = ()
    scales: tuple[str, ...] = ("weight_scale",)
    signed: bool = False

    def convert(self, tensors: Mapping[str, Tensor], where: str) -> Float8:
        numbers, scale = tensors["weight"], tensors[self.scale]
        check_numbers(numbers, f"{where}.weight")
        *lead, outputs, inputs = numbers.shape
        columns = self.columns or inputs
        scale = powers_of_two(scale) if scale.dtype == torch.uint8 else scale.float()
        given = tensors.get("input_scale") if self.activation is Activation.TENSOR else None
        input_scale = None if given is None else given.float().reshape(lead)
        if not self.rows:  # each output has that of the tensor
            scale = scale.reshape(*lead, 1, 1).expand(*lead, outputs, 1)
        scale = scale.reshape(*lead, -1, -(-inputs // columns))
        return Float8(self.rows or 1, columns, numbers, scale.contiguous(), self.activation, input_scale)


@dataclass(frozen=True)
class Float4Layout:
    """Two numbers to a byte, the first in the low half: `numbers` [N, K / 2] and `scale` [N, K / group]; nvfp4 also has a
    factor for the tensor, that of compressed-tensors a divisor."""

    raw: Mapping[str, Raw]
    numbers: str
    scale: str
    group: int
    factor: str | None = None
    divides: bool = False
    skipped: tuple[str, ...] = ()
    scales: tuple[str, ...] = ()
    signed: bool = False

    def convert(self, tensors: Mapping[str, Tensor], where: str) -> Float4:
        numbers = tensors[self.numbers]
        *lead, outputs, _ = numbers.shape
        scale = tensors[self.scale].reshape(*lead, outputs, -1)
        if scale.dtype == torch.float8_e4m3fn:
            check_numbers(scale, f"{where}.{self.scale}")
            check_sign(scale.float(), f"{where}.{self.scale}")
        if scale.dtype == torch.float8_e8m0fnu:
            scale = scale.view(torch.uint8)
        factor = None
        if self.factor is not None:
            one = tensors[self.factor].float().reshape(*lead, 1, 1)
            if self.divides:
                one = 1 / one
                if not bool((one * LARGEST).isfinite().all()):
                    raise ModelError(f"{where}.{self.factor} is too small to divide by; the checkpoint is damaged")
            factor = one.expand(*lead, outputs, 1).contiguous()
        return Float4("e2m1", self.group, numbers, scale, factor)


@dataclass(frozen=True)
class BlockwiseLayout:
    """bitsandbytes: `weight` has all numbers row by row, two to a byte, the first in the high half; each `group` of them have a
    scale, which may be of 8 bits itself, with a scale for each `nested` and an offset for all. `state` says it as JSON.
    Tables of what numbers stand for are there, too: `quant_map`, which must be what is known of the code."""

    raw: Mapping[str, Raw]
    code: str
    outputs: int  # of the whole matrix
    inputs: int
    group: int
    nested: int  # scales that share one; 0 = none do
    state: str
    skipped: tuple[str, ...] = ()
    scales: tuple[str, ...] = ()
    signed: bool = False

    def convert(self, tensors: Mapping[str, Tensor], where: str) -> Float4:
        state = self._read_state(tensors, where)
        self._check_table(tensors, where)
        packed = tensors["weight"].flatten().view(torch.uint8)
        numbers = torch.stack((packed >> 4, packed & 15), dim=-1).view(-1, self.inputs)
        scale = tensors["weight.absmax"]
        if self.nested:
            table, factors = tensors["weight.nested_quant_map"].float(), tensors["weight.nested_absmax"].float()
            if not bool((table[1:] >= table[:-1]).all()) or not bool((table.abs() <= 1).all()) or float(table[-1]) == 0:
                raise ModelError(f"{where}.weight.nested_quant_map does not rise from -1 to 1; the checkpoint is damaged")
            if not bool(factors.isfinite().all()):
                raise ModelError(f"{where}.weight.nested_absmax has a scale that is not a number; the checkpoint is damaged")
            check_sign(factors, f"{where}.weight.nested_absmax")
            offset = state.get("nested_offset", 0.0)
            scale = table[scale.int()] * factors.repeat_interleave(self.nested)[: len(scale)] + offset
        if not bool(scale.isfinite().all()):
            raise ModelError(f"{where}.weight.absmax has a scale that is not a number; the checkpoint is damaged")
        if not self.nested:  # rounding may put those a little below 0
            check_sign(scale, f"{where}.weight.absmax")
        return Float4(cast(Code, self.code), self.group, pack_nibbles(numbers), scale.float().view(len(numbers), -1))

    def _check_table(self, tensors: Mapping[str, Tensor], where: str) -> None:
        found = tensors.get("weight.quant_map")
        if found is None:
            return
        known = torch.tensor(TABLES[cast(Code, self.code)], device=found.device)
        if not torch.allclose(found.float(), known, rtol=0, atol=NEAR):
            raise ModelError(f"{where}.weight.quant_map is not the table of {self.code}; the checkpoint is damaged")

    def _read_state(self, tensors: Mapping[str, Tensor], where: str) -> dict[str, Any]:
        if self.state not in tensors:
            return {}
        try:
            state = read_json(bytes(tensors[self.state].tolist()))
        except ValueError as error:
            raise ModelError(f"{where}.{self.state} is not JSON ({told(error)})") from error
        if not isinstance(state, dict):
            raise ModelError(f"{where}.{self.state} must be an object, got {shown(state)}")
        expected = {"blocksize": self.group, "quant_type": self.code, "shape": [self.outputs, self.inputs]} | (
            {"nested_blocksize": self.nested} if self.nested else {}
        )
        for name, value in expected.items():
            if state.get(name, value) != value:
                raise ModelError(f"{where}.{self.state}: {name} is {shown(state[name])}; only {value!r} is read")
        offset = state.get("nested_offset")
        if self.nested and not (isinstance(offset, float | int) and math.isfinite(offset)):
            raise ModelError(f"{where}.{self.state}: nested_offset must be a number, got {shown(offset)}")
        return state


AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of 8 neighbours in a word


def bytes_of(words: Tensor) -> Tensor:
    """[..., n] int32 -> [..., 4n] uint8, the lowest first."""
    return words.contiguous().view(torch.uint8)


def numbers_of(words: Tensor, bits: int) -> Tensor:
    """[..., n] int32 -> [..., 32n / bits] uint8, one to a byte."""
    return unpack_nibbles(bytes_of(words)) if bits == 4 else bytes_of(words)


def packed(numbers: Tensor, bits: int) -> Tensor:
    """[..., n] uint8, one to a byte, as a form has them."""
    return pack_nibbles(numbers) if bits == 4 else numbers.contiguous()


def zeros_or_none(zeros: Tensor, bits: int, where: str) -> Tensor | None:
    """zeros: of any whole type; None = all are in the middle."""
    if bool((zeros == 2 ** (bits - 1)).all()):
        return None
    if int(zeros.amax()) > 255 or int(zeros.amin()) < 0:
        raise ModelError(f"{where} has a zero point of {int(zeros.amax())}, beyond 8 bits")
    return zeros.to(torch.uint8).contiguous()


def in_order(groups: Tensor, group: int) -> Tensor:
    """What they are if neighbours are in a group."""
    expected = torch.arange(groups.shape[-1], device=groups.device, dtype=groups.dtype) // group
    return expected.expand(groups.shape)


def by_groups(numbers: Tensor, groups: Tensor, bits: int, group: int, where: str) -> tuple[Tensor, Tensor | None]:
    """numbers [..., N, K], packed as a form has them; groups [..., K]: which group each input is in (act-order) -> numbers with
    the columns of a group side by side, and which inputs they are of."""
    order = groups.argsort(dim=-1, stable=True)
    inputs = groups.shape[-1]
    if not torch.equal(groups.gather(-1, order), in_order(groups, group)):
        raise ModelError(f"{where} does not put {group} inputs into each of {inputs // group} groups")
    if torch.equal(order, torch.arange(inputs, device=order.device).expand(order.shape)):
        return numbers, None
    wide = unpack_nibbles(numbers) if bits == 4 else numbers
    return packed(wide.gather(-1, order.unsqueeze(-2).expand(wide.shape)), bits), order.to(torch.int32)


@dataclass(frozen=True)
class AWQLayout:
    """qweight [K, N / 8], qzeros [K / group, N / 8], scales [K / group, N]; 8 outputs to a word, in an order of their own."""

    raw: Mapping[str, Raw]
    group: int
    skipped: tuple[str, ...] = ()
    scales: tuple[str, ...] = ("scales",)
    signed: bool = True

    def convert(self, tensors: Mapping[str, Tensor], where: str) -> PackedInts:
        numbers = packed(self._in_order(tensors["qweight"]).mT, 4)
        group = min(self.group, 2 * numbers.shape[-1])
        zeros = zeros_or_none(self._in_order(tensors["qzeros"]).mT, 4, f"{where}.qzeros") if "qzeros" in tensors else None
        return PackedInts(4, group, numbers, tensors["scales"].mT.contiguous(), zeros, None)

    def _in_order(self, words: Tensor) -> Tensor:
        places = torch.tensor(AWQ_PLACES, device=words.device)
        return in_groups(numbers_of(words, 4), 8).index_select(-1, places).flatten(-2)


@dataclass(frozen=True)
class GPTQLayout:
    """qweight [K * bits / 32, N], qzeros [K / group, N * bits / 32], scales [K / group, N], g_idx [K]."""

    raw: Mapping[str, Raw]
    bits: int
    group: int
    added: int  # to zero points: the older format has them one less
    skipped: tuple[str, ...] = ()
    scales: tuple[str, ...] = ("scales",)
    signed: bool = True

    def convert(self, tensors: Mapping[str, Tensor], where: str) -> PackedInts:
        numbers = bytes_of(tensors["qweight"].mT)
        zeros = None
        if "qzeros" in tensors:
            found = numbers_of(tensors["qzeros"], self.bits).mT.to(torch.int32) + self.added
            zeros = zeros_or_none(found, self.bits, f"{where}.qzeros")
        order = None
        if "g_idx" in tensors:
            groups = tensors["g_idx"]
            if groups.shape[-1] * self.bits == numbers.shape[-1] * 8:
                numbers, order = by_groups(numbers, groups, self.bits, self.group, f"{where}.g_idx")
            elif not torch.equal(groups, in_order(groups, self.group)):
                raise ModelError(f"{where}: groups of any inputs (g_idx) cannot be divided along the inputs {UNDIVIDED}")
        group = min(self.group, numbers.shape[-1] * 8 // self.bits)
        return PackedInts(self.bits, group, numbers, tensors["scales"].mT.contiguous(), zeros, order)


@dataclass(frozen=True)
class PackedLayout:
    """compressed-tensors: weight_packed [N, K * bits / 32], weight_scale [N, K / group], weight_zero_point [N * bits / 32,
    K / group], weight_g_idx [K]; all numbers are 2 ** (bits - 1) more than they stand for."""

    raw: Mapping[str, Raw]
    bits: int
    group: int
    skipped: tuple[str, ...] = ("weight_shape",)
    scales: tuple[str, ...] = ("weight_scale",)
    signed: bool = True

    def convert(self, tensors: Mapping[str, Tensor], where: str) -> PackedInts:
        numbers = bytes_of(tensors["weight_packed"])
        scale = tensors["weight_scale"].reshape(*numbers.shape[:-1], -1)
        zeros = order = None
        if "weight_zero_point" in tensors:
            found = numbers_of(tensors["weight_zero_point"].mT, self.bits).mT
            zeros = zeros_or_none(found, self.bits, f"{where}.weight_zero_point")
        groups = tensors.get("weight_g_idx")
        if groups is not None and not bool((groups == -1).all()):
            numbers, order = by_groups(numbers, groups, self.bits, self.group, f"{where}.weight_g_idx")
        group = min(self.group, numbers.shape[-1] * 8 // self.bits)
        return PackedInts(self.bits, group, numbers, scale, zeros, order)


@dataclass(frozen=True)
class Int8Layout:
    """One signed number to a byte: compressed-tensors' weight [N, K], weight_scale by tensor, output or group, and
    weight_zero_point, or bitsandbytes' SCB, which is 127 times the scale."""

    raw: Mapping[str, Raw]
    group: int  # 0 = one scale for an output, or for all
    activation: Activation
    scale: str = "weight_scale"
    divisor: float = 1.0
    skipped: tuple[str, ...] = ("input_scale", "input_zero_point")
    scales: tuple[str, ...] = ("weight_scale",)
    signed: bool = True

    def convert(self, tensors: Mapping[str, Tensor], where: str) -> Int8 | PackedInts:
        numbers = tensors["weight"]
        *lead, outputs, inputs = numbers.shape
        scale = tensors[self.scale].float().reshape(*lead, -1)
        group = self.group or inputs
        count = outputs * inputs // group
        if scale.shape[-1] != count:
            scale = scale.repeat_interleave(count, -1)  # one for the tensor
        scale = (scale / self.divisor).reshape(*lead, outputs, inputs // group)
        if not bool(scale.isfinite().all()) or bool(((scale == 0) & in_groups(numbers, group).any(-1)).any()):
            raise ModelError(f"{where}.{self.scale} has a scale of 0, NaN or an infinity; the checkpoint is damaged")
        if not self.signed:
            check_sign(scale, f"{where}.{self.scale}")
        zeros = tensors.get("weight_zero_point")
        if zeros is None and not self.group and self.activation is not Activation.NONE:
            return Int8(numbers.contiguous(), scale.contiguous(), self.activation)
        moved = None
        if zeros is not None:
            each = zeros.to(torch.int32).reshape(*lead, -1)
            each = each if each.shape[-1] == count else each.repeat_interleave(count, -1)
            moved = zeros_or_none(each.reshape(scale.shape) + 128, 8, f"{where}.weight_zero_point")
        return PackedInts(8, group, numbers.view(torch.uint8) ^ 128, scale.contiguous(), moved, None)
