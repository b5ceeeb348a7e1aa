"""How checkpoints store a quantized matrix: its tensors, their dimensions, and the conversion to a layout of `ops`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

from quire.files.reading import error_summary, shown
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

# what to do if ranks cannot divide a matrix
UNDIVIDED = "by tensor_parallel_size; use a smaller one, or pipeline_parallel_size, which does not divide matrices"
LARGEST = 448.0 * 6.0  # largest factor of a scale: the largest fp8 scale times the largest fp4 value


@dataclass(frozen=True)
class Dim:
    """A dimension of a checkpoint tensor.

    along: what it runs along: a matrix's outputs, its inputs, all values in row-major order, or neither
    per: outputs, inputs or values per entry; for "neither": the number of entries
    """

    along: Literal["outputs", "inputs", "all", "neither"]
    per: int = 1

    def size(self, outputs: int, inputs: int) -> int:
        count = {"outputs": outputs, "inputs": inputs, "all": outputs * inputs, "neither": self.per * self.per}[self.along]
        return -(-count // self.per)

    def cut(self, outputs: range, inputs: range, whole: tuple[int, int], where: str) -> tuple[int, int]:
        """Return the range of entries of some outputs and inputs; whole: total (outputs, inputs)."""
        if self.along == "neither":
            return 0, self.per
        if self.along == "inputs" and self.per >= whole[1]:
            return 0, 1  # one entry for all inputs
        some, total = (outputs, whole[0]) if self.along != "inputs" else (inputs, whole[1])
        start, stop = some.start, some.stop
        if self.along == "all":
            if len(inputs) < whole[1]:
                raise ModelError(f"{where} is stored in row-major order and cannot be divided along its inputs {UNDIVIDED}")
            start, stop, total = start * whole[1], stop * whole[1], total * whole[1]
        if start % self.per or (stop % self.per and stop != total):
            share = f"{start} to {stop} of {total} {self.along}"
            raise ModelError(f"{where}: {share} are not whole groups of {self.per}: it cannot be divided {UNDIVIDED}")
        return start // self.per, -(-stop // self.per)


@dataclass(frozen=True)
class Raw:
    """A tensor of a quantized matrix as the checkpoint stores it."""

    dims: tuple[Dim, ...]
    dtype: torch.dtype | None = None  # None: the model's

    def shape(self, outputs: int, inputs: int) -> tuple[int, ...]:
        return tuple(dim.size(outputs, inputs) for dim in self.dims)

    def ranges(self, outputs: range, inputs: range, whole: tuple[int, int], where: str) -> Ranges:
        return tuple(dim.cut(outputs, inputs, whole, where) for dim in self.dims)

    @property
    def outputs(self) -> int | None:
        """Return the dimension along the outputs; None: there is none."""
        return next((at for at, dim in enumerate(self.dims) if dim.along in ("outputs", "all")), None)


class Layout(Protocol):
    @property
    def raw(self) -> Mapping[str, Raw]:
        """Return the tensors that are read, by their names after the matrix's own."""
        ...

    @property
    def skipped(self) -> tuple[str, ...]:
        """Return optional tensors that are not read."""
        ...

    @property
    def scales(self) -> tuple[str, ...]:
        """Return the tensors of `raw` that must not contain 0, infinity or NaN."""
        ...

    @property
    def signed(self) -> bool:
        """Return whether weight scales may be negative. Some tools write negative scales for integers, to use one more value;
        scales of floats are absolute maxima, and kernels rely on it.
        """
        ...

    def convert(self, tensors: Mapping[str, Tensor], where: str) -> Any:
        """Return the matrix in a layout of `ops`, or as floats [..., N, K]. Tensors may share leading dimensions."""
        ...


@dataclass(frozen=True)
class Floats:
    """A matrix that is not quantized, merged with quantized ones."""

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
        what = "NaN" if values.isnan().any() else "0" if (values == 0).any() else "infinity or close to it"
        raise ModelError(f"{where} has a scale of {what}; the checkpoint is damaged")
    if not signed:
        check_sign(values, where)


def check_sign(values: Tensor, where: str) -> None:
    if bool((values < 0).any()):
        raise ModelError(f"{where} has a scale below 0; the checkpoint is damaged")


