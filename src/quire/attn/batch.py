"""The ragged batch of one step, as the device sees it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.attn.work_split import FindSharedPrefix, SharedPrefix, nothing_shared
from quire.ops.adapters import tile
from quire.ops.arguments import AdapterTiles, Rotation
from quire.types.plan import spans


@dataclass(frozen=True)
class GroupView:
    """The block tables of one KV cache group for the rows of the batch."""

    tables: Tensor  # [R, max_pages] int32; entry i holds positions i * page_size ...; 0: no page
    write: Tensor  # [T] int64 page * page_size + offset of each token's own key and value
    alike: FindSharedPrefix = nothing_shared  # finds decode rows with the same first pages; called by backends that use it


@dataclass(frozen=True)
class LoRATokens:
    """The LoRA adapter slot of each token; 0: none."""

    slots: npt.NDArray[np.int64]  # [T] adapter slots, on the host; empty in a CUDA graph
    device: torch.device  # of the batch
    tiles: AdapterTiles | None = None  # tokens sorted by adapter, for kernels; None: kernels do not support these adapters

    @cached_property
    def groups(self) -> tuple[tuple[int, Tensor | None], ...]:
        """Return the slots in use, each with its tokens [n] int64 (None: all tokens). Empty if kernels do it."""
        if self.tiles is not None:
            return ()
        slots = np.unique(self.slots).tolist()
        if len(slots) == 1:
            return tuple((slot, None) for slot in slots if slot)
        return tuple((slot, self._tokens_of(slot)) for slot in slots if slot)

    @cached_property
    def sorted(self) -> AdapterTiles:
        """Return `tiles`, made here if other layers run without kernels."""
        return tile(self.slots, self.device) if self.tiles is None else self.tiles

    def take(self, tokens: npt.NDArray[np.integer]) -> "LoRATokens":
        slots = self.slots[tokens]
        return LoRATokens(slots, self.device, None if self.tiles is None else tile(slots, self.device))

    def _tokens_of(self, slot: int) -> Tensor:
        return torch.from_numpy(np.flatnonzero(self.slots == slot)).to(self.device, non_blocking=True)


@dataclass(frozen=True)
class Tokens:
    """What layers read of each token besides its hidden state: one field per feature, None if no token uses the feature.

    Every layer takes it as an argument, so model code passes features on without naming them.
    """

    lora: LoRATokens | None = None

    def take(self, tokens: npt.NDArray[np.integer]) -> "Tokens":
        """Return the tokens at indices `tokens` [n]."""
        return self if self.lora is None else Tokens(self.lora.take(tokens))


PLAIN = Tokens()  # tokens that use no feature


@dataclass(frozen=True)
class MediaTokens:
    """Tokens of images and videos, whose embeddings come from an encoder."""

    places: npt.NDArray[np.int64]  # [N] their indices among the batch's tokens, rising, on the host
    index: Tensor  # [N] int64 the same on the device
    values: Tensor  # [N, levels * H] embeddings: for the input, then one for each of the first layers

    def level(self, number: int, columns: int) -> Tensor:
        """Return the embeddings [N, columns] of a level; 0: for the input."""
        return self.values[:, number * columns : (number + 1) * columns]

    def take(self, tokens: npt.NDArray[np.integer]) -> "MediaTokens | None":
        """Return those among `tokens` [n], with their places there; None: there are none."""
        places = np.flatnonzero(np.isin(tokens, self.places))
        if not len(places):
            return None
        own, device = np.searchsorted(self.places, tokens[places]), self.index.device
        return MediaTokens(places, torch.from_numpy(places).to(device), self.values[torch.from_numpy(own).to(device)])


@dataclass(frozen=True)
class RotaryTokens:
    """Rotary positions that differ from positions in the KV cache."""

    rows: Tensor  # [T] int64 row of each token in the table
    table: Rotation | None = None  # None: the layer's own

    def take(self, tokens: Tensor) -> "RotaryTokens":
        """Return those of tokens [n]."""
        return replace(self, rows=self.rows[tokens])


@dataclass(frozen=True)
class Span:
    """Positions of a row whose tokens attend to all of each other."""

    row: int
    start: int
    end: int
    windowed: bool  # a layer's sliding window limits how far back they attend


@dataclass(frozen=True)
class Batch:
    """R rows (requests) of tokens, concatenated. A row's last token is at position kv_length - 1; a row may have no tokens."""

    ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    row_starts: Tensor  # [R + 1] int32
    kv_lengths: Tensor  # [R] int32 cached tokens of each row, including this batch's
    rows: tuple[tuple[int, int, int], ...]  # host copy, R times: first token index, token count, kv length
    logit_index: Tensor  # [P] int64 which of the final tokens logits are computed for
    groups: tuple[GroupView, ...]
    plans: dict[Any, Any] = field(default_factory=dict)  # work plans of attention backends, by their own keys
    logit_tokens: "LogitTokens | None" = None  # None: all tokens go through the last layers
    tokens: Tokens = PLAIN
    entries: Tensor | None = None  # [R] int64 recurrent state entry of each row; None: the model has no recurrent layers
    entry_list: tuple[int, ...] = ()  # the same on the host, if the host knows
    token_types: Tensor | None = None  # [T] int64, of encoders that distinguish two texts; None: all tokens have type 0
    media: MediaTokens | None = None  # None: no token is of an image or a video
    rotary: RotaryTokens | None = None  # None: rotary positions are `positions`
    spans: tuple[Span, ...] = ()  # by rows, rising; every row with tokens in a span has all of its later ones

    @property
    def rotary_rows(self) -> Tensor:
        """Return the row [T] int64 of each token in its table of rotations."""
        return self.positions if self.rotary is None else self.rotary.rows

    @property
    def regular(self) -> bool:
        """Return whether layers do as for text: nothing is added after them, they use their own tables of rotations, and no
        token attends to later ones.
        """
        return self.media is None and not self.spans and (self.rotary is None or self.rotary.table is None)

    @property
    def final(self) -> "Batch":
        """Return the batch of the tokens whose hidden states the model returns."""
        return self if self.logit_tokens is None else self.logit_tokens.batch

    def take_final(self, x: Tensor) -> Tensor:
        """Return the final tokens' rows of x [T, ...]."""
        return x if self.logit_tokens is None else x[self.logit_tokens.index]


