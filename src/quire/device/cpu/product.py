"""Products with matrices in a GGUF file's blocks, repacked for whoever runs them."""

from collections.abc import Sequence

from torch import Tensor

from quire.device.cpu import nbits, tiles
from quire.device.cpu.graph import Graph, Runtime
from quire.device.cpu.nbits import Packed, pack
from quire.device.cpu.session import KEPT_ELEMENTS, Session
from quire.device.cpu.tiles import Tiles, lay_out
from quire.ops.blocks import BlockMatrix

Repacked = Packed | Tiles


def repack(stored: Sequence[BlockMatrix], bias: Tensor | None, runtime: Runtime) -> Repacked:
    """One matrix of matrices above each other."""
    return lay_out(stored, bias) if runtime is Runtime.OWN else pack(stored, bias)


def emit(graph: Graph, x: str, matrix: Repacked) -> str:
    """Adds the product to a graph, which takes the matrix over; x is [T, K], the result [T, N]."""
    return tiles.emit(graph, x, matrix) if isinstance(matrix, Tiles) else nbits.emit(graph, x, matrix)


class Product:
    """x [T, K] -> [T, N]."""

    def __init__(self, matrix: Repacked, runtime: Runtime, kept: int = KEPT_ELEMENTS) -> None:
        """`kept`: see `Session`."""
        graph, x = Graph(runtime), "x"
        y = emit(graph, x, matrix)
        self._session = Session(graph, [(x, matrix.inputs)], [(y, matrix.outputs)], kept=kept)

    def __call__(self, x: Tensor) -> Tensor:
        return self._session.run(x)[0]

    def keeps_numbers(self) -> bool:
        return self._session.keeps_numbers()
