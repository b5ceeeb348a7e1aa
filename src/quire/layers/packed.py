"""A head on a CPU whose matrix of float32 was packed in an order of the runtime's."""

from collections.abc import Mapping

from torch import Tensor

from quire.layers.embedding import Head
from quire.ops.gemm import Gemm
from quire.ops.onnx import Runtime


class PackedHead:
    """It holds what it needs of the matrix, and the head none of its own."""

    def __init__(self, head: Head, runtime: Runtime) -> None:
        self._product = Gemm(head.matrix(), head.bias, runtime)

    def shapes(self, vocab_size: int, hidden_size: int) -> Mapping[str, tuple[int, ...]]:  # noqa: ARG002
        return {}

    def apply(self, layer: Head, hidden: Tensor) -> Tensor:  # noqa: ARG002
        return self._product(hidden)
