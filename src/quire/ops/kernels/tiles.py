"""Which expert's rows a program multiplies, found on the device."""

import triton
import triton.language as tl


@triton.jit
def find_tile(ends, tile, EXPERTS: tl.constexpr, EXPERT_BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Slots are sorted by expert; ends [EXPERTS] is where each one's end, and tiles are ROWS of one expert.

    -> the tile's expert (EXPERTS: there is no such tile), its first slot, and where the expert's slots end.
    """
    each = tl.arange(0, EXPERT_BLOCK)
    end = tl.load(ends + each, mask=each < EXPERTS, other=0)
    begin = tl.load(ends + each - 1, mask=(each > 0) & (each < EXPERTS), other=0)
    tiles = tl.where(each < EXPERTS, (end - begin + ROWS - 1) // ROWS, 0)
    last = tl.cumsum(tiles, 0)
    expert = tl.sum((last <= tile).to(tl.int32), 0)
    mine = each == expert
    first = tl.sum(tl.where(mine, begin + (tile - last + tiles) * ROWS, 0), 0)
    stop = tl.sum(tl.where(mine, end, 0), 0)
    return expert, first, stop