@dataclass(frozen=True)
class LogitTokens:
    """The last tokens of each row. Only these go through the layers after the last attention: all keys and values are written
    then."""

    index: Tensor  # [K] int64 into the batch's tokens, ascending
    batch: Batch  # of these tokens only; it has the same rows, some of them empty


def with_final_tokens(batch: Batch, counts: npt.NDArray[np.int64], starts: Tensor, index: Tensor) -> Batch:
    """Return `batch` with the last counts[r] tokens of row r as its final tokens.

    starts: [R + 1] int32 on the device, where the rows begin among the final tokens.
    index: [K] int64 on the device, the final tokens among all.
    """
    first = np.cumsum(counts) - counts
    last = _last_of(batch, counts) if batch.tokens.lora is not None or batch.media is not None else np.empty(0, np.int64)
    part = replace(
        batch,
        ids=batch.ids[index],
        positions=batch.positions[index],
        row_starts=starts,
        rows=tuple(zip(first.tolist(), counts.tolist(), (length for _, _, length in batch.rows), strict=True)),
        groups=tuple(GroupView(view.tables, view.write[index], _among(view.alike, counts == 1)) for view in batch.groups),
        plans={},
        tokens=batch.tokens.take(last),
        media=None if batch.media is None else batch.media.take(last),
        rotary=None if batch.rotary is None else batch.rotary.take(index),
    )
    return replace(batch, logit_tokens=LogitTokens(index, part))


def without_lora(batch: Batch) -> Batch:
    """Return the batch for rows that use no LoRA adapter."""
    final = batch.logit_tokens
    if final is not None:
        final = replace(final, batch=replace(final.batch, tokens=replace(final.batch.tokens, lora=None)))
    return replace(batch, tokens=replace(batch.tokens, lora=None), logit_tokens=final)


@dataclass(frozen=True)
class BatchPart:
    """Some rows of a batch. A part whose rows have no final token gets one, whose result is unused: every batch has final
    tokens."""

    batch: Batch
    tokens: Tensor  # [T] int64 indices of its tokens among all
    final: Tensor  # [K] int64 indices of its final tokens among all final ones; the unused one is excluded and comes last


def take_rows(batch: Batch, rows: Sequence[int]) -> BatchPart:
    """Return the batch of these rows, in this order. CPU only."""
    index = torch.tensor(rows, dtype=torch.int64)
    tokens, shapes, starts = _tokens_of(batch, rows)
    final, _, _ = (tokens, shapes, starts) if batch.logit_tokens is None else _tokens_of(batch.final, rows)
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
        logit_tokens=None,
        tokens=batch.tokens.take(tokens.numpy()),
        media=None if batch.media is None else batch.media.take(tokens.numpy()),
        rotary=None if batch.rotary is None else batch.rotary.take(tokens),
        spans=tuple(replace(span, row=rows.index(span.row)) for span in batch.spans if span.row in rows),
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
        part = with_final_tokens(part, counts, torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32), index)
    return BatchPart(part, tokens, final)


def _tokens_of(batch: Batch, rows: Sequence[int]) -> tuple[Tensor, tuple[tuple[int, int, int], ...], Tensor]:
    """Return the token indices of these rows, and their shapes and starts [R + 1] int32 in a batch of these rows only."""
    taken = [batch.rows[row] for row in rows]
    tokens = torch.cat([torch.arange(start, start + count) for start, count, _ in taken])
    edges = np.cumsum([0, *(count for _, count, _ in taken)])
    shapes = tuple((start, count, length) for start, (_, count, length) in zip(edges.tolist(), taken, strict=False))
    return tokens, shapes, torch.from_numpy(edges.astype(np.int32))


def _last_of(batch: Batch, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the indices of the last counts[r] tokens of each row."""
    ends = np.array([start + count for start, count, _ in batch.rows], np.int64)
    return spans(ends - counts, counts).astype(np.int64)


def _among(find: FindSharedPrefix, chosen: npt.NDArray[np.bool_]) -> FindSharedPrefix:
    def find_chosen(keys: int) -> SharedPrefix:
        return find(keys).among(chosen)

    return find_chosen
