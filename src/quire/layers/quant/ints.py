"""Whole numbers of 4 and 8 bits as AWQ, GPTQ and compressed-tensors pack them, in words of 32 bits, the lowest bits first."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.layers.quant.layout import UNDIVIDED, Raw, check_sign
from quire.ops.quantized_layouts import Activation, Int8, PackedInts, in_groups, pack_nibbles, unpack_nibbles
from quire.types.errors import ModelError

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
