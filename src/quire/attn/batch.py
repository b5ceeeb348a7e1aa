"""One step's ragged batch as the device sees it."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from quire.attn.alike import FindAlike, nothing_alike


@dataclass(frozen=True)
class GroupView:
    """One cache group's page tables for the rows of this batch."""

    tables: Tensor  # [R, max_pages] int32; entry i holds positions i * page_size ...; 0 = no page
    write: Tensor  # [T] int64 page * page_size + offset of each token's own place
    alike: FindAlike = nothing_alike  # which rows of one token have the same first pages; asked for by those who can use it


@dataclass(frozen=True)
class Batch:
    """R rows of tokens, one after the other; a row's last token is at position kv_length - 1."""

    ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    row_starts: Tensor  # [R + 1] int32
    kv_lengths: Tensor  # [R] int32 cached tokens of each row, those of this batch included
    rows: tuple[tuple[int, int, int], ...]  # host copy, R times: first token index, token count, kv length
    logit_index: Tensor  # [P] int64 tokens whose hidden state feeds logits
    groups: tuple[GroupView, ...]
    plans: dict[Any, Any] = field(default_factory=dict)  # what attention backends prepared for this batch, under their own keys
