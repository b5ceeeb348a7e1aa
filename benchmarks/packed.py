"""Products with matrices of few bits against bfloat16's, on one GPU: quire.ops.packed and quire.ops.linear.

    python benchmarks/packed.py [--copies] [--forms int4 fp8 ...] [--rows 1 16 ...] [--shapes 4096x6144 4096x28672:gated ...]

Shapes are inputs x outputs. Each product reads another matrix than the one before, so none is in the cache; the launches of a
round are one CUDA graph. Prints microseconds a product, and how many times as fast as in bfloat16. With --copies, forms that
can have a copy in bfloat16 beside them have a second line: with it, for as many rows as an engine uses it for.
"""

import argparse

import torch
from linear import COLD_BYTES, SHAPES, time

from quire.ops.linear import gated_linear, linear
from quire.ops.packed import pack
from quire.ops.quantized import can_be_copied, copied
from quire.ops.quantized_layouts import Activation, Float4, Float8, Int8, PackedInts


def some(outputs: int, size: int) -> torch.Tensor:
    return torch.randint(0, 256, (outputs, size), dtype=torch.uint8, device="cuda")


def scales(outputs: int, count: int) -> torch.Tensor:
    return torch.rand(outputs, count, device="cuda") * 0.01 + 0.001


def numbers(outputs: int, inputs: int) -> torch.Tensor:
    return torch.randn(outputs, inputs, device="cuda").to(torch.float8_e4m3fn)


FORMS = {
    "int4": lambda n, k: PackedInts(4, 128, some(n, k // 2), scales(n, k // 128).bfloat16(), None, None),
    "int4 zeros": lambda n, k: PackedInts(4, 128, some(n, k // 2), scales(n, k // 128).half(), some(n, k // 128) & 15, None),
    "int8": lambda n, k: PackedInts(8, 128, some(n, k), scales(n, k // 128).bfloat16(), None, None),
    "w8a8": lambda n, k: Int8(some(n, k).view(torch.int8), scales(n, 1)),
    "fp8": lambda n, k: Float8(1, k, numbers(n, k), scales(n, 1), Activation.TOKEN),
    "fp8 blocks": lambda n, k: Float8(128, 128, numbers(n, k), scales(n // 128, k // 128), Activation.GROUP),
    "nvfp4": lambda n, k: Float4("e2m1", 16, some(n, k // 2), scales(n, k // 16).to(torch.float8_e4m3fn), scales(n, 1)),
    "q4_k": lambda n, k: PackedInts(
        4, 32, some(n, k // 2), scales(n, k // 32).half(), torch.rand(n, k // 32, device="cuda") * 15, None
    ),
    "q5_k": lambda n, k: PackedInts(
        8, 32, some(n, k) % 32 + 112, scales(n, k // 32).half(), torch.rand(n, k // 32, device="cuda") * 31 + 112, None
    ),
    "q6_k": lambda n, k: PackedInts(8, 16, some(n, k) % 64 + 96, scales(n, k // 16).half(), None, None),
    "mxfp4": lambda n, k: Float4("e2m1", 32, some(n, k // 2), some(n, k // 32) % 8 + 120),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", nargs="*", default=list(FORMS), choices=list(FORMS))
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4, 16, 64, 256, 1024, 16384])
    parser.add_argument("--shapes", nargs="*", default=SHAPES["Llama-3.1-8B"])
    parser.add_argument("--copies", action="store_true")
    options = parser.parse_args()
    print(
        f"{'form':<18}{'shape':<20}"
        + "".join(f"{rows:>16}" for rows in options.rows)
        + "   rows: us (times as fast as bfloat16)"
    )
    for shape in options.shapes:
        sizes, _, gate = shape.partition(":")
        inputs, outputs = (int(size) for size in sizes.split("x"))
        size = inputs * outputs * 2
        floats = [torch.randn(outputs, inputs, device="cuda").bfloat16() for _ in range(max(3, COLD_BYTES // size))]
        rows_of = {rows: torch.randn(rows, inputs, device="cuda").bfloat16() for rows in options.rows}
        plain = {
            rows: time(lambda w, x=x, gate=gate: gated_linear(x, w, None, "silu") if gate else linear(x, w), floats)
            for rows, x in rows_of.items()
        }
        print(f"{'bfloat16':<18}{shape:<20}" + "".join(f"{us:>16.1f}" for us in plain.values()), flush=True)
        for name in options.forms:
            matrices = [pack(FORMS[name](outputs, inputs)) for _ in range(max(6, 4 * COLD_BYTES // size))]
            measure(name, shape, matrices, rows_of, plain, "silu" if gate else "")
            if options.copies and can_be_copied(matrices[0]):
                matrices = [copied(matrix, torch.bfloat16) for matrix in matrices]
                measure(f"  copied from {matrices[0].copied_from}", shape, matrices, rows_of, plain, "silu" if gate else "")


def measure(name, shape, matrices, rows_of, plain, activation):
    found = {rows: time(lambda m, x=x: m.multiply(x, None, activation), matrices) for rows, x in rows_of.items()}
    cells = (f"{us:.1f} ({plain[rows] / us:.2f})" for rows, us in found.items())
    print(f"{name:<18}{shape:<20}" + "".join(f"{cell:>16}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
