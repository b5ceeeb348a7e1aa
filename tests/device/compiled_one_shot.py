"""Compile the one-shot kernel for GPUs, without one: `python compiled_one_shot.py`. Prints what each variant does to memory."""

import json

from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from quire.ops.kernels.one_shot import PROGRAMS, TILE_BYTES, VECTOR_BYTES, _one_shot

TYPES = {"bf16": 2, "fp16": 2, "fp32": 4, "u8": 1}
KERNEL = getattr(_one_shot, "kernel", _one_shot)


def operations(dtype: str, ranks: int, adds: bool) -> list[str]:
    size = TYPES[dtype]
    constants = {
        "RANK": 1, "RANKS": ranks, "SUM": adds, "TILE": TILE_BYTES // size, "VECTOR": VECTOR_BYTES // size,
        "PROGRAMS": PROGRAMS,
    }  # fmt: skip
    signature = {"x": f"*{dtype}", "out": f"*{dtype}", "turns": "*i64", "addresses": "*i64", "vectors": "i32"}
    aligned = {(argument,): [["tt.divisibility", 16]] for argument in range(4)}
    source = ASTSource(KERNEL, signature | dict.fromkeys(constants, "constexpr"), constants, aligned)
    code = compile_kernel(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ptx"]
    words = [word for line in code.splitlines() for word in line.split()]
    return [word for word in words if word.startswith(("ld.global", "st.global", "atom", "bar.sync"))]


def main() -> None:
    found = {
        f"{dtype} {ranks} {adds}": operations(dtype, ranks, adds)
        for dtype, ranks, adds in (("bf16", 2, True), ("fp32", 3, True), ("fp16", 2, True), ("u8", 2, False))
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
