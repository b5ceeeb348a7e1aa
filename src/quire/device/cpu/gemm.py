"""Products with float32 matrices, repacked once instead of at every product: by OpenVINO, or for kernels of our own."""

from torch import Tensor

from quire.device.cpu import tiles
from quire.device.cpu.graph import Graph, Runtime
from quire.device.cpu.session import KEPT_OF_PRODUCT, Session


def emit(graph: Graph, x: str, weight: Tensor, bias: Tensor | None, parts: int = 1) -> list[str]:
    """Adds the product to a graph; x is [T, K], weight [N, K], the result [T, N], in equal parts of its columns."""
    if graph.runtime is Runtime.OWN:
        y = tiles.emit(graph, x, tiles.lay_out_floats(weight, bias))
        return [y] if parts == 1 else graph.add("Split", [y], outputs=parts, axis=1, num_outputs=parts)
    added = [None] * parts if bias is None else bias.detach().chunk(parts)
    names = []
    for some, constant in zip(weight.detach().chunk(parts), added, strict=True):  # to cut the whole would cost more
        inputs = [x, graph.lend(some.numpy())]
        if constant is not None:
            inputs.append(graph.constant(constant.numpy()))
        names += graph.add("Gemm", inputs, transB=1)
    return names


class Gemm:
    """x [T, K] -> [T, N]."""

    def __init__(self, weight: Tensor, bias: Tensor | None, runtime: Runtime) -> None:
        graph, x = Graph(runtime), "x"
        [y] = emit(graph, x, weight, bias)
        self._session = Session(graph, [(x, weight.shape[1])], [(y, weight.shape[0])], kept=KEPT_OF_PRODUCT)

    def __call__(self, x: Tensor) -> Tensor:
        return self._session.run(x)[0]
