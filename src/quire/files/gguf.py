"""The header of a GGUF file: metadata and the position of each tensor. No tensor data is read here.

    magic  version  tensors  pairs | key type value ... | name dims type offset ... | padding | tensor data ...

The format is little-endian and unaligned up to the padding. The tokenizer's arrays (hundreds of thousands of strings)
are the bulk of it, so strings are sliced in one tight loop.
"""

import itertools
import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from quire.files.reading import open_regular
from quire.types.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 8
MAX_NESTING = 4

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
# value type -> struct code
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# ggml type number -> name, elements per block, bytes per block; the `gguf` package has the same table, but takes long to import
GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip
# those whose values can be dequantized
READABLE_TYPES = (
    "F32", "F16", "BF16", "F64", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4",
)  # fmt: skip

# integer formats: (stored bits per weight, weights per scale, whether there is an offset)
INTEGER_TYPES = {
    "Q4_0": (4, 32, False), "Q4_1": (4, 32, True), "Q4_K": (4, 32, True), "Q5_0": (8, 32, False), "Q5_1": (8, 32, True),
    "Q5_K": (8, 32, True), "Q6_K": (8, 16, False), "Q8_0": (8, 32, False),
}  # fmt: skip
SIX_BIT_TYPES = ("Q5_0", "Q5_1", "Q5_K", "Q6_K")  # of those, the ones that a GPU packs to 6 bits
FLOAT4_TYPES = {"MXFP4": (4, 32, False)}  # 4-bit floats, likewise


@dataclass(frozen=True)
class GGUFTensor:
    name: str
    shape: tuple[int, ...]  # outermost dimension first, as torch counts
    type: int  # ggml type number
    offset: int  # from the start of the file
    nbytes: int

    @property
    def elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class GGUFHeader:
    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    @property
    def architecture(self) -> str:
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str):
            raise ModelError(f"{self.path}: the GGUF metadata has no general.architecture, so the model family is unknown")
        return name

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of `{architecture}.{key}`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


