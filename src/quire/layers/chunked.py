"""Attention within chunks: a token sees those before it that are in the same chunk of positions, and no other.

To kernels that is attention to everything, of rows that begin where a chunk does: a row that crosses chunks becomes several,
and the page table of each begins with its chunk's first page. So chunks are made of whole pages.
"""

from dataclasses import replace

import numpy as np
import torch

from quire.attn.batch import Batch, GroupView


def cut_rows(batch: Batch, group: int, chunk: int, page_size: int) -> Batch:
    """The same tokens, all of them final, in rows that end where chunks do. Of the groups only `group` may be attended to.
    Made once for each batch."""
    key = "chunks", group, chunk
    if key in batch.plans:
        found: Batch = batch.plans[key]
        return found
    source, first, rows = list[int](), list[int](), list[tuple[int, int, int]]()
    for row, (start, count, length) in enumerate(batch.rows):
        at, end = length - count, length
        while at < end:
            stop = min(end, at // chunk * chunk + chunk)
            source.append(row)
            first.append(at // chunk * chunk // page_size)
            rows.append((start + at - (length - count), stop - at, stop - at // chunk * chunk))
            at = stop
    tables, device = batch.groups[group].tables, batch.ids.device
    width = min(tables.shape[1], chunk // page_size)
    columns = torch.tensor(first, device=device)[:, None] + torch.arange(width, device=device)
    part = tables[torch.tensor(source, device=device)[:, None], columns.clamp_(max=tables.shape[1] - 1)].contiguous()
    views = [GroupView(part, view.write) if i == group else view for i, view in enumerate(batch.groups)]
    cut = replace(
        batch,
        row_starts=torch.tensor([0, *np.cumsum([count for _, count, _ in rows])], dtype=torch.int32, device=device),
        kv_lengths=torch.tensor([length for _, _, length in rows], dtype=torch.int32, device=device),
        rows=tuple(rows),
        groups=tuple(views),
        plans={},
        kept=None,
    )
    batch.plans[key] = cut
    return cut
