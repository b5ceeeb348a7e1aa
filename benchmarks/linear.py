"""The matrix products of a step of few rows: quire.ops.linear against torch alone, on one GPU.

    python benchmarks/linear.py [--rows 1 2 8 16] [--shapes 1024x4096 4096x28672:gated ...]

Shapes are inputs x outputs. Each product reads another matrix than the one before, so none is in the cache; the launches of
a round are one CUDA graph. Prints microseconds a product, and the terabytes of weights read per second.
"""

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.activation import gated
from quire.ops.linear import few_rows_config, gated_linear, linear, streams

SHAPES = {
    "Qwen3-0.6B": ("1024x4096", "2048x1024", "1024x6144:gated", "3072x1024"),
    "Llama-3.1-8B": ("4096x6144", "4096x4096", "4096x28672:gated", "14336x4096"),
    "Qwen3-30B-A3B": ("2048x5120", "4096x2048", "2048x128"),
}
COLD_BYTES = 400_000_000
ROUNDS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 2, 8, 16])
    parser.add_argument("--shapes", nargs="*", default=[shape for shapes in SHAPES.values() for shape in shapes])
    options = parser.parse_args()
    print(f"{'shape':<20}{'rows':>5}{'torch us':>10}{'quire us':>10}{'TB/s':>7}  way")
    for shape in options.shapes:
        sizes, _, kind = shape.partition(":")
        inputs, outputs = (int(size) for size in sizes.split("x"))
        size = inputs * outputs * 2  # bytes
        matrices = [
            torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16)
            for _ in range(min(64, max(4, COLD_BYTES // size)))
        ]
        for rows in options.rows:
            x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
            torchs = time(lambda w, x=x, kind=kind: gated(F.linear(x, w), "silu") if kind else F.linear(x, w), matrices)
            ours = time(lambda w, x=x, kind=kind: gated_linear(x, w, None, "silu") if kind else linear(x, w), matrices)
            few = few_rows_config(x, matrices[0])
            way = "torch" if few is None and not streams(x, matrices[0]) else "streamed" if few is None else str(few)
            print(f"{shape:<20}{rows:>5}{torchs:>10.2f}{ours:>10.2f}{size / ours / 1e6:>7.2f}  {way}", flush=True)


def time(product: Callable[[Tensor], Tensor], matrices: list[Tensor]) -> float:
    """Microseconds a product."""
    product(matrices[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for matrix in matrices:
            product(matrix)
    graph.replay()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    for _ in range(ROUNDS):
        graph.replay()
    ended.record()
    torch.cuda.synchronize()
    return 1000 * began.elapsed_time(ended) / ROUNDS / len(matrices)


if __name__ == "__main__":
    main()
