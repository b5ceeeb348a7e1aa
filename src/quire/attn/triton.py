"""Attention in Triton over page tables, for CUDA devices.

`plan` cuts the batch on the host (`work_split.py`) and sends the cuts in one copy; `run` launches a few kernels (`launch.py`),
whose grids are numbers the host knows. A plan in memory that stays (`FixedCuts`) has lists of fixed length, filled up with -1:

    splits [ row 0 | row 0 | row 1 | -1 | -1 ]  merges [ row 0 | -1 ]  shared [ split 0 | -1 ]  members [ row 0 | -1 ]
    tiles  [ row 2 | row 2 | -1 ]

Programs that find -1 leave at once.
"""

import importlib.util
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.attn import work_split
from quire.attn.backend import NO_LATENTS, AttentionBackend, AttentionSpec, Room
from quire.attn.batch import Batch
from quire.attn.launch import Geometry, Launch, Plan, geometry, reads_in_blocks
from quire.attn.shared_prefix import FEWEST, NOTHING_SHARED, FindSharedPrefix, Ints, SharedPrefix
from quire.attn.work_split import Cuts, cut_copies, cut_rows, cut_tiles, first_key

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LARGEST_HEAD = 256
MOST_SHARING = 64
PARTS = 8192  # at a time
COPIED = 1 << 18  # keys times heads that are copied at a time
LONG = 512  # tokens in a row whose keys are worth copying
DEEP = 4096  # keys seen by a row of several tokens that are as well, where tiles over pages would be long and ...
FEW_TILES = 32  # ... leave most of the device idle: beside the tiles of long rows they do not


