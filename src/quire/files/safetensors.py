"""The header of a safetensors file: names, dtypes, shapes and offsets. No tensor data is read here."""

import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from json import JSONDecoder
from math import prod
from pathlib import Path, PurePath
from typing import Any

from quire.files.reading import error_summary, open_regular, read_object, shown
from quire.types.errors import ModelError
from quire.types.json_text import read_json

MAX_ENTRY_CHARS = 4096  # of one tensor: dtype, shape and offsets have about 80
_DECODER = JSONDecoder()
_BLANKS = re.compile(r"[ \t\r\n]*")


class HeaderScanner:
    """A cursor in JSON text. Methods raise ValueError if the text at the cursor is something else."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def members(self) -> Iterator[str]:
        """Yield the names of an object's members. The caller reads each value before it asks for the next name."""
        self._take("{", "an object")
        if self._next() == "}":
            self._at += 1
            return
        while True:
            name = self.string()
            self._take(":", "a colon")
            yield name
            if self._next() == "}":
                self._at += 1
                return
            self._take(",", "a comma")

    def string(self) -> str:
        if self._next() != '"':
            raise self._unexpected("a string")
        value, self._at = _DECODER.raw_decode(self._text, self._at)
        return str(value)

    def flat_object(self) -> Any:
        """Return an object that has no objects in it."""
        if self._next() != "{":
            raise self._unexpected("an object")
        end = self._text.find("}", self._at, self._at + MAX_ENTRY_CHARS) + 1
        if not end:
            raise self._unexpected(f"an object of at most {MAX_ENTRY_CHARS:,} characters")
        value, self._at = read_json(self._text[self._at : end]), end
        return value

    def end(self) -> None:
        if self._next():
            raise self._unexpected("the end")

    def _next(self) -> str:
        """Skip blanks and return the next character; nothing at the end."""
        blanks = _BLANKS.match(self._text, self._at)
        self._at = blanks.end() if blanks else self._at
        return self._text[self._at : self._at + 1]

    def _take(self, character: str, what: str) -> None:
        if self._next() != character:
            raise self._unexpected(what)
        self._at += 1

    def _unexpected(self, what: str) -> ValueError:
        return ValueError(f"character {self._at:,} must begin {what}; got {self._text[self._at : self._at + 20]!r}")


MAX_METADATA_KEYS = 100_000
# dtype name -> bits per element
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    dtype: str  # as the file spells it: "BF16", "F32", ...
    shape: tuple[int, ...]
    nbytes: int
    offset: int  # of its first byte in the file

    @property
    def elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class HeaderLimits:
    """Upper limits of a header; a larger one is refused before or during parsing."""

    bytes: int = 100_000_000  # the format's own limit
    tensors: int = 1 << 20


CHECKPOINT_LIMITS = HeaderLimits()


def read_header(path: str | Path, limits: HeaderLimits = CHECKPOINT_LIMITS) -> dict[str, TensorInfo]:
    return parse_header(Path(path), *read_header_text(Path(path), limits), limits)


