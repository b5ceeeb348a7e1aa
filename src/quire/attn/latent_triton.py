"""Latent attention in Triton, for CUDA devices: how a batch is cut into work, and which of its rows are expanded.

Rows of one token are cut into splits of the rows they see, others into tiles of queries, and both are absorbed: queries go to
where the rows are. Of prompts that are long enough keys and values of all heads are made instead, one row of the batch after
the other in one piece of memory. A plan that stays (for CUDA graphs) has no such rows.

    tokens      row 0: 1 token    row 1: 900 tokens    row 2: 7 tokens
    absorbed    row 0 | row 2     `index`: where these are among all
    expanded    row 1
"""

from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.attn.backend import AttentionBackend, AttentionSpec, Latents, Room
from quire.attn.batch import Batch
from quire.attn.latent_launch import TILE_TOKENS, Absorbed, Expanded, heads_at_once, run_absorbed, run_expanded
from quire.attn.latent_launch import place_rows as place_rows_alone
from quire.attn.shared_prefix import NOTHING_SHARED, FindSharedPrefix, Ints
from quire.attn.triton import FixedCuts, refuse_without_triton, room_counts
from quire.attn.work_split import Cuts, cut_rows, cut_tiles
from quire.ops.adapters import tile
from quire.ops.arguments import AdapterTiles
from quire.types.plan import spans

Mask = npt.NDArray[np.bool_]
SPLIT = 128  # rows of one split: they are read once for all heads, so that there are few programs
LONG = 256  # tokens that are worth expanding, at least: fewer are run in CUDA graphs
EXPANDED = 1 << 27  # numbers that keys and values are made of at a time
PART_NUMBERS = 1 << 25  # of all parts together


class LatentTriton(AttentionBackend):
    def refuse(self, spec: AttentionSpec, device: torch.device, dtype: torch.dtype) -> list[str]:
        reasons = ["it needs a cache of latents"] if spec.latent is None else []
        return reasons + refuse_without_triton(device, dtype)

    def run_latent(
        self,
        spec: AttentionSpec,
        latents: Latents,
        query: Tensor,
        rows: Tensor,
        kv: Tensor,
        batch: Batch,
        group: int,
        final: bool,
    ) -> Tensor:
        behind = batch.final if final else batch
        if ("latent", group) not in behind.plans:
            behind.plans["latent", group] = cut(behind, group, spec, latents, kv.shape[3])
        plan: LatentPlan = behind.plans["latent", group]
        write = batch.groups[group].write
        if plan.expanded is None and behind is batch:  # the usual way
            return run_absorbed(spec, latents, plan.absorbed, query, kv, behind, group, (rows, write)).flatten(1)
        place_rows_alone(latents, rows, kv, write, batch.positions)
        if plan.expanded is None:
            return run_absorbed(spec, latents, plan.absorbed, query, kv, behind, group, None).flatten(1)
        out = query.new_zeros(len(query), spec.heads, latents.values)
        run_expanded(spec, latents, plan.expanded, query, kv, behind, out)
        index = plan.absorbed.index
        if index is None or len(index):
            few = query if index is None else query[index]
            found = run_absorbed(spec, latents, plan.absorbed, few, kv, behind, group, None)
            out.index_copy_(0, index, found) if index is not None else out.copy_(found)
        return out.flatten(1)

    def fixed(self, spec: AttentionSpec, dtype: torch.dtype) -> "FixedLatents":  # noqa: ARG002
        return FixedLatents(spec)


@dataclass(frozen=True)
class LatentPlan:
    absorbed: Absorbed
    expanded: Expanded | None = None


class FixedLatents(FixedCuts):
    """What is worth expanding is not for graphs."""

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(1, tile_tokens(spec))
        self._parts = most_parts(spec)

    def cut(
        self,
        counts: Ints,
        lengths: Ints,
        window: int | None,  # noqa: ARG002
        find: FindSharedPrefix,  # noqa: ARG002
    ) -> tuple[tuple[Cuts, Ints], Room] | None:
        if (counts >= LONG).any():
            return None
        single, tiles = _cut(counts, lengths, counts == 1, counts > 1, self._tile_tokens)
        return None if single.parts > self._parts else ((single, tiles), Room(len(single.splits), 0, len(tiles)))

    def attach(self, batch: Batch, group: int, numbers: Tensor, rows: int, room: Room) -> None:
        splits, merges, _, _, tiles = torch.split(numbers, room_counts(rows, room))
        batch.plans["latent", group] = LatentPlan(
            Absorbed(tiles.view(-1, 3), splits.view(-1, 4), merges.view(-1, 3), self._parts, SPLIT, batch.row_starts)
        )


