"""Products of many rows with matrices in a GGUF file's blocks: a matrix is dequantized, a slab at a time, and multiplied as
bfloat16. Worth it where the CPU does that well; `ops/choice.py` finds out from how many rows on.

4-bit numbers are dequantized by torch's own operator for tables of embeddings, whose rows are like a block: 32 numbers, a scale
and an offset. It takes the two numbers of a byte for neighbours, where in a file the second is 16 further on, so the
inputs of a product change places instead.

Other types take a long row of small operations, so each thread has columns of its own and goes through all of them alone:
torch's threads would wait for each other after every one.
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
MANY, STEP, LONG_STEP = 512, 64, 256  # rows


def dequantized_linear(x: Tensor, parts: Sequence[BlockMatrix], bias: Tensor | None) -> Tensor:
    """x [T, K] float32, parts of the matrix [N, K] above each other -> [T, N] float32."""
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
    """Few numbers of rows, for torch keeps half a megabyte of code for each with each shape of a matrix."""
    step = STEP if rows <= MANY else LONG_STEP
    return -(-rows // step) * step


def dequantizes_quickly(parts: Sequence[BlockMatrix]) -> bool:
    return all(map(has_nibble_rows, parts))


def _paired(x: Tensor) -> Tensor:
    """Of each 32 numbers: 0, 16, 1, 17, ... 15, 31."""
    first, second = x.view(len(x), -1, 2, GROUP // 2).unbind(2)
    return torch.complex(first, second).view(torch.float32).view(x.shape)


@contextmanager
def _bfloat16_products() -> Iterator[None]:
    """Products of float32 round their factors to bfloat16, where the CPU multiplies that faster. Sums stay float32."""
    backend: Any = torch.backends.mkldnn
    settings = backend.matmul
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


def _dequantize_nibbles(parts: Sequence[BlockMatrix], start: int, stop: int, inputs: int) -> Tensor:
    """Outputs start ... stop of the whole matrix: [K, stop - start]."""
    groups = inputs // GROUP
    rows = _buffer(max(SLAB_ELEMENTS, inputs) // GROUP * NIBBLE_ROW, torch.uint8)[: (stop - start) * groups * NIBBLE_ROW]
    for part, low, high, at in cut(parts, start, stop):
        first = (at - start) * groups
        fill_nibble_rows(part, low, high, rows.view(-1, NIBBLE_ROW)[first : first + (high - low) * groups])
    dequantized: Tensor = torch.ops.quantized.embedding_bag_4bit_unpack(rows.view(-1, NIBBLE_ROW))
    return dequantized.view(stop - start, inputs).t()


def _dequantize_others(parts: Sequence[BlockMatrix], start: int, stop: int, inputs: int) -> Tensor:
    """As above, a share for each thread."""
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
    """Memory that the next slab takes over."""
    return torch.empty(size, dtype=dtype)


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Threads within which torch uses no others. torch passes the latest number on to threads that come later, so it is told
    the old one again."""
    pool = ThreadPoolExecutor(threads, "dequantize", initializer=torch.set_num_threads, initargs=(1,))
    everyone = Barrier(threads)
    list(pool.map(lambda _: everyone.wait(), range(threads)))
    torch.set_num_threads(threads)
    return pool
