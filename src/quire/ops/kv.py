"""Writing keys and values into their pages, and reading pages back.

One layer's cache is `[pages, 2, kv_heads, page_size, head_dim]`: keys at [:, 0], values at [:, 1], a page's tokens
contiguous per head. In memory it lies page by page, where a page's stride may be larger than its content (a view into a
larger page), or line by line: all pages of one head behind each other.

In a cache of 8 bits every token's key, and its value, has a scale for each head: that of its own largest number, or what a
checkpoint says. They lie behind the numbers of their page, and whoever has the numbers finds them there (`kv_scales`).

    a page   [ keys of head 0, head 1 ..., values of head 0 ... | scales of the keys of head 0, head 1 ..., of the values ... ]
"""

import torch
from torch import Tensor

SCALE = torch.float32
LEAST_SCALE = 1e-30
MANTISSA_BITS = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}


def kv_scales(kv: Tensor) -> Tensor | None:
    """[pages, 2, kv_heads, page_size] float32 of a cache of 8 bits, which lies page by page; None = it has more bits."""
    if kv.element_size() > 1:
        return None
    pages, _, heads, page_size, head_dim = kv.shape
    raw, size = kv.view(torch.uint8), SCALE.itemsize
    strides = kv.stride(0), heads * page_size * size, page_size * size, size, 1
    behind = raw.as_strided(
        (pages, 2, heads, page_size, size), strides, raw.storage_offset() + 2 * heads * page_size * head_dim
    )
    return behind.view(SCALE).squeeze(-1)


def round_kv(values: Tensor, dtype: torch.dtype, given: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """values [..., head_dim] -> numbers [..., head_dim] of 8 bits and scales [...] float32, or the given ones."""
    most, wide = torch.finfo(dtype).max, values.float()
    if given is not None:
        return (wide / given.unsqueeze(-1)).clamp(-most, most).to(dtype), given.expand(values.shape[:-1])
    scale = (wide.abs().amax(-1) / most).clamp(min=LEAST_SCALE)
    return (wide / scale.unsqueeze(-1)).to(dtype), scale


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
        self._scales = kv_scales(kv) if kv.element_size() == 1 else None
        self._lines = kv_lines(kv) if self._scales is None else None
        self._page_size = kv.shape[3]
        self._by_token = kv.transpose(2, 3)  # [pages, 2, page_size, kv_heads, head_dim]
        self._pairs = pairs if self._lines is None else pairs.permute(1, 2, 0, 3)

    def put(self, write: Tensor, given: Tensor | None = None) -> None:
        """write [T] is page * page_size + offset of each token's place; given [2, kv_heads]: scales of the checkpoint."""
        if self._scales is not None:
            self._put_rounded(self._scales, write, given)
            return
        pairs = self._pairs if self._pairs.dtype == self._by_token.dtype else self._pairs.to(self._by_token.dtype)
        if self._lines is not None:
            self._lines.index_copy_(2, write, pairs)
        else:
            self._by_token[write // self._page_size, :, write % self._page_size] = pairs

    def _put_rounded(self, kept: Tensor, write: Tensor, given: Tensor | None) -> None:
        numbers, scales = round_kv(self._pairs, self._by_token.dtype, given)
        page, offset = write // self._page_size, write % self._page_size
        self._by_token.view(torch.uint8)[page, :, offset] = numbers.view(torch.uint8)
        kept.transpose(2, 3)[page, :, offset] = scales


def kv_gather(kv: Tensor, pages: Tensor) -> Tensor:
    """pages [B, P] -> a copy [2, B, kv_heads, P * page_size, head_dim] with each sequence's tokens in order; of a cache of 8
    bits in float32."""
    count, _, heads, page_size, head_dim = kv.shape
    sequences, length = pages.shape
    if (scales := kv_scales(kv)) is not None:
        at = pages.flatten()
        numbers = kv.view(torch.uint8).index_select(0, at).view(kv.dtype).float()
        taken = numbers.mul_(scales.index_select(0, at).unsqueeze(-1))
        gathered = taken.view(sequences, length, 2, heads, page_size, head_dim).permute(2, 0, 3, 1, 4, 5)
    elif kv.is_contiguous():
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
