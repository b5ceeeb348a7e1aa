"""GGUF's block types: unfolded to float32, or taken apart into integers with scales.

A tensor is a row of blocks; a block is one or two half-precision scales and a few bits per element. The common types are
done here with torch, a cache-sized run of blocks at a time; the rare ones by the `gguf` package. Values are bit for bit
those of ggml's reference: the order of multiplications is kept.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from quire.files.gguf import GGML_TYPES, READABLE_TYPES
from quire.types.errors import ModelError

RUN_ELEMENTS = 1 << 18  # unfolded at once: small enough to stay in cache

Unfold = Callable[[Tensor, Tensor], None]  # blocks [B, block bytes] uint8, out [B, block elements] float32

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


def dequantize(raw: Tensor, type_: int, shape: tuple[int, ...]) -> Tensor:
    """raw [nbytes] uint8, as it lies in the file -> a tensor of `shape`: float32, or the file's own floating type."""
    name, elements, nbytes = GGML_TYPES[type_]
    if name not in READABLE_TYPES:
        raise ModelError(f"GGUF tensors of type {name} cannot be read; these can: {', '.join(READABLE_TYPES)}")
    if name in _PLAIN:
        return raw.view(_PLAIN[name]).view(shape).clone()
    unfold = UNFOLD.get(name)
    if unfold is None:
        return _by_package(raw, type_, shape)
    blocks = raw.view(-1, nbytes)
    out = torch.empty(blocks.shape[0], elements)
    run = RUN_ELEMENTS // elements
    for start in range(0, blocks.shape[0], run):
        unfold(blocks[start : start + run], out[start : start + run])
    return out.view(shape)


def _by_package(raw: Tensor, type_: int, shape: tuple[int, ...]) -> Tensor:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize as unfold

    rows = raw.numpy().reshape(prod(shape[:-1]), -1)
    return torch.from_numpy(unfold(rows, GGMLQuantizationType(type_))).view(shape)


def _half(blocks: Tensor, start: int, count: int = 1) -> Tensor:
    """`count` half-precision numbers from byte `start` of each block: [B, count] float32."""
    return blocks[:, start : start + 2 * count].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """[B, n] -> [B, 2n]: all low halves, then all high halves."""
    return torch.cat((packed & 15, packed >> 4), dim=1)