def read_gguf(path: str | Path) -> GGUFHeader:
    path = Path(path)
    try:
        with open_regular(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(path, data).header()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # an empty file cannot be mapped
        raise ModelError(f"{path}: not a GGUF file (it is empty)") from error


def read_gguf_shards(paths: Sequence[Path]) -> list[GGUFHeader]:
    """Return the headers of all shards of a model; the first has the metadata. Each announced tensor must exist once."""
    headers = [read_gguf(path) for path in paths]
    seen: dict[str, Path] = {}
    for header in headers:
        for name in header.tensors:
            if name in seen:
                raise ModelError(
                    f"{header.path}: tensor {name!r} is also in {seen[name].name}; the shards do not belong together"
                )
            seen[name] = header.path
    announced = headers[0].metadata.get("split.tensors.count")
    if isinstance(announced, int) and announced != len(seen):
        raise ModelError(f"{headers[0].path}: the shards hold {len(seen)} tensors, but the header announces {announced}")
    return headers


class _Parser:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.at = 0

    def header(self) -> GGUFHeader:
        try:
            return self._header()
        except (struct.error, OverflowError):
            raise self._broken("it ends inside the header") from None

    def _header(self) -> GGUFHeader:
        if self.data[:4] != MAGIC:
            raise ModelError(f"{self.path}: not a GGUF file (it starts with {bytes(self.data[:4])!r}, not {MAGIC!r})")
        self.at = 4
        version = self._u32()
        if version not in VERSIONS:
            kind = "big-endian" if version & 0xFFFF == 0 else f"version {version}"
            raise ModelError(
                f"{self.path}: {kind} GGUF is not supported; little-endian versions {VERSIONS} are. Convert it again"
            )
        tensors, pairs = self._u64(), self._u64()
        metadata: dict[str, Any] = {}
        for _ in range(self._check_count(pairs, 13, "metadata pairs")):
            key = self._string()
            metadata[key] = self._value(self._u32())
        infos = [self._info() for _ in range(self._check_count(tensors, 24, "tensors"))]
        return GGUFHeader(self.path, metadata, self._place(infos, metadata))

    def _place(self, infos: list[tuple[str, tuple[int, ...], int, int]], metadata: dict[str, Any]) -> dict[str, GGUFTensor]:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._broken(f"general.alignment is {alignment!r}")
        start = -(-self.at // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, type_, offset in infos:
            nbytes = self._nbytes(name, shape, type_)
            end = start + offset + nbytes
            if end > self.size:
                raise self._broken(
                    f"tensor {name!r} ends at byte {end:,}, but the file has {self.size:,}; it is truncated, download it again"
                )
            if name in tensors:
                raise self._broken(f"tensor {name!r} is listed twice")
            if offset % alignment:
                raise self._broken(
                    f"tensor {name!r} begins {offset:,} bytes into the data, which is no multiple of {alignment}"
                )
            tensors[name] = GGUFTensor(name, shape, type_, start + offset, nbytes)
        placed = sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.nbytes))
        for before, after in itertools.pairwise(placed):
            if after.offset < before.offset + before.nbytes:
                raise self._broken(f"the tensors {before.name!r} and {after.name!r} overlap")
        return tensors

    def _nbytes(self, name: str, shape: tuple[int, ...], type_: int) -> int:
        if type_ not in GGML_TYPES:
            raise ModelError(f"{self.path}: tensor {name!r} has the unknown ggml type {type_}")
        kind, block, block_bytes = GGML_TYPES[type_]
        if 0 in shape:
            raise self._broken(f"tensor {name!r} is empty")
        if shape[-1] % block:
            raise self._broken(f"tensor {name!r} has rows of {shape[-1]} elements, not a multiple of {kind}'s block of {block}")
        return prod(shape) // block * block_bytes

    def _info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        rank = self._u32()
        if not 1 <= rank <= MAX_DIMENSIONS:
            raise self._broken(f"tensor {name!r} has {rank} dimensions")
        shape = tuple(self._u64() for _ in range(rank))[::-1]  # GGUF lists the innermost dimension first
        return name, shape, self._u32(), self._u64()

    def _value(self, type_: int, depth: int = 0) -> Any:
        if code := _SCALARS.get(type_):
            return self._scalars(code, 1)[0]
        if type_ == _STRING:
            return self._string()
        if type_ != _ARRAY or depth == MAX_NESTING:
            raise self._broken(f"there is an unknown value type {type_} at byte {self.at:,}")
        item, count = self._u32(), self._u64()
        if code := _SCALARS.get(item):
            return list(self._scalars(code, self._check_count(count, struct.calcsize(f"<{code}"), "array items")))
        if item == _STRING:
            return self._strings(self._check_count(count, 8, "strings"))
        return [self._value(item, depth + 1) for _ in range(self._check_count(count, 12, "arrays"))]

    def _scalars(self, code: str, count: int) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{count}{code}", self.data, self.at)
        self.at += struct.calcsize(f"<{count}{code}")
        return values

    def _strings(self, count: int) -> list[str]:
        data, at, length = self.data, self.at, _U64.unpack_from
        out = []
        for _ in range(count):
            (n,) = length(data, at)
            start = at + 8
            at = start + n
            out.append(data[start:at])
        if at > self.size:
            raise self._broken("it ends inside a list of strings")
        self.at = at
        return [text.decode("utf-8", "replace") for text in out]

    def _string(self) -> str:
        return self._strings(1)[0]

    def _u32(self) -> int:
        (value,) = _U32.unpack_from(self.data, self.at)
        self.at += 4
        return int(value)

    def _u64(self) -> int:
        (value,) = _U64.unpack_from(self.data, self.at)
        self.at += 8
        return int(value)

    def _check_count(self, count: int, least_bytes: int, what: str) -> int:
        """Return `count` if the rest of the file can hold that many items, so that a broken header cannot exhaust memory."""
        if count * least_bytes > self.size - self.at:
            raise self._broken(f"it announces {count:,} {what}, more than the rest of the file could hold")
        return count

    def _broken(self, why: str) -> ModelError:
        return ModelError(f"{self.path}: broken GGUF file: {why}")
