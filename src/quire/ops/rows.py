"""The inputs of rows, from the arrays that are kept by slot."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowInputs:
    """What a model reads of R rows with T tokens."""

    ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    kv_lengths: Tensor  # [R] int32
    tables: Tensor  # [G, R, P] int32; entries beyond a row's own pages are left as they are
    write: Tensor  # [G, T] int64


def fill_rows(
    slot: Tensor, end: Tensor, starts: Tensor, tokens: Tensor, tables: Tensor, page_size: int, out: RowInputs
) -> None:
    """slot and end [R] int64, starts [R + 1] int32 of the rows among the tokens, tokens [S, L] int32, tables [G, S, P] int32:
    each row runs the last positions of its slot before `end`.

    A row whose slot is -1 must have the end 1: each of its tokens is token 0, alone at position 0 on the null page.
    """
    if slot.is_cuda:
        from quire.ops.kernels import rows

        rows.fill_rows(slot, end, starts, tokens, tables, page_size, out)
    else:
        reference_fill_rows(slot, end, starts, tokens, tables, page_size, out)


def reference_fill_rows(
    slot: Tensor, end: Tensor, starts: Tensor, tokens: Tensor, tables: Tensor, page_size: int, out: RowInputs
) -> None:
    row = torch.repeat_interleave(starts.diff())  # [T]
    real, held = slot >= 0, slot.clamp(min=0)
    position = torch.where(real[row], torch.arange(len(row), device=slot.device) + (end - starts[1:])[row], 0)
    out.ids.copy_(torch.where(real[row], tokens[held[row], position], 0))
    out.positions.copy_(position)
    out.kv_lengths.copy_(end)
    page = position // page_size
    own = torch.where(real[row], tables[:, held[row], page], 0)  # [G, T]
    out.write.copy_(own.long() * page_size + (position - page * page_size))
    width = min(tables.shape[2], out.tables.shape[2])
    theirs = torch.arange(width, device=slot.device) <= ((end - 1) // page_size)[:, None]  # [R, width]
    pages = torch.where(real[:, None], tables[:, held, :width], 0)
    out.tables[:, :, :width] = torch.where(theirs, pages, out.tables[:, :, :width])