def tile_tokens(spec: AttentionSpec) -> int:
    return max(1, TILE_TOKENS // heads_at_once(spec.heads))


def most_parts(spec: AttentionSpec) -> int:
    assert spec.latent is not None
    return max(256, PART_NUMBERS // (spec.heads * spec.latent))


def cut(batch: Batch, group: int, spec: AttentionSpec, latents: Latents, page_size: int) -> LatentPlan:
    rows = np.fromiter(chain.from_iterable(batch.rows), np.int32, 3 * len(batch.rows)).reshape(-1, 3)
    count, length = rows[:, 1], rows[:, 2]
    many = np.array([n >= LONG and latents.worth_expanding(int(n)) for n in count.tolist()], np.bool_)
    many[np.flatnonzero(many)[np.cumsum(length[many].astype(np.int64)) * latents.up.shape[:2].numel() > EXPANDED]] = False
    single, tiles = _cut(count, length, (count == 1) & ~many, (count > 1) & ~many, tile_tokens(spec))
    device = batch.row_starts.device
    long = np.flatnonzero(many).astype(np.int32)
    if not len(long):
        sent = _send((tiles, single.splits, single.merges), device)
        return LatentPlan(Absorbed(sent[0], sent[1], sent[2], max(most_parts(spec), single.parts), SPLIT, batch.row_starts))
    few = np.where(many, 0, count)
    index = spans(rows[~many, 0].astype(np.int64), few[~many].astype(np.int64)).astype(np.int32)
    starts = np.concatenate(([0], np.cumsum(few))).astype(np.int32)
    place = (np.cumsum(length[long]) - length[long]).astype(np.int32)
    long_tiles = cut_tiles(long, count[long], length[long], Expanded.TILE, place)
    at = spans(np.zeros(len(long), np.int64), length[long].astype(np.int64)).astype(np.int32)
    owner = long.repeat(length[long])
    sent = _send((tiles, single.splits, single.merges, starts, index, long_tiles, at, owner), device)
    mine, seen = (None, None) if latents.table is None else _adapted(batch, index, rows[owner, 0])
    table = batch.groups[group].tables
    pages = table[sent[7].long(), (sent[6] // page_size).long()].long()
    return LatentPlan(
        Absorbed(sent[0], sent[1], sent[2], max(most_parts(spec), single.parts), SPLIT, sent[3], sent[4].long(), mine),
        Expanded(sent[5], pages, (sent[6] % page_size).long(), seen),
    )


def _adapted(batch: Batch, few: Ints, firsts: Ints) -> tuple[AdapterTiles | None, AdapterTiles | None]:
    """These tokens, and rows of the cache whose sequences begin with those tokens here, by their adapters."""
    lora = batch.tokens.lora
    if lora is None:
        return None, None
    places, device = lora.places, lora.device
    return tile(places[few], device) if len(few) else None, tile(places[firsts], device)


def _cut(count: Ints, length: Ints, alone: Mask, several: Mask, tokens: int) -> tuple[Cuts, Ints]:
    """Which rows are alone, and which have several tokens, as masks."""
    single, many = (np.flatnonzero(mask).astype(np.int32) for mask in (alone, several))
    tiles = cut_tiles(many, count[many], length[many], tokens, np.zeros_like(many))
    return cut_rows(single, length[single], None, NOTHING_SHARED, 1, SPLIT), tiles


def _send(arrays: tuple[Ints, ...], device: torch.device) -> list[Tensor]:
    """In one copy."""
    packed = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    views = torch.split(packed, [array.size for array in arrays])
    return [view.view(array.shape) for view, array in zip(views, arrays, strict=True)]
