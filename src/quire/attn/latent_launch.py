"""The kernels of one layer of latent attention: their shapes, their memory, their order.

    prepare     rows to their pages, queries to where rows are
    tiles       rows of several tokens
    splits      rows of one token, and merges of those with several splits
    values      what was found becomes values

    expanded    rows of many tokens, over keys and values that are made beforehand

It does not know how a batch was cut.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.attn.backend import AttentionSpec, Latents
from quire.attn.batch import Batch
from quire.ops.adapters import add_tiled
from quire.ops.arguments import AdapterTiles
from quire.ops.qkv import add_to_near, add_to_values

TILE_TOKENS = 64  # queries times heads of a tile
MOST_HEADS = 64  # of a program
FEW = 64  # tokens whose rows and queries are prepared in one launch
MERGED_AT_ONCE = 4


@dataclass(frozen=True)
class Absorbed:
    tiles: Tensor  # [tiles, 3] int32: row or -1, first token within the row, 0
    splits: Tensor  # [splits, 4] int32: row or -1, split, place among the parts or -1, length
    merges: Tensor  # [merges, 3] int32: row or -1, first part, parts
    parts: int
    split: int  # rows of a split
    starts: Tensor  # [R + 1] int32 of rows among the tokens that are absorbed
    index: Tensor | None = None  # [n] int64 where these are among all; None = they are all
    adapted: AdapterTiles | None = None  # of these, if they are not all: as their adapters sort them


@dataclass(frozen=True)
class Expanded:
    TILE: ClassVar[int] = 128  # tokens

    tiles: Tensor  # [tiles, 3] int32: row, first token within the row, place of its first key
    pages: Tensor  # [S] int64 of the rows that are seen, one sequence after the other
    offsets: Tensor  # [S] int64 within the page
    adapted: AdapterTiles | None = None  # of the rows that are seen


def heads_at_once(heads: int) -> int:
    return min(MOST_HEADS, max(16, _power_of_two(heads)))


def place_rows(latents: Latents, rows: Tensor, kv: Tensor, write: Tensor, positions: Tensor) -> None:
    """Rows alone: queries of other tokens follow, or none."""
    _prepare(latents, rows, rows.unsqueeze(1), rows, kv, write, positions, positions, heads=0, with_rows=True)


def run_absorbed(
    spec: AttentionSpec,
    latents: Latents,
    plan: Absorbed,
    query: Tensor,
    kv: Tensor,
    batch: Batch,
    group: int,
    rows: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """query [K, heads, nope + rotary] of the plan's tokens, and `rows`, which go to their pages with the places where they are
    written, unless they are there -> [K, heads, values]."""
    from quire.ops.kernels.attention import merge_kernel
    from quire.ops.kernels.latent import latent_splits_kernel, latent_tiles_kernel
    from quire.ops.kernels.launcher import cdiv, overlapping

    assert spec.latent is not None
    count, heads, rank = len(query), spec.heads, spec.latent
    near = query.new_empty(count, heads, spec.head_dim)
    positions = batch.positions if plan.index is None else batch.positions[plan.index]
    if rows is not None and count <= FEW:
        _prepare(latents, rows[0], query, near, kv, rows[1], batch.positions, positions, heads=heads, with_rows=True)
    else:
        if rows is not None:
            place_rows(latents, rows[0], kv, rows[1], batch.positions)
        _prepare(latents, near, query, near, kv, positions, positions, positions, heads=heads, with_rows=False)
    lora = batch.tokens.lora
    tiles = plan.adapted if plan.index is not None or lora is None else lora.sorted
    changed = None if latents.table is None or tiles is None or not count else (tiles, latents.table)
    if changed is not None:
        add_to_near(near, query, latents.up, latents.nope, *changed)
    # Taken whether it is needed or not: the run that measures memory sees what any step may take.
    memory = near.new_empty(plan.parts * heads * (rank + 1), dtype=torch.float32)
    covered = plan.index is not None or (bool(batch.rows) and sum(batch.rows[-1][:2]) == count)
    found = (near.new_empty if covered else near.new_zeros)(count, heads, rank)
    tables, at_once, wide = batch.groups[group].tables, heads_at_once(heads), query.dtype == torch.float32
    shape = {
        "HEADS": heads, "RANK": rank, "RANK_BLOCK": _block(rank), "END": spec.head_dim - rank,
        "END_BLOCK": _block(spec.head_dim - rank), "PAGE_SIZE": kv.shape[3],
    }  # fmt: skip
    numbers = kv.stride(0), tables.stride(0), spec.scale
    blocks = cdiv(heads, at_once)
    if plan.tiles.shape[0]:
        latent_tiles_kernel[(blocks, plan.tiles.shape[0])](
            near, kv, found, tables, plan.starts, batch.kv_lengths, plan.tiles, *numbers, **shape,
            BLOCK_H=at_once, BLOCK_M=max(TILE_TOKENS, at_once), BLOCK_N=16 if wide else 32,
            num_warps=8, num_stages=1 if wide else 2, **overlapping(),
        )  # fmt: skip
    if plan.splits.shape[0]:
        weights = memory[plan.parts * heads * rank :]
        latent_splits_kernel[(blocks, plan.splits.shape[0])](
            near, kv, found, memory, weights, tables, plan.starts, plan.splits, *numbers, **shape, SPLIT=plan.split,
            BLOCK_M=at_once, BLOCK_N=16 if wide else 32,
            num_warps=4 if at_once == 16 else 8, num_stages=1 if wide else 2, **overlapping(),
        )  # fmt: skip
        if plan.merges.shape[0]:
            merge_kernel[(heads, plan.merges.shape[0])](
                memory, weights, found, plan.starts, plan.merges, heads * rank,
                HEADS=heads, HEAD_DIM=rank, DIM_BLOCK=_block(rank), BLOCK=MERGED_AT_ONCE, num_warps=4, **overlapping(),
            )  # fmt: skip
    out = _values(latents, found)
    if changed is not None:
        add_to_values(out, found, latents.nope, *changed)
    return out


def run_expanded(
    spec: AttentionSpec, latents: Latents, plan: Expanded, query: Tensor, kv: Tensor, batch: Batch, out: Tensor
) -> None:
    """query [K, heads, nope + rotary] -> out [K, heads, values] of the plan's rows."""
    from quire.ops.kernels.latent_expanded import expanded_kernel
    from quire.ops.kernels.launcher import overlapping

    assert spec.latent is not None
    held = kv[plan.pages, 0, 0, plan.offsets]
    made = F.linear(held[:, : spec.latent], latents.up.flatten(0, 1))
    if latents.table is not None and plan.adapted is not None:
        made = add_tiled(made, held[:, : spec.latent], plan.adapted, latents.table, None)
    rotation, wide = latents.rotation, query.dtype == torch.float32
    expanded_kernel[(spec.heads, plan.tiles.shape[0])](
        query, made, held, out, rotation.cos, rotation.sin, batch.row_starts, batch.kv_lengths, plan.tiles,
        query.stride(0), made.stride(0), spec.scale,
        HEADS=spec.heads, RANK=spec.latent, NOPE=latents.nope, NOPE_BLOCK=_block(latents.nope), VALUES=latents.values,
        VALUE_BLOCK=_block(latents.values), **_turning(latents),
        BLOCK_M=Expanded.TILE, BLOCK_N=32 if wide else 64, num_warps=8,
        num_stages=1 if wide or max(latents.nope, latents.values) > 128 else 2, **overlapping(),
    )  # fmt: skip


