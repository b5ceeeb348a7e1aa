"""One step's ragged batch as the device sees it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.attn.shared_prefix import FindSharedPrefix, SharedPrefix, nothing_shared
from quire.ops.adapters import tile
from quire.ops.arguments import AdapterTiles
from quire.types.plan import spans


@dataclass(frozen=True)
class GroupView:
    """One cache group's page tables for the rows of this batch."""

    tables: Tensor  # [R, max_pages] int32; entry i holds positions i * page_size ...; 0 = no page
    write: Tensor  # [T] int64 page * page_size + offset of each token's own place
    alike: FindSharedPrefix = (
        nothing_shared  # which rows of one token have the same first pages; asked for by those who can use it
    )


@dataclass(frozen=True)
class LoRATokens:
    """The place of the adapter that each token's row has asked for; 0 = none."""

    places: npt.NDArray[np.int64]  # [T] on the host; of rows that are recorded, none
    device: torch.device  # of the batch
    tiles: AdapterTiles | None = None  # for kernels, which can do all that these adapters have

    @cached_property
    def groups(self) -> tuple[tuple[int, Tensor | None], ...]:
        """Places that are asked for, and by which tokens [n] int64; None = by all. None where kernels do it."""
        if self.tiles is not None:
            return ()
        places = np.unique(self.places).tolist()
        if len(places) == 1:
            return tuple((place, None) for place in places if place)
        return tuple((place, self._tokens_of(place)) for place in places if place)

    @cached_property
    def sorted(self) -> AdapterTiles:
        """For kernels of one layer, whoever does the rest."""
        return tile(self.places, self.device) if self.tiles is None else self.tiles

    def take(self, tokens: npt.NDArray[np.integer]) -> "LoRATokens":
        places = self.places[tokens]
        return LoRATokens(places, self.device, None if self.tiles is None else tile(places, self.device))

    def _tokens_of(self, place: int) -> Tensor:
        return torch.from_numpy(np.flatnonzero(self.places == place)).to(self.device, non_blocking=True)


@dataclass(frozen=True)
class Tokens:
    """What layers read of each token beside its hidden state, one field per feature; None = no token uses the feature.

    Every layer takes it, so that model code passes features on without naming them.
    """

    lora: LoRATokens | None = None

    def take(self, tokens: npt.NDArray[np.integer]) -> "Tokens":
        """tokens [n]: indices into these."""
        return self if self.lora is None else Tokens(self.lora.take(tokens))


PLAIN = Tokens()  # of tokens that use no feature


@dataclass(frozen=True)
class Batch:
    """R rows of tokens, one after the other; a row's last token is at position kv_length - 1. It may have none here."""

    ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    row_starts: Tensor  # [R + 1] int32
    kv_lengths: Tensor  # [R] int32 cached tokens of each row, those of this batch included
    rows: tuple[tuple[int, int, int], ...]  # host copy, R times: first token index, token count, kv length
    logit_index: Tensor  # [P] int64 those of the final tokens that feed logits
    groups: tuple[GroupView, ...]
    plans: dict[Any, Any] = field(default_factory=dict)  # what attention backends prepared for this batch, under their own keys
    kept: "LogitTokens | None" = None  # None = all tokens are
    tokens: Tokens = PLAIN
    entries: Tensor | None = None  # [R] int64 where the rows' recurrent states are; None = the model has none
    entry_list: tuple[int, ...] = ()  # the same on the host, where it knows

    @property
    def final(self) -> "Batch":
        """The tokens whose hidden states come out at the end."""
        return self if self.kept is None else self.kept.batch

    def keep(self, x: Tensor) -> Tensor:
        """x [T, ...] of all tokens -> of the final ones."""
        return x if self.kept is None else x[self.kept.index]


@dataclass(frozen=True)
class LogitTokens:
    """The tokens that go on behind the last attention, where all have left their keys and values: the last few of each row."""

    index: Tensor  # [K] int64 into the batch's tokens, rising
    batch: Batch  # these tokens alone; its rows are the same rows, and some of them are empty


