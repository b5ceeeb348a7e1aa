"""Products with float32 matrices, repacked once instead of at every product: by ONNX Runtime, or for kernels of our own."""

from functools import cache

import numpy as np
import torch
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

    def __init__(self, weight: Tensor, bias: Tensor | None, runtime: Runtime, hold: bool | None = None) -> None:
        graph, x = Graph(runtime), "x"
        [y] = emit(graph, x, weight, bias)
        hold = not forgets(runtime) if hold is None else hold
        self._session = Session(graph, [(x, weight.shape[1])], [(y, weight.shape[0])], hold=hold, kept=KEPT_OF_PRODUCT)

    def __call__(self, x: Tensor) -> Tensor:
        return self._session.run(x)[0]


@cache
def forgets(runtime: Runtime = Runtime.ONNX) -> bool:
    """Does the runtime, on this machine, never look again at a matrix it was lent? Tried on a small one, by changing it."""
    if runtime is Runtime.OWN:
        return True
    weight = torch.from_numpy(np.random.default_rng(0).random((96, 128), np.float32))
    product, some = Gemm(weight, None, runtime, hold=True), [torch.ones(rows, 128) for rows in (1, 40)]
    before = [product(x).clone() for x in some]
    weight.zero_()
    return all(torch.equal(product(x), was) for x, was in zip(some, before, strict=True))