def _prepare(
    latents: Latents,
    rows: Tensor,
    query: Tensor,
    near: Tensor,
    kv: Tensor,
    write: Tensor,
    row_positions: Tensor,
    positions: Tensor,
    *,
    heads: int,
    with_rows: bool,
) -> None:
    from quire.ops.kernels.latent import prepare_kernel
    from quire.ops.kernels.launcher import cdiv, overlapping

    assert query.stride(2) == 1 and (not heads or query.stride(1) == query.shape[2]) and kv.stride(3) == kv.shape[4]
    rank, rotation = len(latents.norm), latents.rotation
    tokens = max(len(query) if heads else 0, len(rows) if with_rows else 0)
    block_t, block_n = (16, 64) if with_rows or tokens <= FEW else (64, 128)
    if not tokens:
        return
    prepare_kernel[(heads + with_rows, cdiv(rank, block_n) if heads else 1, cdiv(tokens, block_t))](
        rows, query, near, kv, write, row_positions, positions, latents.norm, latents.up, rotation.cos, rotation.sin,
        len(rows), len(query), rows.stride(0), query.stride(0), latents.up.stride(0), kv.stride(0), latents.eps,
        HEADS=heads, ROWS=with_rows, NOPE=latents.nope, NOPE_BLOCK=_block(latents.nope), RANK=rank, RANK_BLOCK=_block(rank),
        **_turning(latents), PAGE_SIZE=kv.shape[3], BLOCK_T=block_t, BLOCK_N=block_n, num_warps=4, **overlapping(),
    )  # fmt: skip


def _values(latents: Latents, found: Tensor) -> Tensor:
    from quire.ops.kernels.latent import values_kernel
    from quire.ops.kernels.launcher import cdiv, overlapping

    count, heads, rank = found.shape
    out = found.new_empty(count, heads, latents.values)
    few = count <= FEW
    block_t, block_n = (16, 16) if few else (64, min(128, _block(latents.values)))
    if count:
        values_kernel[(heads, cdiv(latents.values, block_n), cdiv(count, block_t))](
            found, latents.up, out, count, latents.up.stride(0), HEADS=heads, NOPE=latents.nope, VALUES=latents.values,
            RANK=rank, BLOCK_T=block_t, BLOCK_N=block_n, BLOCK_K=min(128 if few else 64, _block(rank)), num_warps=4,
            **overlapping(),
        )  # fmt: skip
    return out


def _turning(latents: Latents) -> dict[str, Any]:
    half = latents.rotation.cos.shape[1]
    return {"HALF": half, "HALF_BLOCK": _block(half), "INTERLEAVED": latents.rotation.interleaved}


def _block(size: int) -> int:
    """What matrix units take."""
    return max(16, _power_of_two(size))


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
