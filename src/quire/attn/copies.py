"""Rows of one token whose pages do not follow each other, by the same calls as the others (`lines.py`): each layer's turn
begins with a copy of their pages, behind each other. So their numbers are those of any row. There is memory for so many; the
others are left to torch, whose numbers may differ by a rounding.

    pages of two rows    7 9 3 | 7 9 4 5
    copies               [ 7 9 3 . | 7 9 4 5 | ... ]

The layers of a cache group take turns with the same memory.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.attn.lines import Form, Lengths, LineAttention, Seats
from quire.ops.kv import kv_lines
from quire.ops.qkv import HeadNorms, Rotation

MOST_BYTES = 32 << 20  # of copies
ROOM = 64  # tokens by which a row's copies grow: rows whose copies move have to be led to them again

Table = npt.NDArray[np.int32]


class Copies:
    def __init__(self, form: Form, page_size: int, rows: int) -> None:
        """For at most so many rows of one step."""
        self._form, self._page_size, self._room = form, page_size, max(1, ROOM // page_size)
        page = page_size * form.head_dim
        self._most = max(self._room, MOST_BYTES // (2 * form.kv_heads * page * 4))  # pages
        self._by_page = torch.empty(2, form.kv_heads, self._most, page)  # what is not used is not there
        by_token = self._by_page.view(2, form.kv_heads, self._most, page_size, form.head_dim)
        self._kv, self._lines = by_token.permute(2, 0, 1, 3, 4), by_token.flatten(2, 3)
        self._qkv, self._out = torch.empty(rows, sum(form.columns)), torch.empty(rows, form.columns[0])
        self._seats = Seats(rows)
        self._known: dict[tuple[int, int], LineAttention] = {}
        self.seats = self._pages = self._there = self._here = torch.empty(0, dtype=torch.int64)

    def take(self, seats: npt.NDArray[np.int64], tables: Table, lengths: Lengths) -> npt.NDArray[np.int64]:
        """Rows on these seats of a track, with their pages [R, P] and numbers of keys [R]. Returns the seats for which there is
        no memory."""
        room = -(-lengths.astype(np.int64) // (self._page_size * self._room)) * self._room  # pages
        fits = self._find_fitting(room.tolist())
        seated, tables, lengths, room = seats[fits], tables[fits], lengths[fits], room[fits]
        tables = np.pad(tables, ((0, 0), (0, -tables.shape[1] % self._room)))
        starts, last = (room.cumsum() - room) * self._page_size, (lengths - 1) // self._page_size
        self.seats = torch.from_numpy(seated)
        self._pages = torch.from_numpy(tables[np.arange(tables.shape[1]) < room[:, None]])
        self._here = torch.from_numpy(starts + lengths - 1)
        own = tables[np.arange(len(tables)), last].astype(np.int64)
        self._there = torch.from_numpy(own * self._page_size + (lengths - 1) % self._page_size)
        if len(seated) and self._seats.take(starts, lengths):
            for attention in self._known.values():
                attention.place()
        return seats[~fits]

    def _find_fitting(self, room: list[int]) -> npt.NDArray[np.bool_]:
        fits, left = np.zeros(len(room), np.bool_), self._most
        for row, pages in enumerate(room):
            if pages <= left:
                fits[row] = True
                left -= pages
        return fits

    def attend(self, kv: Tensor, rotation: Rotation | None, norms: HeadNorms | None, qkv: Tensor, out: Tensor) -> None:
        """With a layer's cache, from qkv [C, columns] to out [C, heads * head_dim], which have a row per seat of the track.
        Rotations and norms have to stay; layers that have the same share a call."""
        key = id(rotation), id(norms)
        if key not in self._known:
            self._known[key] = LineAttention(self._form, self._kv, rotation, norms, self._qkv, self._out, self._seats)
            self._known[key].place()
        lines, count = kv_lines(kv), len(self.seats)
        assert lines is not None
        pages = lines.view(*self._by_page.shape[:2], -1, self._by_page.shape[3])
        torch.index_select(pages, 2, self._pages, out=self._by_page[:, :, : len(self._pages)])
        torch.index_select(qkv, 0, self.seats, out=self._qkv[:count])
        self._known[key].run()
        lines.index_copy_(2, self._there, self._lines.index_select(2, self._here))
        out.index_copy_(0, self.seats, self._out[:count])
