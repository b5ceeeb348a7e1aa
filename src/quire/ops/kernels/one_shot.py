"""One-shot collectives of ranks whose memory every rank has mapped: all-reduce and all-gather in one launch.

    program b    copy tile b of x to our buffer ─► write our turn into a flag of every rank ─► wait for the turns of all ranks
                 ─► read tile b of every rank, in rank order ─► out

    buffer of a rank    [ turns' parity: 2 | programs | TILE_BYTES ]
    flags of a rank     [ programs | ranks ] int64

A program waits for the same program of the other ranks only. Turns count its runs and never wrap. Its tile of a turn is written
again two turns later: by then the other ranks have announced the turn between, which they do after they read the tile. All
ranks run the same collectives in the same order, so a recorded launch may be replayed any number of times.
"""

import triton
import triton.language as tl
from torch import Tensor

from quire.ops.kernels.launcher import cdiv, launched

TILE_BYTES = 8192
VECTOR_BYTES = 16  # of one load
PROGRAMS = 64  # few, so that all of them fit a GPU next to other kernels
MAX_BYTES = PROGRAMS * TILE_BYTES  # of one rank's part


@launched
@triton.jit(do_not_specialize=["vectors"])
def _one_shot(
    x,  # [vectors x VECTOR] this rank's part
    out,  # the sum, like x; or [RANKS, vectors x VECTOR]
    turns,  # [PROGRAMS] int64: runs of each program
    addresses,  # [2, RANKS] int64: of the flags and of the buffer of every rank
    vectors,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SUM: tl.constexpr,
    TILE: tl.constexpr,  # elements
    VECTOR: tl.constexpr,  # elements, which divide a tile
    PROGRAMS: tl.constexpr,
):
    program = tl.program_id(0)
    turn = tl.load(turns + program) + 1
    row = tl.arange(0, TILE // VECTOR)[:, None]
    lane = row * VECTOR + tl.arange(0, VECTOR)[None, :]
    inside = program * (TILE // VECTOR) + row < vectors
    at = program * TILE + lane
    slot = ((turn % 2).to(tl.int32) * PROGRAMS + program) * TILE + lane
    own = _buffer(x, addresses + RANKS + RANK)
    tl.store(own + slot, tl.load(x + at, mask=inside), mask=inside)
    tl.debug_barrier()  # all threads have written before one announces it
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            flag = tl.load(addresses + rank).to(tl.pointer_type(tl.int64)) + program * RANKS + RANK
            tl.atomic_xchg(flag, turn, sem="release", scope="sys")
    flags = tl.load(addresses + RANK).to(tl.pointer_type(tl.int64)) + program * RANKS
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            while tl.atomic_add(flags + rank, 0, sem="acquire", scope="sys") < turn:
                pass
    tl.debug_barrier()
    total = tl.load(_buffer(x, addresses + RANKS) + slot, mask=inside)
    for rank in tl.static_range(1, RANKS):
        part = tl.load(_buffer(x, addresses + RANKS + rank) + slot, mask=inside)
        if SUM:
            total = (total.to(tl.float32) + part.to(tl.float32)).to(total.dtype)  # rounded after each addition, as in torch
        else:
            tl.store(out + rank * (vectors * VECTOR) + at, part, mask=inside)
    tl.store(out + at, total, mask=inside)
    tl.debug_barrier()  # all threads have read the turn
    tl.store(turns + program, turn)


@triton.jit
def _buffer(x, address):
    """Return the buffer at an address in memory, as elements of x's type."""
    return tl.multiple_of(tl.load(address).to(x.dtype), 16)


def one_shot(x: Tensor, out: Tensor, turns: Tensor, addresses: Tensor, rank: int, ranks: int) -> None:
    """All-reduce x [count], at most MAX_BYTES, into out [count]; or all-gather it into out [ranks, count]. Both contiguous.

    turns [PROGRAMS] int64: zeros at first. addresses [2, ranks] int64: of flags and buffers. A sum is of floats with at most
    32 bits.
    """
    tile, widest = TILE_BYTES // x.element_size(), VECTOR_BYTES // x.element_size()
    vector = 1 if len(x) % widest else widest
    _one_shot[(cdiv(len(x), tile),)](
        x, out, turns, addresses, len(x) // vector,
        RANK=rank, RANKS=ranks, SUM=out.dim() == 1, TILE=tile, VECTOR=vector, PROGRAMS=PROGRAMS, num_warps=8,
    )  # fmt: skip
