"""Weights from safetensors files: one, or shards with an index. Files are mapped: a tensor is read when it is used."""

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
BEHIND = 256 << 20  # bytes that were read and may stay in memory
DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "C64": torch.complex64,
}  # fmt: skip

FLOATS = ("F32", "F16", "BF16")  # which GGUF's types have under the same names
GGML_NUMBERS = {name: number for number, (name, _, _) in GGML_TYPES.items() if name in FLOATS}


class SafetensorsSource:
    """`files`: the weight files found beside the configuration in `directory`; `indexed`: an index there is about them."""

    def __init__(self, directory: Path, files: tuple[Path, ...], indexed: bool = True) -> None:
        index = directory / INDEX
        self.directory = directory
        self.index = read_index(index) if indexed and index.is_file() else None
        shards = [path for path in files if path.suffix == ".safetensors"]
        if self.index is not None:
            shards = _indexed(directory, set(self.index.values()))
        elif not shards:
            raise ModelError(f"{directory}: there are no .safetensors files")
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
                raise ModelError(f"{self.index[name]} lacks {name!r}, which {INDEX} promises ({len(absent)} such tensors)")
        return found

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        return {name: info for name, (_, info) in self._found.items()}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: info.shape for name, (_, info) in self._found.items()}

    def read(self, slices: Collection[TensorSlice]) -> Iterator[tuple[TensorSlice, Tensor]]:
        """In file order, so that the disk is read from front to back. What was read is let go of; it can be read again."""
        wanted: dict[Path, list[tuple[int, TensorSlice]]] = defaultdict(list)
        for part in slices:
            path, info = self._found[part.name]
            if info.dtype not in DTYPES:
                raise ModelError(f"{path}: tensor {part.name!r} is stored as {info.dtype}, which cannot be read")
            wanted[path].append((info.offset, part))
        for path in self.files:
            here = sorted(wanted[path], key=lambda entry: (entry[0], entry[1].ranges))
            if not here:
                continue
            data, let_go = map_file(path, ahead=not any(part.ranges for _, part in here)), 0
            for offset, part in here:
                if offset - let_go > BEHIND:
                    behind = (offset - let_go) // mmap.PAGESIZE * mmap.PAGESIZE
                    data.madvise(mmap.MADV_DONTNEED, let_go, behind)
                    let_go += behind
                yield part, _view(data, self._found[part.name][1], part.ranges)

    def find_rows(self, name: str) -> QuantizedMatrix | None:
        path, info = self._found[name]
        if len(info.shape) != 2 or not info.nbytes or info.dtype not in FLOATS:
            return None
        data = map_file(path)
        raw = torch.frombuffer(data, dtype=torch.uint8, count=info.nbytes, offset=info.offset)
        return QuantizedMatrix(GGML_NUMBERS[info.dtype], info.shape[1], raw.view(info.shape[0], -1), None, data, info.offset)


def _view(data: mmap.mmap, info: TensorInfo, ranges: Ranges = ()) -> Tensor:
    """The tensor, or a slice of it, where it lies in the file. The mapping lives as long as a tensor does."""
    dtype = DTYPES[info.dtype]
    if not info.nbytes:
        return cut(torch.empty(info.shape, dtype=dtype), ranges)
    raw = torch.frombuffer(data, dtype=torch.uint8, count=info.nbytes, offset=info.offset)
    if info.offset % dtype.itemsize == 0:
        return cut(raw.view(dtype).view(info.shape), ranges)
    askew = cut(raw.view(*info.shape, dtype.itemsize), ranges)
    return askew.clone(memory_format=torch.contiguous_format).view(dtype).squeeze(-1)


def _indexed(directory: Path, wanted: set[str]) -> list[Path]:
    missing = sorted(name for name in wanted if not (directory / name).is_file())
    if missing:
        raise ModelError(f"{directory}: {len(missing)} of {len(wanted)} shards are missing: {', '.join(missing[:10])}")
    extra = sorted(path.name for path in directory.glob("model-*-of-*.safetensors") if path.name not in wanted)
    if extra:
        raise ModelError(f"{directory}: {INDEX} does not know the shards {', '.join(extra[:10])}; are they of another model?")
    return [directory / name for name in sorted(wanted)]


def _check_complete(directory: Path, files: list[Path]) -> None:
    """Without an index, the shards' own numbering says how many there must be."""
    totals = {total for path in files if (total := _shard_total(path.name))}
    for total in totals:
        of_total = [path.name for path in files if _shard_total(path.name) == total]
        if len(totals) > 1 or len(of_total) != total:
            raise ModelError(f"{directory}: {len(of_total)} of {total} shards are there: {', '.join(sorted(of_total)[:10])}")


def _shard_total(name: str) -> int | None:
    match = re.search(r"-\d+-of-(\d+)\.safetensors$", name)
    return int(match[1]) if match else None


BLOCKS, SCALES, GROUP = "_blocks", "_scales", 32


class MXFP4Source:
    """Of a checkpoint whose other tensors are floats."""

    def __init__(self, source: Source, dtype: torch.dtype) -> None:
        self._source, self._dtype = source, dtype
        self._stacks = [name.removesuffix(BLOCKS) for name in source.shapes if name.endswith(BLOCKS)]
        for name in self._stacks:
            blocks, scales = source.shapes[name + BLOCKS], source.shapes.get(name + SCALES)
            if len(blocks) != 4 or blocks[3] != GROUP // 2 or scales != blocks[:3]:
                found = "is missing" if scales is None else f"is {list(scales)}"
                raise ModelError(
                    f"{name}{BLOCKS} is {list(blocks)} and {name}{SCALES} {found}: these are not blocks of {GROUP}"
                )

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
        """An expert at a time: on the way numbers take more room."""
        read = self._source.read([TensorSlice(name + BLOCKS), TensorSlice(name + SCALES)])
        tensors = {part.name: tensor for part, tensor in read}
        blocks, scales = tensors[name + BLOCKS], tensors[name + SCALES]
        if bool((scales == 255).any()):
            raise ModelError(f"{name}{SCALES} has a scale of NaN; the checkpoint is damaged")
        out = torch.empty(self.shapes[name], dtype=self._dtype)
        for place, numbers, scale in zip(out, blocks.flatten(2), scales, strict=True):
            place.copy_(Float4("e2m1", GROUP, numbers, scale).dequantize().t())
        return out