def keep_last(batch: Batch, counts: npt.NDArray[np.int64], starts: Tensor, index: Tensor) -> Batch:
    """`batch`, of which only the last counts[r] tokens of row r are kept.

    `starts` [R + 1] int32 of the rows among the kept tokens and `index` [K] int64 of those say the same on the device.
    """
    first = np.cumsum(counts) - counts
    part = replace(
        batch,
        ids=batch.ids[index],
        positions=batch.positions[index],
        row_starts=starts,
        rows=tuple(zip(first.tolist(), counts.tolist(), (length for _, _, length in batch.rows), strict=True)),
        groups=tuple(GroupView(view.tables, view.write[index], _among(view.alike, counts == 1)) for view in batch.groups),
        plans={},
        tokens=batch.tokens.take(_last_of(batch, counts)) if batch.tokens.lora is not None else batch.tokens,
    )
    return replace(batch, kept=LogitTokens(index, part))


def without_lora(batch: Batch) -> Batch:
    """Return the batch for rows that use no LoRA adapter."""
    kept = batch.kept
    if kept is not None:
        kept = replace(kept, batch=replace(kept.batch, tokens=replace(kept.batch.tokens, lora=None)))
    return replace(batch, tokens=replace(batch.tokens, lora=None), kept=kept)


@dataclass(frozen=True)
class Part:
    """Some rows of a batch. Where these keep no token the part keeps one nevertheless, like every batch: it is of no use."""

    batch: Batch
    tokens: Tensor  # [T] int64 where its tokens are among all
    final: Tensor  # [K] int64 where its final tokens are among all final ones; it may have one more, behind them


def take_rows(batch: Batch, rows: Sequence[int]) -> Part:
    """These rows, in this order. On a CPU."""
    index = torch.tensor(rows, dtype=torch.int64)
    tokens, shapes, starts = _tokens_of(batch, rows)
    final, _, _ = (tokens, shapes, starts) if batch.kept is None else _tokens_of(batch.final, rows)
    part = replace(
        batch,
        ids=batch.ids[tokens],
        positions=batch.positions[tokens],
        row_starts=starts,
        kv_lengths=batch.kv_lengths[index],
        rows=shapes,
        logit_index=torch.arange(len(final)),
        groups=tuple(GroupView(view.tables[index], view.write[tokens]) for view in batch.groups),
        plans={},
        kept=None,
        tokens=batch.tokens.take(tokens.numpy()),
        entries=None if batch.entries is None else batch.entries[index],
        entry_list=tuple(batch.entry_list[row] for row in rows) if batch.entry_list else (),
    )
    if len(final) < len(tokens):
        counts = np.array([batch.final.rows[row][1] for row in rows], np.int64)
        if not counts.any():
            counts[-1] = 1
        first = starts[1:].long() - torch.from_numpy(counts)
        index = torch.cat(
            [torch.arange(start, start + count) for start, count in zip(first.tolist(), counts.tolist(), strict=True)]
        )
        part = keep_last(part, counts, torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32), index)
    return Part(part, tokens, final)


def _tokens_of(batch: Batch, rows: Sequence[int]) -> tuple[Tensor, tuple[tuple[int, int, int], ...], Tensor]:
    """Where the tokens of these rows are, and how the rows lie if there are no others: shapes, and starts [R + 1] int32."""
    taken = [batch.rows[row] for row in rows]
    tokens = torch.cat([torch.arange(start, start + count) for start, count, _ in taken])
    edges = np.cumsum([0, *(count for _, count, _ in taken)])
    shapes = tuple((start, count, length) for start, (_, count, length) in zip(edges.tolist(), taken, strict=False))
    return tokens, shapes, torch.from_numpy(edges.astype(np.int32))


def _last_of(batch: Batch, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The last counts[r] tokens of each row, among all."""
    ends = np.array([start + count for start, count, _ in batch.rows], np.int64)
    return spans(ends - counts, counts).astype(np.int64)


def _among(find: FindSharedPrefix, chosen: npt.NDArray[np.bool_]) -> FindSharedPrefix:
    def find_chosen(keys: int) -> SharedPrefix:
        return find(keys).among(chosen)

    return find_chosen
