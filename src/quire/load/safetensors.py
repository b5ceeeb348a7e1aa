"""Weights from safetensors files: one, or shards with an index. Files are mapped: a tensor is read when it is used.

`MXFP4Source` dequantizes gpt-oss's experts for the fallback: `<name>_blocks` [E, N, K / 32, 16] and `<name>_scales`
[E, N, K / 32] become [E, K, N].
"""

import mmap
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from quire.files.gguf import GGML_TYPES
from quire.files.safetensors import TensorInfo, read_header, read_index
from quire.layers.parameter import Ranges
from quire.load.source import Source, TensorSlice, cut, map_file
from quire.ops.blocks import QuantizedMatrix
from quire.ops.quantized_layouts import Float4
from quire.types.errors import ModelError

INDEX = "model.safetensors.index.json"
MAX_READ_BYTES_IN_MEMORY = 256 << 20
DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "C64": torch.complex64,
}  # fmt: skip

FLOATS = ("F32", "F16", "BF16")  # dtypes that GGUF has under the same names
GGML_NUMBERS = {name: number for number, (name, _, _) in GGML_TYPES.items() if name in FLOATS}


class SafetensorsSource:
    """Tensors of safetensors files.

    files: the weight files in `directory`
    indexed: an index in the directory describes them
    """

    def __init__(self, directory: Path, files: tuple[Path, ...], indexed: bool = True) -> None:
        index = directory / INDEX
        self.directory = directory
        self.index = read_index(index) if indexed and index.is_file() else None
        shards = [path for path in files if path.suffix == ".safetensors"]
        if self.index is not None:
            shards = _indexed(directory, set(self.index.values()))
        elif not shards:
            raise ModelError(f"{directory}: no .safetensors files found")
        else:
            _check_complete(directory, shards)
        self.files = shards

    @cached_property
    def _found(self) -> Mapping[str, tuple[Path, TensorInfo]]:
        found: dict[str, tuple[Path, TensorInfo]] = {}
        for path in self.files:
            for name, info in read_header(path).items():
                if name in found:
                    raise ModelError(f"tensor {name!r} is in both {found[name][0]} and {path}")
                found[name] = (path, info)
        if self.index is not None:
            absent = [name for name, file in self.index.items() if name not in found or found[name][0] != self.directory / file]
            if absent:
                name = min(absent)
                raise ModelError(f"{self.index[name]} lacks {name!r}, which {INDEX} lists ({len(absent)} such tensors)")
        return found

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        return {name: info for name, (_, info) in self._found.items()}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: info.shape for name, (_, info) in self._found.items()}

    def read(self, slices: Collection[TensorSlice]) -> Iterator[tuple[TensorSlice, Tensor]]:
        """Yield tensors in file order, so that the disk is read sequentially. Pages that were read are released; they can be
        read again.
        """
        parts: dict[Path, list[tuple[int, TensorSlice]]] = defaultdict(list)
        for part in slices:
            path, info = self._found[part.name]
            if info.dtype not in DTYPES:
                raise ModelError(f"{path}: tensor {part.name!r} is stored as {info.dtype}, which is not supported")
            parts[path].append((info.offset, part))
        for path in self.files:
            entries = sorted(parts[path], key=lambda entry: (entry[0], entry[1].ranges))
            if not entries:
                continue
            data, released = map_file(path, prefetch=not any(part.ranges for _, part in entries)), 0
            for offset, part in entries:
                if offset - released > MAX_READ_BYTES_IN_MEMORY:
                    size = (offset - released) // mmap.PAGESIZE * mmap.PAGESIZE
                    data.madvise(mmap.MADV_DONTNEED, released, size)
                    released += size
                yield part, _view(data, self._found[part.name][1], part.ranges)

    def find_rows(self, name: str) -> QuantizedMatrix | None:
        path, info = self._found[name]
        if len(info.shape) != 2 or not info.nbytes or info.dtype not in FLOATS:
            return None
        data = map_file(path)
        raw = torch.frombuffer(data, dtype=torch.uint8, count=info.nbytes, offset=info.offset)
        return QuantizedMatrix(GGML_NUMBERS[info.dtype], info.shape[1], raw.view(info.shape[0], -1), None, data, info.offset)


