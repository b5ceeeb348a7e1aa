"""The inputs of rows, from arrays by slot."""

import numpy as np
from torch import Tensor

from quire.ops.arguments import RowInputs


def fill_rows(
    slot: Tensor, end: Tensor, starts: Tensor, tokens: Tensor, tables: Tensor, page_size: int, out: RowInputs
) -> None:
    """Write the model's inputs of the last positions before `end` of each row's slot.

    slot, end: [R] int64
    starts: [R + 1] int32 of the rows among the tokens
    tokens: [S, L] int32
    tables: [G, S, P] int32
    A row with slot -1 must have end 1: each of its tokens is token 0 at position 0 on the null page.
    """
    if slot.is_cuda:
        from quire.ops.kernels import rows

        rows.fill_rows(slot, end, starts, tokens, tables, page_size, out)
    else:
        reference_fill_rows(slot, end, starts, tokens, tables, page_size, out)


def reference_fill_rows(
    slot: Tensor, end: Tensor, starts: Tensor, tokens: Tensor, tables: Tensor, page_size: int, out: RowInputs
) -> None:
    """Use numpy, whose indexing takes a tenth of torch's time for small arrays."""
    slots, ends, firsts, known, pages = (tensor.numpy() for tensor in (slot, end, starts, tokens, tables))
    row = np.repeat(np.arange(len(slots)), np.diff(firsts))  # [T]
    real, held = slots >= 0, np.maximum(slots, 0)
    place = np.where(real[row], np.arange(len(row)) + (ends - firsts[1:])[row], 0)
    out.ids.numpy()[:] = np.where(real[row], known[held[row], place], 0)
    out.positions.numpy()[:] = place
    out.kv_lengths.numpy()[:] = ends
    page = place // page_size
    own = np.where(real[row], pages[:, held[row], page], 0)  # [G, T]
    out.write.numpy()[:] = own.astype(np.int64) * page_size + (place - page * page_size)
    width = min(pages.shape[2], out.tables.shape[2])
    theirs = np.arange(width) <= ((ends - 1) // page_size)[:, None]  # [R, width]
    np.copyto(out.tables.numpy()[:, :, :width], np.where(real[:, None], pages[:, held, :width], 0), where=theirs)