def _bits(packed: Tensor) -> Tensor:
    """[B, n] -> [B, 8n] of 0 and 1, lowest bit first."""
    return ((packed.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(1)


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks[:, 2:].contiguous().view(torch.int8)).mul_(_half(blocks, 0))


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(_nibbles(blocks[:, 2:])).sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    out.copy_(_nibbles(blocks[:, 4:])).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(_nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4).sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: Tensor, out: Tensor) -> None:
    out.copy_(_nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _scales_and_minima(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The 8 scales and 8 minima of 6 bits each that K blocks keep in 12 bytes: two of [B, 8].

    bytes 0-3    low 6 bits: scales 0-3    high 2 bits: top of scales 4-7
    bytes 4-7    low 6 bits: minima 0-3    high 2 bits: top of minima 4-7
    bytes 8-11   low nibble: rest of scales 4-7    high nibble: rest of minima 4-7
    """
    a, b, c = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat((a & 63, (c & 15) | (a >> 6 << 4)), dim=1)
    minima = torch.cat((b & 63, (c >> 4) | (b >> 6 << 4)), dim=1)
    return scales, minima


def _scale_k(blocks: Tensor, out: Tensor) -> None:
    """out [B, 256] holds the integers; each 32 of them have a scale and a minimum."""
    both = _half(blocks, 0, 2)
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    groups = out.view(-1, 8, 32)
    groups.mul_((both[:, :1] * scales).unsqueeze(2)).sub_((both[:, 1:] * minima).unsqueeze(2))


def _nibble_groups(packed: Tensor) -> Tensor:
    """[B, 128] -> [B, 8, 32]: 32 bytes hold the low halves of one group and the high halves of the next."""
    pairs = packed.reshape(-1, 4, 1, 32)
    return torch.cat((pairs & 15, pairs >> 4), dim=2).view(-1, 8, 32)


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    out.view(-1, 8, 32).copy_(_nibble_groups(blocks[:, 16:]))
    _scale_k(blocks, out)


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    planes = (blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8).view(8, 1)) & 1  # [B, 8, 32]
    out.view(-1, 8, 32).copy_(_nibble_groups(blocks[:, 48:]) | planes << 4)
    _scale_k(blocks, out)


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = torch.cat((low & 15, low >> 4), dim=2).view(-1, 2, 4, 32)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> torch.arange(0, 8, 2, dtype=torch.uint8).view(4, 1)) & 3
    out.view(-1, 2, 4, 32).copy_(low | high << 4).sub_(32)
    scales = blocks[:, 192:208].contiguous().view(torch.int8) * _half(blocks, 208)
    out.view(-1, 16, 16).mul_(scales.unsqueeze(2))


UNFOLD: dict[str, Unfold] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


GROUP = 32  # elements that share a scale


@dataclass(frozen=True)
class Integers:
    """A matrix [N, K] as whole numbers of 4 or 8 bits: value = scale * (number - 2 ** (bits - 1)) + offset, by groups of 32."""

    bits: int
    numbers: Tensor  # [N, K] uint8
    scale: Tensor  # [N, K / 32] float32
    offset: Tensor | None  # [N, K / 32] float32

    def widened(self) -> "Integers":
        """The same values with numbers of 8 bits."""
        return self if self.bits == 8 else Integers(8, self.numbers + 120, self.scale, self.offset)


def take_apart(rows: Tensor, type_: int) -> Integers:
    """rows [N, row bytes] uint8, as they lie in the file. Types with a scale per 32 elements keep their values exactly; others
    are rounded to 8 bits."""
    name, elements, nbytes = GGML_TYPES[type_]
    count, columns = len(rows), rows.shape[1] // nbytes * elements
    blocks = rows.reshape(-1, nbytes)
    apart = _APART.get(name)
    if apart is None:
        return _rounded(dequantize(rows.flatten(), type_, (count, columns)))
    bits, numbers, scale, offset = apart(blocks)
    shape = count, columns // GROUP
    return Integers(bits, numbers.view(count, columns), scale.reshape(shape), None if offset is None else offset.reshape(shape))


def _rounded(values: Tensor) -> Integers:
    groups = values.float().view(len(values), -1, GROUP)
    scale = groups.abs().amax(-1, keepdim=True) / 127
    numbers = (groups / scale.clamp(min=torch.finfo(torch.float32).tiny)).round_().add_(128)
    return Integers(8, numbers.to(torch.uint8).view(values.shape), scale.squeeze(-1), None)


Apart = tuple[int, Tensor, Tensor, Tensor | None]  # bits, numbers [B, elements], scale and offset per group


def _apart_q8_0(blocks: Tensor) -> Apart:
    return 8, blocks[:, 2:] ^ 128, _half(blocks, 0), None


def _apart_q4_0(blocks: Tensor) -> Apart:
    return 4, _nibbles(blocks[:, 2:]), _half(blocks, 0), None


def _apart_q4_1(blocks: Tensor) -> Apart:
    scale = _half(blocks, 0)
    return 4, _nibbles(blocks[:, 4:]), scale, _half(blocks, 2) + 8 * scale


def _apart_q5_0(blocks: Tensor) -> Apart:
    return 8, (_nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4) + 112, _half(blocks, 0), None


def _apart_q5_1(blocks: Tensor) -> Apart:
    scale = _half(blocks, 0)
    return 8, (_nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4) + 112, scale, _half(blocks, 2) + 16 * scale


def _apart_q4_k(blocks: Tensor) -> Apart:
    both = _half(blocks, 0, 2)
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    scale = both[:, :1] * scales
    return 4, _nibble_groups(blocks[:, 16:]).flatten(1), scale, 8 * scale - both[:, 1:] * minima


_APART: dict[str, Callable[[Tensor], Apart]] = {
    "Q8_0": _apart_q8_0,
    "Q4_0": _apart_q4_0,
    "Q4_1": _apart_q4_1,
    "Q5_0": _apart_q5_0,
    "Q5_1": _apart_q5_1,
    "Q4_K": _apart_q4_k,
}
