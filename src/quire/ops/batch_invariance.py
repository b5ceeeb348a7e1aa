"""Find out which GEMMs and experts give a token the same bits in any batch on this GPU, and how long they take.

A case is a GEMM of one weight format and shape. It runs for many row counts with the same first rows; a row count agrees if its
first rows are bit-identical to those of the largest count. A time is the mean of launches over several copies of the matrix, so
that weights come from memory and not from the L2 cache.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire.ops.linear import gated_linear, linear, linear_float
from quire.ops.moe import experts_forward
from quire.ops.packed import PackedMatrix, pack
from quire.ops.quantized_layouts import Activation, Float4, Float8, Int8, PackedInts

ROWS = (
    1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 20, 24, 31, 32, 33, 40, 48, 63, 64, 65, 80, 96, 127, 128, 129, 192, 200, 255, 256,
    257, 384, 512, 513, 768, 1000, 1024, 2047, 2048, 4096, 8191, 16384,
)  # fmt: skip
TIMED_ROWS = (1, 16, 64, 256, 2048)
COMPARED_ROWS = 16
MAX_COPIES, MAX_COPIED_VALUES = 48, 100_000_000  # of a matrix that is timed; values of all copies together
TIMED_LAUNCHES = 10
# inputs and outputs of the layers
SHAPES = {
    "0.6B": {"qkv": (1024, 4096), "o": (2048, 1024), "gate-up": (1024, 6144), "down": (3072, 1024)},
    "8B": {"qkv": (4096, 6144), "o": (4096, 4096), "gate-up": (4096, 28672), "down": (14336, 4096)},
    "30B-A3B": {"qkv": (2048, 5120), "o": (4096, 2048), "router": (2048, 128)},
}
FLOATS = {"bf16": torch.bfloat16, "fp16": torch.float16}
EXPERTS = {"30B-A3B": (128, 8, 2048, 768)}  # experts, active ones, hidden size, intermediate size
Make = Callable[[int, int], Any]


def _bytes(outputs: int, size: int) -> Tensor:
    return torch.randint(0, 256, (outputs, size), dtype=torch.uint8, device="cuda")


def _scales(outputs: int, count: int) -> Tensor:
    return torch.rand(outputs, count, device="cuda") * 0.01 + 0.001


def _float8(outputs: int, inputs: int) -> Tensor:
    return torch.randn(outputs, inputs, device="cuda").to(torch.float8_e4m3fn)


FORMATS: dict[str, Make] = {
    "bf16": lambda n, k: (torch.randn(n, k, device="cuda") / k**0.5).bfloat16(),
    "fp16": lambda n, k: (torch.randn(n, k, device="cuda") / k**0.5).half(),
    "int4": lambda n, k: PackedInts(4, 128, _bytes(n, k // 2), _scales(n, k // 128).bfloat16(), None, None),
    "int4 zeros": lambda n, k: PackedInts(
        4, 128, _bytes(n, k // 2), _scales(n, k // 128).half(), _bytes(n, k // 128) & 15, None
    ),
    "int4 channel": lambda n, k: PackedInts(4, k, _bytes(n, k // 2), _scales(n, 1).half(), None, None),
    "int8": lambda n, k: PackedInts(8, 128, _bytes(n, k), _scales(n, k // 128).bfloat16(), None, None),
    "w8a8": lambda n, k: Int8(_bytes(n, k).view(torch.int8), _scales(n, 1)),
    "fp8": lambda n, k: Float8(1, k, _float8(n, k), _scales(n, 1), Activation.TOKEN),
    "fp8 weights": lambda n, k: Float8(1, k, _float8(n, k), _scales(n, 1), Activation.NONE),
    "fp8 blocks": lambda n, k: Float8(128, 128, _float8(n, k), _scales(n // 128, k // 128), Activation.GROUP),
    "nvfp4": lambda n, k: Float4("e2m1", 16, _bytes(n, k // 2), _scales(n, k // 16).to(torch.float8_e4m3fn), _scales(n, 1)),
    "mxfp4": lambda n, k: Float4("e2m1", 32, _bytes(n, k // 2), _bytes(n, k // 32) % 8 + 120),
    "q4_k": lambda n, k: PackedInts(
        4, 32, _bytes(n, k // 2), _scales(n, k // 32).half(), torch.rand(n, k // 32, device="cuda") * 15, None
    ),
    "q5_k": lambda n, k: PackedInts(
        8, 32, _bytes(n, k) % 32 + 112, _scales(n, k // 32).half(), 128 - torch.rand(n, k // 32, device="cuda") * 15, None
    ),
    "q6_k": lambda n, k: PackedInts(8, 16, _bytes(n, k) % 64 + 96, _scales(n, k // 16).half(), None, None),
}


@dataclass(frozen=True)
class Case:
    model: str
    layer: str
    format: str
    make: Callable[[], Any]
    run: Callable[[Tensor, Any], Tensor]
    inputs: int
    dtype: torch.dtype
    values: int  # weights that are read for one token

    @property
    def name(self) -> str:
        return f"{self.model} {self.layer} {self.format}"


@dataclass(frozen=True)
class Finding:
    case: Case
    differing: tuple[int, ...]  # row counts
    times_us: dict[int, float]  # by row count


def cases(formats: Sequence[str], models: Sequence[str]) -> Iterator[Case]:
    for model in models:
        for layer, (inputs, outputs) in SHAPES[model].items():
            run = multiply_gated if layer == "gate-up" else linear_float if layer == "router" else multiply
            for name in formats if layer != "router" else [name for name in formats if name in FLOATS]:
                make = partial(make_weight, name, outputs, inputs)
                yield Case(model, layer, name, make, run, inputs, FLOATS.get(name, torch.bfloat16), inputs * outputs)
        if model in EXPERTS and "bf16" in formats:
            count, active, hidden, wide = EXPERTS[model]
            make, run = partial(make_experts, count, hidden, wide), partial(run_experts, active=active)
            yield Case(model, "experts", "bf16", make, run, hidden, torch.bfloat16, 3 * hidden * wide * active)


def make_weight(name: str, outputs: int, inputs: int) -> Any:
    made = FORMATS[name](outputs, inputs)
    return made if isinstance(made, Tensor) else pack(made)


def make_experts(count: int, hidden: int, wide: int) -> Any:
    up = torch.randn(count, 2 * wide, hidden, device="cuda", dtype=torch.bfloat16) / hidden**0.5
    down = torch.randn(count, hidden, wide, device="cuda", dtype=torch.bfloat16) / wide**0.5
    return up, down


def run_experts(x: Tensor, weights: Any, active: int) -> Tensor:
    up, down = weights
    ids = (torch.arange(len(x) * active, device="cuda") * 37 % len(up)).view(len(x), active)
    share = torch.full((len(x), active), 1 / active, device="cuda")
    return experts_forward(x, share, ids, up, down, "silu")


def multiply(x: Tensor, weight: Any) -> Tensor:
    return weight.multiply(x, None) if isinstance(weight, PackedMatrix) else linear(x, weight)


def multiply_gated(x: Tensor, weight: Any) -> Tensor:
    if isinstance(weight, PackedMatrix):
        return weight.multiply(x, None, "silu")
    return gated_linear(x, weight, None, "silu")


@torch.inference_mode()
def examine(case: Case, rows: Sequence[int] = ROWS, timed: Sequence[int] = TIMED_ROWS) -> Finding:
    """Compare the bits of all row counts, and measure some."""
    torch.manual_seed(0)
    weight = case.make()
    x = torch.randn(max(rows), case.inputs, device="cuda").to(case.dtype)
    expected = case.run(x, weight)[:COMPARED_ROWS]
    differing = tuple(n for n in rows if not torch.equal(case.run(x[:n].contiguous(), weight)[:COMPARED_ROWS], expected[:n]))
    copies = [weight, *(case.make() for _ in range(min(MAX_COPIES, MAX_COPIED_VALUES // case.values)))] if timed else []
    return Finding(case, differing, {n: _measure_us(case, x[:n].contiguous(), copies) for n in timed})


def _measure_us(case: Case, x: Tensor, weights: Sequence[Any]) -> float:
    """Return the mean time of a launch that reads another copy of the matrix each time."""
    case.run(x, weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            case.run(x, weight)
    graph.replay()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    began.record()
    for _ in range(TIMED_LAUNCHES):
        graph.replay()
    ended.record()
    torch.cuda.synchronize()
    return float(1000 * began.elapsed_time(ended) / TIMED_LAUNCHES / len(weights))
