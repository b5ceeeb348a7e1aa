"""The inputs of rows of one token each, from the arrays that are kept by slot."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowInputs:
    """What a model reads of R rows of one token."""

    ids: Tensor  # [R] int64
    positions: Tensor  # [R] int64
    kv_lengths: Tensor  # [R] int32
    tables: Tensor  # [G, R, P] int32; entries beyond a row's own pages are left as they are
    write: Tensor  # [G, R] int64


def fill_rows(slot: Tensor, end: Tensor, tokens: Tensor, tables: Tensor, page_size: int, out: RowInputs) -> None:
    """slot and end [R] int64, tokens [S, L] int32, tables [G, S, P] int32: each row runs position end - 1 of its slot.

    A row whose slot is -1 must have the end 1: it runs token 0, alone, on the null page.
    """
    if slot.is_cuda:
        from quire.ops.kernels import rows

        rows.fill_rows(slot, end, tokens, tables, page_size, out)
    else:
        reference_fill_rows(slot, end, tokens, tables, page_size, out)


def reference_fill_rows(slot: Tensor, end: Tensor, tokens: Tensor, tables: Tensor, page_size: int, out: RowInputs) -> None:
    real, held, position = slot >= 0, slot.clamp(min=0), end - 1
    out.ids.copy_(torch.where(real, tokens[held, position].long(), 0))
    out.positions.copy_(position)
    out.kv_lengths.copy_(end)
    pages = torch.where(real[None, :, None], tables[:, held], 0)  # [G, R, P]
    own = pages.gather(2, (position // page_size).expand(len(tables), -1).unsqueeze(2)).squeeze(2)
    out.write.copy_(own.long() * page_size + position % page_size)
    width = min(pages.shape[2], out.tables.shape[2])
    theirs = torch.arange(width, device=slot.device) <= (position // page_size).unsqueeze(1)  # [R, width]
    out.tables[:, :, :width] = torch.where(theirs, pages[:, :, :width], out.tables[:, :, :width])
