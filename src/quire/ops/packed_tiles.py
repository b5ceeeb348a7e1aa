"""How the kernels for packed matrices divide their work among programs, by the sizes of a product. Measured on an H200."""

from typing import Any

FILLING = 264  # programs that keep an H200 busy
# of whole numbers of 8 bits, tiles as rows, outputs, warps and stages: the smallest of which there is a processor for each;
# and, for so many rows at most, where there are more of all
INT_TILES = ((64, 64, 4, 5), (128, 64, 4, 4), (128, 128, 8, 3))
INT_MANY = ((64, 64, 128, 4, 4), (1 << 62, 128, 128, 8, 3))


def choose_program(packed: Any) -> Any:
    """Of the kernel for single rows."""
    from quire.ops.kernels.math import power_of_two
    from quire.ops.kernels.packed_rows import Program

    wide = packed.words.shape[-1]
    if packed.form in ("float8", "int8") and wide < 4096 and packed.outputs > 4 * wide:
        return Program(4, 512, 2)
    return Program(8 if wide <= 1024 else 4, max(256, min(1024, power_of_two(wide))), 4)


def choose_way(packed: Any, rows: int) -> Any:
    from quire.ops.kernels.packed import Way

    block = next((block for block in (16, 32, 64, 128) if rows <= block), 256)
    if block == 128 and packed.outputs < 128 * FILLING // 2:  # to add the shares of so high a tile takes too long
        block = 64
    high = 64 if packed.form in ("int8", "float8") and block <= 64 else 128
    tiles = -(-packed.outputs // high) * -(-rows // block)
    programs = 3 * FILLING if block <= 32 else FILLING if block <= 128 else FILLING // 2
    shares = choose_shares(programs / tiles, packed.blocks)
    warps = 8 if block == 256 or (block > 32 and packed.form == "int6") else 4  # whose numbers take more registers
    return Way(block, high, shares, warps, 4 if block <= 32 else 3, fold=block > 64)


def choose_tile(packed: Any, rows: int) -> Any:
    """Of the kernel for scales by block."""
    from quire.ops.kernels.packed_blocks import Tile

    block, high = 64 if rows <= 64 else 128, 64
    tiles = -(-packed.outputs // high) * -(-rows // block)
    shares = choose_shares(FILLING / tiles, packed.columns // (512 if block == 64 else 2048))
    return Tile(block, high, 4, 3 if tiles >= FILLING or block * shares > 256 else 5, shares)


def choose_ints(rows: int, outputs: int, columns: int) -> Any:
    """Of the kernel for whole numbers of 8 bits."""
    from quire.ops.kernels.packed_ints import IntTile

    for block, high, warps, stages in INT_TILES:
        tiles = -(-outputs // high) * -(-rows // block)
        if tiles <= FILLING // 2:
            return IntTile(block, high, warps, stages, choose_shares(FILLING / 2.75 / tiles, columns // 512), 256)
    return IntTile(*next(tile for most, *tile in INT_MANY if rows <= most))


def choose_shares(wanted: float, most: int) -> int:
    """Powers of two: for each number a kernel is compiled."""
    return next(shares for shares in (8, 4, 2, 1) if shares == 1 or (shares <= most and shares < 1.42 * wanted))


def choose_expert_way(packed: Any, rows: float) -> Any:
    """For so many rows an expert on average."""
    from quire.ops.kernels.packed import Way
    from quire.ops.kernels.words import NUMBERS

    block, high = (16, 128) if rows <= 8 else (32, 128 if NUMBERS[packed.form] == 4 else 64) if rows <= 40 else (64, 128)
    return Way(block, high, 1, 4, 3 if block == 64 else 4)