def refuse_without_triton(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Why the kernels cannot run there, or not in that type."""
    reasons = []
    if device.type != "cuda":
        reasons.append(f"it needs a CUDA device, not {device.type}")
    elif importlib.util.find_spec("triton") is None:
        reasons.append("the package triton is not installed")
    elif torch.cuda.get_device_capability(device) < (8, 0):
        reasons.append("it needs compute capability 8.0 or newer")
    if dtype not in DTYPES:
        reasons.append(f"it does not compute in {str(dtype).removeprefix('torch.')}")
    return reasons


class TritonAttention(AttentionBackend):
    def refuse(self, spec: AttentionSpec, device: torch.device, dtype: torch.dtype) -> list[str]:
        reasons = refuse_without_triton(device, dtype)
        if spec.latent is not None:
            reasons.append(NO_LATENTS)
        elif spec.head_dim > LARGEST_HEAD:
            reasons.append(f"its heads have at most {LARGEST_HEAD} components, not {spec.head_dim}")
        if spec.heads // spec.kv_heads > MOST_SHARING:
            reasons.append(f"at most {MOST_SHARING} query heads may share a KV head, not {spec.heads // spec.kv_heads}")
        return reasons

    def plan(self, batch: Batch, group: int, spec: AttentionSpec, query: Tensor, kv: Tensor) -> None:  # noqa: ARG002
        share = spec.heads // spec.kv_heads
        shape = geometry(share, spec.head_dim, query.dtype)
        alike = batch.groups[group].alike(work_split.SPLIT) if spec.window is None else NOTHING_SHARED
        batch.plans["triton", group] = cut(batch, spec.window, alike, shape, share, reads_in_blocks(spec, query))

    def run(self, spec: AttentionSpec, query: Tensor, kv: Tensor, batch: Batch, group: int, sinks: Tensor | None) -> Tensor:
        if ("triton", group) not in batch.plans:
            self.plan(batch, group, spec, query, kv)
        plans: list[Plan] = batch.plans["triton", group]
        covered = batch.rows[-1][0] + batch.rows[-1][1] if batch.rows else 0
        make = torch.empty_like if covered == query.shape[0] else torch.zeros_like
        out = make(query, memory_format=torch.contiguous_format)
        for plan in plans:
            Launch(spec, plan, query, kv, out, batch, batch.groups[group].tables, sinks).run()
        return out

    def fixed(self, spec: AttentionSpec, dtype: torch.dtype) -> "FixedCuts":
        share = spec.heads // spec.kv_heads
        shape = geometry(share, spec.head_dim, dtype)
        return FixedCuts(shape.shared_m // share, shape.tile_m // share)


class FixedCuts:
    """Long rows are not copied: their tiles read the pages, as all tiles do. Where a copy is worth much, there is no plan."""

    def __init__(self, most_members: int, tile_tokens: int) -> None:
        self._most_members, self._tile_tokens = most_members, tile_tokens

    def cut(
        self, counts: Ints, lengths: Ints, window: int | None, find: FindSharedPrefix
    ) -> tuple[tuple[Cuts, Ints], Room] | None:
        (single, several), tiles, seen = _by_length(counts.tobytes()), NOTHING, lengths
        if len(several):
            seen, count, length = lengths[single], counts[several], lengths[several]
            if ((count >= LONG) & (length - first_key(count, length, window) >= DEEP)).any():
                return None
            tiles = cut_tiles(several, count, length, self._tile_tokens, np.zeros_like(several))
        alike = find(work_split.SPLIT) if window is None and len(single) >= FEWEST else NOTHING_SHARED
        made = cut_rows(single, seen, window, alike, self._most_members)
        return None if made.parts > PARTS else ((made, tiles), Room(len(made.splits), len(made.shared), len(tiles)))

    def size(self, rows: int, room: Room) -> int:
        return sum(room_counts(rows, room))

    def numbers(self, cut: tuple[Cuts, Ints], rows: int, room: Room) -> Ints:
        made, tiles = cut
        out = _lists(made if made.form is None else made.form.made, rows, room).copy()
        out[3 : 4 * len(made.splits) : 4] = made.splits[:, 3]
        if len(tiles):
            out[len(out) - 3 * room.tiles :][: tiles.size] = tiles.reshape(-1)
        return out

    def renew(self, cut: tuple[Cuts, Ints], lengths: Ints, numbers: Ints) -> bool:
        made, tiles = cut
        grown = None if len(tiles) or made.form is None else made.form.lengths(lengths)
        if grown is None:
            return False
        numbers[3 : 4 * len(grown) : 4] = grown
        return True

    def attach(self, batch: Batch, group: int, numbers: Tensor, rows: int, room: Room) -> None:
        splits, merges, shared, members, tiles = torch.split(numbers, room_counts(rows, room))
        nothing = numbers.new_empty(0, 3)
        batch.plans["triton", group] = [
            Plan(
                tiles=tiles.view(-1, 3), copies=nothing, long_tiles=nothing, splits=splits.view(-1, 4),
                merges=merges.view(-1, 3), shared=shared.view(-1, 3), members=members.view(-1, 2),
                parts=PARTS, keys=0, copied=0,
            )
        ]  # fmt: skip


@lru_cache(maxsize=16)  # most steps are like the one before
def _lists(made: Cuts, rows: int, room: Room) -> Ints:
    """Without tiles."""
    at, counts = 0, room_counts(rows, room)
    out = np.full(sum(counts), -1, np.int32)
    for array, count in zip((made.splits, made.merges, made.shared, made.members), counts, strict=False):
        out[at : at + array.size] = array.reshape(-1)
        at += count
    if not room.tiles and made.rows < rows:  # what is left attends to itself
        padding = out[: 4 * room.splits].reshape(-1, 4)[len(made.splits) :][: rows - made.rows]
        padding[:, 0], padding[:, 1], padding[:, 3] = np.arange(made.rows, rows), 0, 1
    return out


@lru_cache(maxsize=16)
def _by_length(counts: bytes) -> tuple[Ints, Ints]:
    """The rows of one token, and those of several."""
    alone = np.frombuffer(counts, np.int32) == 1
    return np.flatnonzero(alone).astype(np.int32), np.flatnonzero(~alone).astype(np.int32)


def room_counts(rows: int, room: Room) -> list[int]:
    """Of the numbers of splits, merges, shared splits, members and tiles."""
    return [4 * room.splits, 3 * rows, 3 * room.shared, 2 * rows if room.shared else 0, 3 * room.tiles]


def cut(batch: Batch, window: int | None, alike: SharedPrefix, shape: Geometry, share: int, in_blocks: bool) -> list[Plan]:
    """Plans to be run one after the other. `in_blocks`: the keys of long rows are to be copied to one place."""
    rows = np.fromiter(chain.from_iterable(batch.rows), np.int32, 3 * len(batch.rows)).reshape(-1, 3)
    single = np.flatnonzero(rows[:, 1] == 1).astype(np.int32)
    prompts = NO_PROMPTS if len(single) == len(rows) else _cut_prompts(rows, window, shape, share, in_blocks)
    device, members = batch.row_starts.device, shape.shared_m // share
    made = cut_rows(single, rows[single, 2], window, alike, members)
    if made.parts <= PARTS:
        return [_send(prompts, made, device)]
    plans: list[Plan] = []
    for piece in np.split(single, _borders(-(-rows[single, 2] // work_split.SPLIT))):
        chosen = np.zeros(len(rows), np.bool_)
        chosen[piece] = True
        made = cut_rows(piece, rows[piece, 2], window, alike.among(chosen), members)
        plans.append(_send(NO_PROMPTS if plans else prompts, made, device))
    return plans


@dataclass(frozen=True)
class Prompts:
    """What is done for rows of several tokens."""

    tiles: Ints  # [tiles, 3]
    copies: Ints  # [copies, 3]
    long_tiles: Ints  # [long tiles, 3]
    keys: int


NOTHING = np.empty((0, 3), np.int32)
NO_PROMPTS = Prompts(NOTHING, NOTHING, NOTHING, keys=0)


def _cut_prompts(rows: Ints, window: int | None, shape: Geometry, share: int, in_blocks: bool) -> Prompts:
    count, length = rows[:, 1], rows[:, 2]
    first = first_key(count, length, window)
    far = _copied(count, length - first, shape.tile_m // share) if in_blocks else np.zeros(len(rows), np.bool_)
    long, several = (np.flatnonzero(mask).astype(np.int32) for mask in (far, (count > 1) & ~far))
    tiles = cut_tiles(several, count[several], length[several], shape.tile_m // share, np.zeros_like(several))
    copies, place, keys = cut_copies(long, first[long], length[long], shape.long_n)
    long_tiles = cut_tiles(long, count[long], length[long], shape.long_m // share, place)
    return Prompts(tiles, copies, long_tiles, keys)


def _copied(count: Ints, seen: Ints, tile: int) -> npt.NDArray[np.bool_]:
    """[R] whose keys are copied (`seen` of them): rows of many tokens first, and no row more when there are COPIED keys."""
    deep = (count > 1) & (count < LONG) & (seen >= DEEP)
    if (-(-count[deep] // tile)).sum() > FEW_TILES:
        deep[:] = False
    worthy = np.flatnonzero((count >= LONG) | deep)
    worthy = worthy[np.argsort(-count[worthy], kind="stable")]
    before = np.cumsum(seen[worthy]) - seen[worthy]
    chosen = np.zeros(len(count), np.bool_)
    chosen[worthy[before < COPIED]] = True
    return chosen


def _borders(parts: Ints) -> list[int]:
    """Where to divide rows with so many parts, so that each piece has at most PARTS, or one row."""
    borders, ends = [], np.cumsum(parts)
    begin = 0
    while (reach := int(np.searchsorted(ends, (ends[begin - 1] if begin else 0) + PARTS, "right"))) < len(parts):
        begin = max(begin + 1, reach)
        borders.append(begin)
    return borders


def _send(prompts: Prompts, made: Cuts, device: torch.device) -> Plan:
    arrays = (
        prompts.tiles, prompts.copies, prompts.long_tiles, made.splits, made.merges, made.shared, made.members
    )  # fmt: skip
    packed = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    views = torch.split(packed, [array.size for array in arrays])
    tiles, copies, long_tiles, *rest = (view.view(array.shape) for view, array in zip(views, arrays, strict=True))
    splits, merges, shared, members = rest
    parts, copied = max(PARTS, made.parts), max(COPIED, prompts.keys)
    return Plan(tiles, copies, long_tiles, splits, merges, shared, members, parts, prompts.keys, copied)
