"""GEMM of many tokens with GGUF matrices: dequantized a slab at a time and multiplied as bfloat16, where the CPU is fast at it.
`device/cpu/autotune.py` measures from how many tokens on.

4-bit values are dequantized by torch's operator for quantized embedding tables, whose rows are like a block: 32 values, a scale
and an offset. That operator takes the two values of a byte as neighbours, but in a GGUF block the second is 16 further on, so
the inputs are reordered instead.

Other types take a long sequence of small operations, so each thread runs all of them on its own columns: torch's own threads
would synchronize after every operation.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from threading import Barrier
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.blocks import GROUP, NIBBLE_ROW, BlockMatrix, cut, dequantize_columns, fill_nibble_rows, has_nibble_rows

SLAB_ELEMENTS = 1 << 21
MANY_ROWS, ROW_STEP, LONG_ROW_STEP = 512, 64, 256


def dequantized_linear(x: Tensor, parts: Sequence[BlockMatrix], bias: Tensor | None) -> Tensor:
    """Return x [T, K] float32 times the matrix [N, K], given as parts stacked along the outputs -> [T, N] float32."""
    count, inputs, outputs = len(x), x.shape[1], max(1, SLAB_ELEMENTS // x.shape[1])
    x = F.pad(x, (0, 0, 0, round_up(count) - count))
    out = x.new_empty(len(x), sum(map(len, parts)))
    quick = dequantizes_quickly(parts)
    x, dequantize = (_paired(x), _dequantize_nibbles) if quick else (x, _dequantize_others)
    with _bfloat16_products():
        for start in range(0, out.shape[1], outputs):
            stop = min(start + outputs, out.shape[1])
            torch.mm(x, dequantize(parts, start, stop, inputs), out=out[:, start:stop])
    for part in parts:
        part.forget()
    return out[:count] if bias is None else out[:count].add_(bias)


def round_up(rows: int) -> int:
    """Round up to one of few row counts: torch caches half a megabyte of code per row count and matrix shape."""
    step = ROW_STEP if rows <= MANY_ROWS else LONG_ROW_STEP
    return -(-rows // step) * step


def dequantizes_quickly(parts: Sequence[BlockMatrix]) -> bool:
    return all(map(has_nibble_rows, parts))


def _paired(x: Tensor) -> Tensor:
    """Reorder each 32 inputs: 0, 16, 1, 17, ... 15, 31."""
    first, second = x.view(len(x), -1, 2, GROUP // 2).unbind(2)
    return torch.complex(first, second).view(torch.float32).view(x.shape)


@contextmanager
def _bfloat16_products() -> Iterator[None]:
    """Let float32 GEMMs round their inputs to bfloat16 where the CPU is faster at that. Sums stay float32."""
    backend: Any = torch.backends.mkldnn
    settings = backend.matmul
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


def _dequantize_nibbles(parts: Sequence[BlockMatrix], start: int, stop: int, inputs: int) -> Tensor:
    """Return outputs start ... stop of the whole matrix, dequantized: [K, stop - start]."""
    groups = inputs // GROUP
    rows = _buffer(max(SLAB_ELEMENTS, inputs) // GROUP * NIBBLE_ROW, torch.uint8)[: (stop - start) * groups * NIBBLE_ROW]
    for part, low, high, at in cut(parts, start, stop):
        first = (at - start) * groups
        fill_nibble_rows(part, low, high, rows.view(-1, NIBBLE_ROW)[first : first + (high - low) * groups])
    dequantized: Tensor = torch.ops.quantized.embedding_bag_4bit_unpack(rows.view(-1, NIBBLE_ROW))
    return dequantized.view(stop - start, inputs).t()


def _dequantize_others(parts: Sequence[BlockMatrix], start: int, stop: int, inputs: int) -> Tensor:
    """Return the same for other types; each thread dequantizes a share."""
    slab = _buffer(max(SLAB_ELEMENTS, inputs), torch.float32)[: inputs * (stop - start)].view(inputs, stop - start)
    threads = torch.get_num_threads()
    share = -(-(stop - start) // threads)

    def work(begin: int) -> None:
        with torch.inference_mode():
            for part, low, high, at in cut(parts, begin, min(begin + share, stop)):
                dequantize_columns(part, low, high, slab[:, at - start : at - start + high - low])

    if threads == 1:
        work(start)
    else:
        list(_pool(threads).map(work, range(start, stop, share)))
    return slab


@cache
def _buffer(size: int, dtype: torch.dtype) -> Tensor:
    """Return memory that every slab reuses."""
    return torch.empty(size, dtype=dtype)


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Return threads that use no further torch threads.

    torch applies the latest set_num_threads to threads that start later, so it is set back afterwards.
    """
    pool = ThreadPoolExecutor(threads, "dequantize", initializer=torch.set_num_threads, initargs=(1,))
    all_started = Barrier(threads)
    list(pool.map(lambda _: all_started.wait(), range(threads)))
    torch.set_num_threads(threads)
    return pool