def check_numbers(numbers: Tensor, where: str) -> None:
    """Check float8_e4m3fn values for NaN: all bits but the sign are set."""
    if bool(((numbers.view(torch.uint8) & 127) == 127).any()):
        raise ModelError(f"{where} has a NaN; the checkpoint is damaged")


def check_group(inputs: int, group: int, where: str) -> None:
    if group <= 0 or inputs % group:
        raise ModelError(f"{where}: groups of {group} do not divide its {inputs} inputs")


TABLE_TOLERANCE = 1e-3  # the stored table may be of lower precision; its values are further from each other


@dataclass(frozen=True)
class Float8Layout:
    """FP8: weight [N, K] and a scale per tensor, output or block; with Activation.TENSOR also input_scale."""

    raw: Mapping[str, Raw]
    scale: str  # name of the scale tensor
    rows: int  # outputs per block; 0: all
    columns: int  # inputs per block; 0: all
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
        if not self.rows:  # every output has the tensor's scale
            scale = scale.reshape(*lead, 1, 1).expand(*lead, outputs, 1)
        scale = scale.reshape(*lead, -1, -(-inputs // columns))
        return Float8(self.rows or 1, columns, numbers, scale.contiguous(), self.activation, input_scale)


@dataclass(frozen=True)
class Float4Layout:
    """4-bit floats, two per byte, low nibble first: `numbers` [N, K / 2] and `scale` [N, K / group].

    nvfp4 also has a factor per tensor; compressed-tensors stores its reciprocal (`divides`).
    """

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
    """bitsandbytes 4-bit: `weight` has all values in row-major order, two per byte, high nibble first; each `group` has a
    scale.

    Scales may be quantized to 8 bits themselves, with a scale per `nested` scales and one offset. The tensor `state` describes
    this as JSON. `quant_map` holds the code's table, which must be the known one.
    """

    raw: Mapping[str, Raw]
    code: str
    outputs: int  # of the whole matrix
    inputs: int
    group: int
    nested: int  # scales per second-level scale; 0: scales are not quantized
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
                raise ModelError(f"{where}.weight.nested_quant_map must ascend within -1 to 1; the checkpoint is damaged")
            if not bool(factors.isfinite().all()):
                raise ModelError(f"{where}.weight.nested_absmax has a scale that is NaN or infinite; the checkpoint is damaged")
            check_sign(factors, f"{where}.weight.nested_absmax")
            offset = state.get("nested_offset", 0.0)
            scale = table[scale.int()] * factors.repeat_interleave(self.nested)[: len(scale)] + offset
        if not bool(scale.isfinite().all()):
            raise ModelError(f"{where}.weight.absmax has a scale that is NaN or infinite; the checkpoint is damaged")
        if not self.nested:  # dequantized scales may be slightly negative
            check_sign(scale, f"{where}.weight.absmax")
        return Float4(cast(Code, self.code), self.group, pack_nibbles(numbers), scale.float().view(len(numbers), -1))

    def _check_table(self, tensors: Mapping[str, Tensor], where: str) -> None:
        found = tensors.get("weight.quant_map")
        if found is None:
            return
        known = torch.tensor(TABLES[cast(Code, self.code)], device=found.device)
        if not torch.allclose(found.float(), known, rtol=0, atol=TABLE_TOLERANCE):
            raise ModelError(f"{where}.weight.quant_map is not the table of {self.code}; the checkpoint is damaged")

    def _read_state(self, tensors: Mapping[str, Tensor], where: str) -> dict[str, Any]:
        if self.state not in tensors:
            return {}
        try:
            state = read_json(bytes(tensors[self.state].tolist()))
        except ValueError as error:
            raise ModelError(f"{where}.{self.state} is not JSON ({error_summary(error)})") from error
        if not isinstance(state, dict):
            raise ModelError(f"{where}.{self.state} must be an object; got {shown(state)}")
        expected = {"blocksize": self.group, "quant_type": self.code, "shape": [self.outputs, self.inputs]} | (
            {"nested_blocksize": self.nested} if self.nested else {}
        )
        for name, value in expected.items():
            if state.get(name, value) != value:
                raise ModelError(f"{where}.{self.state}: {name} must be {value!r}; got {shown(state[name])}")
        offset = state.get("nested_offset")
        if self.nested and not (isinstance(offset, float | int) and math.isfinite(offset)):
            raise ModelError(f"{where}.{self.state}: nested_offset must be a finite number; got {shown(offset)}")
        return state


AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # position in a word of each of 8 neighbouring values


def bytes_of(words: Tensor) -> Tensor:
    """Return the bytes of words [..., n] int32 as [..., 4n] uint8, lowest first."""
    return words.contiguous().view(torch.uint8)


def numbers_of(words: Tensor, bits: int) -> Tensor:
    """Return the values of words [..., n] int32 as [..., 32n / bits] uint8, one per byte."""
    return unpack_nibbles(bytes_of(words)) if bits == 4 else bytes_of(words)


def packed(numbers: Tensor, bits: int) -> Tensor:
    """Return values [..., n] uint8, one per byte, packed as in `PackedInts`."""
    return pack_nibbles(numbers) if bits == 4 else numbers.contiguous()


def zeros_or_none(zeros: Tensor, bits: int, where: str) -> Tensor | None:
    """Return zero points as uint8; None: all are the middle of the range."""
    if bool((zeros == 2 ** (bits - 1)).all()):
        return None
    if int(zeros.amax()) > 255 or int(zeros.amin()) < 0:
        raise ModelError(f"{where} has a zero point of {int(zeros.amax())}, beyond 8 bits")
    return zeros.to(torch.uint8).contiguous()


def ascending_groups(groups: Tensor, group: int) -> Tensor:
    """Return the group of each input without act-order."""
    expected = torch.arange(groups.shape[-1], device=groups.device, dtype=groups.dtype) // group
    return expected.expand(groups.shape)


def by_groups(numbers: Tensor, groups: Tensor, bits: int, group: int, where: str) -> tuple[Tensor, Tensor | None]:
    """Sort the inputs of act-order weights by group.

    numbers: [..., N, K] packed as in `PackedInts`
    groups: [..., K] group of each input
    Return the weights with the inputs of a group next to each other, and the input of each column (None: already sorted).
    """
    order = groups.argsort(dim=-1, stable=True)
    inputs = groups.shape[-1]
    if not torch.equal(groups.gather(-1, order), ascending_groups(groups, group)):
        raise ModelError(f"{where} does not put {group} inputs into each of {inputs // group} groups")
    if torch.equal(order, torch.arange(inputs, device=order.device).expand(order.shape)):
        return numbers, None
    wide = unpack_nibbles(numbers) if bits == 4 else numbers
    return packed(wide.gather(-1, order.unsqueeze(-2).expand(wide.shape)), bits), order.to(torch.int32)


@dataclass(frozen=True)
class AWQLayout:
    """AWQ: qweight [K, N / 8], qzeros [K / group, N / 8], scales [K / group, N]; 8 outputs per word in AWQ_ORDER."""

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
        order = torch.tensor(AWQ_ORDER, device=words.device)
        return in_groups(numbers_of(words, 4), 8).index_select(-1, order).flatten(-2)


@dataclass(frozen=True)
class GPTQLayout:
    """GPTQ: qweight [K * bits / 32, N], qzeros [K / group, N * bits / 32], scales [K / group, N], g_idx [K]."""

    raw: Mapping[str, Raw]
    bits: int
    group: int
    added: int  # to zero points: the older format stores them minus one
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
            elif not torch.equal(groups, ascending_groups(groups, self.group)):
                raise ModelError(f"{where}: act-order groups (g_idx) cannot be divided along the inputs {UNDIVIDED}")
        group = min(self.group, numbers.shape[-1] * 8 // self.bits)
        return PackedInts(self.bits, group, numbers, tensors["scales"].mT.contiguous(), zeros, order)


@dataclass(frozen=True)
class PackedLayout:
    """compressed-tensors, packed: weight_packed [N, K * bits / 32], weight_scale [N, K / group], weight_zero_point
    [N * bits / 32, K / group], weight_g_idx [K]. Values are stored plus 2 ** (bits - 1).
    """

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
    """int8, one value per byte: compressed-tensors' weight [N, K], weight_scale per tensor, output or group, and
    weight_zero_point, or bitsandbytes' SCB, which is 127 times the scale.
    """

    raw: Mapping[str, Raw]
    group: int  # 0: one scale per output or tensor
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
            scale = scale.repeat_interleave(count, -1)  # one scale for the tensor
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
