"""Products of many rows with matrices in a GGUF file's blocks: a matrix is unfolded to bfloat16, a slab at a time, into memory
that the next slab takes over. Worth it where the CPU multiplies bfloat16 well; `ops/choice.py` finds out from how many rows on.

Unfolding is a long row of small operations, so each thread takes columns of its own and goes through all of them alone: torch's
threads would wait for each other after every one.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Barrier

import torch
from torch import Tensor

from quire.ops.blocks import Stored, unfold_columns

SLAB_ELEMENTS = 1 << 21
ROWS = 512  # multiplied at once


def unfolded_linear(x: Tensor, parts: Sequence[Stored], bias: Tensor | None) -> Tensor:
    """x [T, K] float32, parts of the matrix [N, K] above each other -> [T, N] float32."""
    inputs, outputs = x.shape[1], max(1, SLAB_ELEMENTS // x.shape[1])
    out = x.new_empty(len(x), sum(map(len, parts)))
    narrow = x.to(torch.bfloat16)
    for start in range(0, out.shape[1], outputs):
        stop = min(start + outputs, out.shape[1])
        slab = _slab(max(SLAB_ELEMENTS, inputs))[: inputs * (stop - start)].view(inputs, stop - start)
        _unfold(parts, start, stop, slab)
        for row in range(0, len(x), ROWS):
            out[row : row + ROWS, start:stop] = narrow[row : row + ROWS] @ slab
    for part in parts:
        part.forget()
    return out if bias is None else out.add_(bias)


def _unfold(parts: Sequence[Stored], start: int, stop: int, slab: Tensor) -> None:
    """Outputs start ... stop of the whole matrix, a share for each thread."""
    threads = torch.get_num_threads()
    share = -(-(stop - start) // threads)

    def work(begin: int) -> None:
        with torch.inference_mode():
            for part, low, high, at in _cut(parts, begin, min(begin + share, stop)):
                unfold_columns(part, low, high, slab[:, at - start : at - start + high - low])

    begins = range(start, stop, share)
    if threads == 1:
        work(start)
    else:
        list(_pool(threads).map(work, begins))


def _cut(parts: Sequence[Stored], start: int, stop: int) -> Iterator[tuple[Stored, int, int, int]]:
    """Outputs start ... stop as rows of parts: part, its first row and the end, and which output the first row is."""
    first = 0
    for part in parts:
        low, high = max(start, first), min(stop, first + len(part))
        if low < high:
            yield part, low - first, high - first, low
        first += len(part)


@cache
def _slab(elements: int) -> Tensor:
    return torch.empty(elements, dtype=torch.bfloat16)


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Threads within which torch uses no others. torch passes the latest number on to threads that come later, so it is told
    the old one again."""
    pool = ThreadPoolExecutor(threads, "unfold", initializer=torch.set_num_threads, initargs=(1,))
    everyone = Barrier(threads)
    list(pool.map(lambda _: everyone.wait(), range(threads)))
    torch.set_num_threads(threads)
    return pool
