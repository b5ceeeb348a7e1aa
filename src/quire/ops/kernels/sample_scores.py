"""Peak, mass and rank in one pass over the logits: a program takes a chunk of a row, another puts a row's chunks together."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.kernels.launcher import launched
from quire.ops.kernels.math import cdiv, power_of_two

CHUNK = 4096


@launched
@triton.jit
def _score_chunks(
    logits,  # [n, V] float32
    chosen,  # [n] int64
    peaks,  # [n, CHUNKS] float32
    masses,  # [n, CHUNKS] float32
    above,  # [n, CHUNKS] int32
    row_stride,
    VOCABULARY: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * row_stride + at, mask=at < VOCABULARY, other=float("-inf"))
    bar = tl.load(logits + row * row_stride + tl.load(chosen + row))
    peak = tl.max(x)
    mine = row * CHUNKS + chunk
    tl.store(peaks + mine, peak)
    tl.store(masses + mine, tl.sum(tl.exp(x - tl.where(peak > float("-inf"), peak, 0.0))))
    tl.store(above + mine, tl.sum((x > bar).to(tl.int32)))


@launched
@triton.jit
def _score_rows(
    peaks,  # [n, CHUNKS] float32
    masses,  # [n, CHUNKS] float32
    above,  # [n, CHUNKS] int32
    tops,  # [n] float32
    spreads,  # [n] float32
    ranks,  # [n] int32
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    mine, there = row * CHUNKS + chunk, chunk < CHUNKS
    peak = tl.load(peaks + mine, mask=there, other=float("-inf"))
    top = tl.max(peak)
    shift = tl.where(top > float("-inf"), top, 0.0)
    mass = tl.sum(tl.load(masses + mine, mask=there, other=0.0) * tl.exp(peak - shift))
    tl.store(tops + row, shift)
    tl.store(spreads + row, tl.log(mass))
    tl.store(ranks + row, tl.sum(tl.load(above + mine, mask=there, other=0)) + 1)


def score(logits: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, vocabulary = logits.shape
    chunks = cdiv(vocabulary, CHUNK)
    peaks, masses = torch.empty(2, rows, chunks, dtype=torch.float32, device=logits.device).unbind()
    above = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    tops, spreads = torch.empty(2, rows, dtype=torch.float32, device=logits.device).unbind()
    ranks = torch.empty(rows, dtype=torch.int32, device=logits.device)
    shape = {"CHUNKS": chunks}
    _score_chunks[(chunks, rows)](
        logits, chosen, peaks, masses, above, logits.stride(0), VOCABULARY=vocabulary, CHUNK=CHUNK, **shape, num_warps=4
    )
    _score_rows[(rows,)](peaks, masses, above, tops, spreads, ranks, BLOCK=power_of_two(chunks), **shape, num_warps=1)
    return tops, spreads, ranks