def _view(data: mmap.mmap, info: TensorInfo, ranges: Ranges = ()) -> Tensor:
    """Return a tensor or a slice of it as a view of the file. The mapping lives as long as the tensor."""
    dtype = DTYPES[info.dtype]
    if not info.nbytes:
        return cut(torch.empty(info.shape, dtype=dtype), ranges)
    raw = torch.frombuffer(data, dtype=torch.uint8, count=info.nbytes, offset=info.offset)
    if info.offset % dtype.itemsize == 0:
        return cut(raw.view(dtype).view(info.shape), ranges)
    unaligned = cut(raw.view(*info.shape, dtype.itemsize), ranges)
    return unaligned.clone(memory_format=torch.contiguous_format).view(dtype).squeeze(-1)


def _indexed(directory: Path, expected: set[str]) -> list[Path]:
    missing = sorted(name for name in expected if not (directory / name).is_file())
    if missing:
        raise ModelError(f"{directory}: {len(missing)} of {len(expected)} shards are missing: {', '.join(missing[:10])}")
    extra = sorted(path.name for path in directory.glob("model-*-of-*.safetensors") if path.name not in expected)
    if extra:
        raise ModelError(
            f"{directory}: {INDEX} does not list the shards {', '.join(extra[:10])}; remove those of another model"
        )
    return [directory / name for name in sorted(expected)]


def _check_complete(directory: Path, files: list[Path]) -> None:
    """Check that all shards exist; without an index, their names have the total number."""
    totals = {total for path in files if (total := _shard_total(path.name))}
    for total in totals:
        of_total = [path.name for path in files if _shard_total(path.name) == total]
        if len(totals) > 1 or len(of_total) != total:
            raise ModelError(f"{directory}: {len(of_total)} of {total} shards found: {', '.join(sorted(of_total)[:10])}")


def _shard_total(name: str) -> int | None:
    match = re.search(r"-\d+-of-(\d+)\.safetensors$", name)
    return int(match[1]) if match else None


BLOCKS, SCALES, GROUP = "_blocks", "_scales", 32


class MXFP4Source:
    """Tensors of a checkpoint whose experts are MXFP4, dequantized, and whose other tensors are floats."""

    def __init__(self, source: Source, dtype: torch.dtype) -> None:
        self._source, self._dtype = source, dtype
        self._stacks = [name.removesuffix(BLOCKS) for name in source.shapes if name.endswith(BLOCKS)]
        for name in self._stacks:
            blocks, scales = source.shapes[name + BLOCKS], source.shapes.get(name + SCALES)
            if len(blocks) != 4 or blocks[3] != GROUP // 2 or scales != blocks[:3]:
                found = "is missing" if scales is None else f"is {list(scales)}"
                raise ModelError(f"{name}{BLOCKS} is {list(blocks)} and {name}{SCALES} {found}: expected blocks of {GROUP}")

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        parts = {name + end for name in self._stacks for end in (BLOCKS, SCALES)}
        found = {name: shape for name, shape in self._source.shapes.items() if name not in parts}
        for name in self._stacks:
            experts, outputs, blocks, _ = self._source.shapes[name + BLOCKS]
            found[name] = (experts, blocks * GROUP, outputs)
        return found

    def read(self, slices: Collection[TensorSlice]) -> Iterator[tuple[TensorSlice, Tensor]]:
        yield from self._source.read([part for part in slices if part.name not in self._stacks])
        for part in slices:
            if part.name in self._stacks:
                yield part, cut(self._dequantize(part.name), part.ranges)

    def find_rows(self, name: str) -> QuantizedMatrix | None:
        return self._source.find_rows(name)

    def _dequantize(self, name: str) -> Tensor:
        """Dequantize one expert at a time: intermediate values need more memory."""
        read = self._source.read([TensorSlice(name + BLOCKS), TensorSlice(name + SCALES)])
        tensors = {part.name: tensor for part, tensor in read}
        blocks, scales = tensors[name + BLOCKS], tensors[name + SCALES]
        if bool((scales == 255).any()):
            raise ModelError(f"{name}{SCALES} has a scale of NaN; the checkpoint is damaged")
        out = torch.empty(self.shapes[name], dtype=self._dtype)
        for place, numbers, scale in zip(out, blocks.flatten(2), scales, strict=True):
            place.copy_(Float4("e2m1", GROUP, numbers, scale).dequantize().t())
        return out
