"""Writing keys and values into their pages, and reading pages back.

One layer's cache is `[pages, 2, kv_heads, page_size, head_dim]`: keys at [:, 0], values at [:, 1], a page's tokens
contiguous per head. In memory it lies page by page, where a page's stride may be larger than its content (a view into a
larger page), or line by line: all pages of one head behind each other.
"""

import torch
from torch import Tensor


def kv_lines(kv: Tensor) -> Tensor | None:
    """The cache line by line, [2, kv_heads, pages * page_size, head_dim], if that is how it lies in memory."""
    pages, _, heads, page_size, head_dim = kv.shape
    lines = kv.permute(1, 2, 0, 3, 4)
    return lines.view(2, heads, pages * page_size, head_dim) if lines.is_contiguous() else None


def lies_by_page(kv: Tensor) -> bool:
    """Whether what a page holds is one piece of memory."""
    _, _, heads, page_size, head_dim = kv.shape
    return kv.stride()[1:] == (heads * page_size * head_dim, page_size * head_dim, head_dim, 1)


def kv_write(kv: Tensor, key: Tensor, value: Tensor, write: Tensor) -> None:
    """key and value [T, kv_heads, head_dim]; write [T] is page * page_size + offset of each token's place."""
    KVTarget(kv, torch.stack((key, value), dim=1)).put(write)


class KVTarget:
    """The way of pairs [T, 2, kv_heads, head_dim], key and value of each token, into the cache."""

    def __init__(self, kv: Tensor, pairs: Tensor) -> None:
        self._lines = kv_lines(kv)
        self._page_size = kv.shape[3]
        self._by_token = kv.transpose(2, 3)  # [pages, 2, page_size, kv_heads, head_dim]
        self._pairs = pairs if self._lines is None else pairs.permute(1, 2, 0, 3)

    def put(self, write: Tensor) -> None:
        """write [T] is page * page_size + offset of each token's place."""
        pairs = self._pairs if self._pairs.dtype == self._by_token.dtype else self._pairs.to(self._by_token.dtype)
        if self._lines is not None:
            self._lines.index_copy_(2, write, pairs)
        else:
            self._by_token[write // self._page_size, :, write % self._page_size] = pairs


def kv_gather(kv: Tensor, pages: Tensor) -> Tensor:
    """pages [B, P] -> a copy [2, B, kv_heads, P * page_size, head_dim] with each sequence's tokens in order."""
    count, _, heads, page_size, head_dim = kv.shape
    sequences, length = pages.shape
    if kv.is_contiguous():
        # one head's part of one page is one row, so a single copy puts everything in its final place
        rows = kv.view(count * 2 * heads, page_size * head_dim)
        lane = torch.arange(2 * heads, device=kv.device).view(2, 1, heads, 1)
        index = pages.long()[None, :, None, :] * (2 * heads) + lane  # [2, B, kv_heads, P]
        gathered = rows.index_select(0, index.flatten())
    elif kv.transpose(0, 1).is_contiguous():  # keys apart from values
        rows = kv.transpose(0, 1).view(2, count, heads * page_size * head_dim)
        by_page = rows.index_select(1, pages.flatten()).view(2, sequences, length, heads, -1)
        gathered = by_page.transpose(2, 3)
    elif (lines := kv_lines(kv)) is not None:
        by_page = lines.view(2, heads, count, page_size * head_dim).index_select(2, pages.flatten())
        gathered = by_page.view(2, heads, sequences, -1).transpose(1, 2)
    else:
        taken = kv.index_select(0, pages.flatten()).view(sequences, length, 2, heads, page_size, head_dim)
        gathered = taken.permute(2, 0, 3, 1, 4, 5)
    return gathered.reshape(2, sequences, heads, length * page_size, head_dim)
