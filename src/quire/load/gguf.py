"""Read weights from GGUF files under Hugging Face's names: dequantized, or as stored blocks where a layer supports them."""

import mmap
import os
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.config.families import find_gguf
from quire.config.gguf import join_headers
from quire.files.gguf import GGML_TYPES, GGUFTensor, read_gguf_shards
from quire.layers.parameter import Ranges
from quire.load.gguf_names import Name, hf_names
from quire.load.source import TensorSlice, cut, map_file
from quire.ops.blocks import QuantizedMatrix, dequantize
from quire.types.errors import ModelError

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts

WORKERS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True)
class Piece:
    """One Hugging Face tensor and the bytes it is made of."""

    name: Name
    path: Path
    type: int  # ggml type
    offset: int
    nbytes: int
    stored: tuple[int, ...]  # shape in the file

    @property
    def shape(self) -> tuple[int, ...]:
        if self.name.shape is not None:
            return self.name.shape
        return self.stored[::-1] if self.name.transposed else self.stored

    @property
    def in_rows(self) -> bool:
        """Whether it is a matrix whose rows are stored whole, in the same or another order."""
        name = self.name
        return len(self.stored) == 2 and not name.transposed and name.shape is None and name.values is None


class GGUFSource:
    def __init__(self, facts: "ModelFacts") -> None:
        self._kept: frozenset[str] = frozenset()
        self._files: dict[Path, mmap.mmap] = {}
        headers = read_gguf_shards(facts.files.weights)
        _, row = find_gguf(join_headers(headers))
        self.pieces: dict[str, Piece] = {}
        for header in headers:
            for tensor in header.tensors.values():
                for name in hf_names(row, facts.hf, tensor.name, tensor.shape):
                    if name.hf in self.pieces:
                        raise ModelError(f"{header.path}: {tensor.name!r} is a second {name.hf!r}")
                    self.pieces[name.hf] = _piece(header.path, tensor, name)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: piece.shape for name, piece in self.pieces.items() if name not in self._kept}

    @property
    def stored(self) -> Mapping[str, QuantizedMatrix]:
        """Return the matrices that are stored in quantized blocks along their rows."""
        return {
            name: self._stored(piece) for name, piece in self.pieces.items() if piece.in_rows and GGML_TYPES[piece.type][1] > 1
        }

    def keep(self, names: frozenset[str]) -> None:
        """Exclude matrices that layers use as stored."""
        self._kept = names

    def read(self, slices: Collection[TensorSlice]) -> Iterator[tuple[TensorSlice, Tensor]]:
        """Yield tensors in file order; up to WORKERS are dequantized ahead in threads."""
        found = [(self.pieces[part.name], part) for part in slices]
        found.sort(key=lambda entry: (entry[0].path, entry[0].offset, entry[1].ranges))
        ahead: deque[tuple[TensorSlice, Future[Tensor]]] = deque()
        with ThreadPoolExecutor(WORKERS, "dequantize") as pool:
            for piece, part in found:
                ahead.append((part, pool.submit(self._take, self._file(piece.path), piece, part.ranges)))
                if len(ahead) > WORKERS:
                    first, future = ahead.popleft()
                    yield first, future.result()
            for first, future in ahead:
                yield first, future.result()

    def find_rows(self, name: str) -> QuantizedMatrix | None:
        piece = self.pieces[name]
        return self._stored(piece) if piece.in_rows else None

    def _take(self, data: mmap.mmap, piece: Piece, ranges: Ranges) -> Tensor:
        if ranges and (piece.in_rows or (len(piece.stored) == 2 and piece.name.transposed)):
            return self._take_blocks(piece, ranges)
        raw = torch.frombuffer(data, dtype=torch.uint8, count=piece.nbytes, offset=piece.offset)
        tensor = dequantize(raw, piece.type, piece.stored)
        if piece.name.undo is not None:
            tensor = piece.name.undo(tensor)
        if piece.name.values is not None:
            tensor = piece.name.values(tensor)
        if piece.name.shape is not None:
            tensor = tensor.view(piece.name.shape)
        return cut(tensor.t() if piece.name.transposed else tensor, ranges)

    def _take_blocks(self, piece: Piece, ranges: Ranges) -> Tensor:
        """Dequantize only the blocks of a matrix that the slice is in."""
        (start, stop), (left, right) = ranges[::-1] if piece.name.transposed else ranges
        _, elements, nbytes = GGML_TYPES[piece.type]
        first, last = left // elements, -(-right // elements)
        blocks = self._stored(piece).read(start, stop)[:, first * nbytes : last * nbytes]
        values = dequantize(blocks.flatten(), piece.type, (stop - start, (last - first) * elements))
        tensor = values[:, left - first * elements : right - first * elements]
        return tensor.t() if piece.name.transposed else tensor

    def _stored(self, piece: Piece) -> QuantizedMatrix:
        file, (count, columns), undo = self._file(piece.path), piece.stored, piece.name.undo
        raw = torch.frombuffer(file, dtype=torch.uint8, count=piece.nbytes, offset=piece.offset)
        order = None if undo is None else undo(torch.arange(count))
        return QuantizedMatrix(piece.type, columns, raw.view(count, -1), order, file, piece.offset, piece.name.hf)

    def _file(self, path: Path) -> mmap.mmap:
        if path not in self._files:
            self._files[path] = map_file(path)
        return self._files[path]


def _piece(path: Path, tensor: GGUFTensor, name: Name) -> Piece:
    if name.expert is None:
        return Piece(name, path, tensor.type, tensor.offset, tensor.nbytes, tensor.shape)
    nbytes = tensor.nbytes // tensor.shape[0]
    return Piece(name, path, tensor.type, tensor.offset + name.expert * nbytes, nbytes, tensor.shape[1:])
