"""Between the projection and attention: head norms, rotation, and the way of keys and values to their pages."""

import torch
from torch import Tensor

from quire.ops.arguments import AdapterTable, AdapterTiles, HeadNorms, Rotation
from quire.ops.norm import reference_rms_norm

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


def place_heads(
    qkv: Tensor,
    kv: Tensor,
    write: Tensor,
    positions: Tensor,
    rotation: Rotation | None,
    norms: HeadNorms | None,
    given: Tensor | None = None,
) -> Tensor:
    """qkv [T, (heads + 2 * kv_heads) * head_dim] -> query [T, heads, head_dim], normed and turned; it may overwrite qkv.

    Keys, normed and turned, and values go to `write` [T] in kv [pages, 2, kv_heads, page_size, head_dim]; to a cache of 8 bits
    with the `given` scales [2, kv_heads] float32, if there are any.
    """
    if qkv.is_cuda:
        from quire.ops.kernels import qkv as kernels

        return kernels.place_heads(qkv, kv, write, positions, rotation, norms, given)
    return reference_place_heads(qkv, kv, write, positions, rotation, norms, given)


def reference_place_heads(
    qkv: Tensor,
    kv: Tensor,
    write: Tensor,
    positions: Tensor,
    rotation: Rotation | None,
    norms: HeadNorms | None,
    given: Tensor | None = None,
) -> Tensor:
    return Lanes(qkv, kv).place(write, positions, rotation, norms, given)


class Lanes:
    """Views of a projection and of the cache. They hold as long as both are the same tensors: on a CPU a view costs as much as
    the arithmetic of one token, so whoever projects into the same memory step after step keeps them."""

    def __init__(self, qkv: Tensor, kv: Tensor) -> None:
        kv_heads, head_dim = kv.shape[2], kv.shape[4]
        self.qkv, self.kv = qkv, kv
        lanes = qkv.view(len(qkv), -1, head_dim)
        heads = lanes.shape[1] - 2 * kv_heads
        self.query, self.key = lanes[:, :heads], lanes[:, heads : heads + kv_heads]
        self.turning = lanes[:, : heads + kv_heads]
        self.target = KVTarget(kv, lanes[:, heads:].view(-1, 2, kv_heads, head_dim))

    def place(
        self,
        write: Tensor,
        positions: Tensor,
        rotation: Rotation | None,
        norms: HeadNorms | None,
        given: Tensor | None = None,
    ) -> Tensor:
        self.prepare(positions, rotation, norms)
        self.target.put(write, given)
        return self.query

    def prepare(self, positions: Tensor, rotation: Rotation | None, norms: HeadNorms | None) -> None:
        """Norms and turns queries and keys in place."""
        if norms is not None:
            self.query.copy_(reference_rms_norm(self.query, norms.query, norms.eps, norms.offset))
            self.key.copy_(reference_rms_norm(self.key, norms.key, norms.eps, norms.offset))
        if rotation is not None:
            turn(self.turning, *rotation.rows(positions), rotation.interleaved)


def turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> None:
    """Rotary position embedding: turns the first rotary_dim components of each head in place, by halves (the pairing that most
    Hugging Face checkpoints are stored for) or interleaved; the others stay. Computed in float32.

    x [T, heads, head_dim]; cos and sin [T, 1, rotary_dim] float32, the sines of each pair's first component negative.
    """
    size = cos.shape[-1]
    turning = x if size == x.shape[-1] else x[..., :size]
    wide = turning if turning.dtype == torch.float32 else turning.float()
    if interleaved:
        swapped = wide.view(*wide.shape[:-1], -1, 2).flip(-1).flatten(-2)
    else:
        swapped = torch.cat(wide.chunk(2, dim=-1)[::-1], dim=-1)
    turned = torch.mul(wide, cos, out=wide).addcmul_(swapped, sin)
    if turned is not turning:
        turning.copy_(turned)


def place_rows(
    rows: Tensor, kv: Tensor, write: Tensor, positions: Tensor, norm: Tensor, eps: float, rotation: Rotation
) -> None:
    """rows [T, rank + rotary], as projected: normed, and turned at their end, they go to `write` [T] in
    kv [pages, 1, 1, page_size, rank + rotary]."""
    rank, page_size = len(norm), kv.shape[3]
    made = torch.empty_like(rows, memory_format=torch.contiguous_format)
    made[:, :rank] = reference_rms_norm(rows[:, :rank], norm, eps, 0.0)
    made[:, rank:] = rows[:, rank:]
    turn(made.unsqueeze(1)[:, :, rank:], *rotation.rows(positions), rotation.interleaved)
    kv[write // page_size, 0, 0, write % page_size] = made.to(kv.dtype)


def turn_queries(query: Tensor, nope: int, positions: Tensor, rotation: Rotation) -> Tensor:
    """query [T, heads, nope + rotary] -> the same, turned at its end."""
    query = query.clone(memory_format=torch.contiguous_format)
    turn(query[:, :, nope:], *rotation.rows(positions), rotation.interleaved)
    return query


def gather_rows(kv: Tensor, pages: Tensor, length: int) -> Tensor:
    """pages [P] -> the first `length` rows that they hold, [length, rank + rotary]."""
    return kv[:, 0, 0].index_select(0, pages).flatten(0, 1)[:length]


def add_to_near(near: Tensor, query: Tensor, matrix: Tensor, nope: int, rows: AdapterTiles, table: AdapterTable) -> None:
    """near [K, heads, rank + turning], which it overwrites, of query [K, heads, nope + turning] and
    matrix [heads, nope + values, rank], to which adapters add. On a GPU."""
    from quire.ops.kernels import latent_adapters

    latent_adapters.add_to_near(near, query, matrix, nope, rows, table)


def add_to_values(out: Tensor, found: Tensor, nope: int, rows: AdapterTiles, table: AdapterTable) -> None:
    """out [K, heads, values], which it overwrites, of found [K, heads, rank]. On a GPU."""
    from quire.ops.kernels import latent_adapters

    latent_adapters.add_to_values(out, found, nope, rows, table)