def read_header_text(path: Path, limits: HeaderLimits = CHECKPOINT_LIMITS) -> tuple[bytes, int]:
    """Return the header's bytes and the size of the file."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            if len(prefix) < 8:
                raise _broken(path, f"it has only {size} bytes")
            (length,) = struct.unpack("<Q", prefix)
            if length > size - 8:
                raise _broken(path, f"its header should be {length:,} bytes long, but the file has {size:,}")
            if length > limits.bytes:
                raise ModelError(f"{path}: its header must have at most {limits.bytes:,} bytes; got {length:,}")
            return file.read(length), size
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error


def parse_header(path: Path, text: bytes, size: int, limits: HeaderLimits = CHECKPOINT_LIMITS) -> dict[str, TensorInfo]:
    found = dict[str, TensorInfo]()
    for name, entry in _entries(path, text):
        if name in found:
            raise _broken(path, f"its header has tensor {shown(name)} twice")
        if len(found) == limits.tensors:
            raise ModelError(f"{path}: its header must have at most {limits.tensors:,} tensors; got more")
        found[name] = _info(path, name, entry, 8 + len(text), size)
    end, before = 0, ""
    for name, info in sorted(found.items(), key=lambda item: item[1].offset):
        if info.nbytes and info.offset < end:
            raise _broken(path, f"the tensors {shown(before)} and {shown(name)} overlap")
        end, before = max(end, info.offset + info.nbytes), name
    return found


def _entries(path: Path, text: bytes) -> Iterator[tuple[str, Any]]:
    """Yield name and entry of each tensor; metadata is counted and skipped."""
    try:
        scanner, keys = HeaderScanner(text.decode()), 0
        for name in scanner.members():
            if name != "__metadata__":
                yield name, scanner.flat_object()
                continue
            for _ in scanner.members():
                scanner.string()
                keys += 1
                if keys > MAX_METADATA_KEYS:
                    raise ModelError(f"{path}: its header must have at most {MAX_METADATA_KEYS:,} keys of metadata; got more")
        scanner.end()
    except ValueError as error:
        raise _broken(path, f"its header is not JSON as the format requires ({error_summary(error)})") from error


def _info(path: Path, name: str, entry: Any, data_start: int, size: int) -> TensorInfo:
    data_bytes, called = size - data_start, shown(name)
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise _broken(path, f"the entry of tensor {called} lacks dtype, shape or data_offsets") from error
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise _broken(path, f"the entry of tensor {called} has sizes or offsets that are not integers of at least 0")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise ModelError(f"{path}: tensor {called} has the unknown dtype {shown(dtype)}")
    if (end - begin) * 8 != prod(shape) * DTYPE_BITS[dtype]:
        wrong = f"tensor {called} of shape {shown(list(shape))} and dtype {dtype} cannot be {end - begin:,} bytes long"
        raise _broken(path, wrong)
    if end > data_bytes:
        raise _broken(
            path,
            f"tensor {called} ends at byte {end:,} of {data_bytes:,} bytes of data; it is truncated, download it again",
        )
    return TensorInfo(dtype, shape, end - begin, data_start + begin)


def read_index(path: Path) -> dict[str, str]:
    """Return the file of each tensor. They must be in the index's directory (as links in the hub's cache are)."""
    found = (read_object(path) or {}).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise ModelError(f"{path}: broken weight index: it has no weight_map from tensor names to file names")
    for file in set(found.values()):
        if not file or "\0" in file or PurePath(file).is_absolute() or ".." in PurePath(file).parts:
            raise ModelError(f"{path}: broken weight index: it names {shown(file)}, which is not in its directory")
    return found


def _broken(path: Path, why: str) -> ModelError:
    return ModelError(f"{path}: broken safetensors file: {why}")


_SHARD = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$", re.DOTALL)


def gguf_shards(path: Path) -> tuple[Path, ...]:
    """Return all files of the model that `path` is a shard of, in order; only `path` if the model is one file."""
    match = _SHARD.match(path.name)
    if match is None:
        return (path,)
    stem, count = match["stem"], int(match["count"])
    paths = tuple(path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1))
    missing = [shard.name for shard in paths if not shard.is_file()]
    if missing:
        raise ModelError(f"{path.parent}: {len(missing)} of {count} GGUF shards are missing: {', '.join(missing)}")
    return paths


def shard_pattern(name: str) -> str:
    """Return a file name pattern that matches `name` and its sibling shards."""
    match = _SHARD.match(name)
    return name if match is None else f"{match['stem']}-*-of-{match['count']}.gguf"


def group_models(paths: list[Path]) -> list[tuple[Path, ...]]:
    """Group GGUF files into models. Image encoders (`mmproj`), which are stored with models, are left out."""
    models = []
    for path in sorted(path for path in paths if "mmproj" not in path.name.lower()):
        match = _SHARD.match(path.name)
        if match is None or int(match["number"]) == 1:
            models.append(gguf_shards(path))
    return models
