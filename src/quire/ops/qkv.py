"""Between projection and attention: head norms, RoPE, and the write of keys and values to their pages."""

import torch
from torch import Tensor

from quire.ops.arguments import AdapterTable, AdapterTiles, HeadNorms, Rotation
from quire.ops.kv import KVTarget
from quire.ops.norm import reference_rms_norm


def place_heads(
    qkv: Tensor,
    kv: Tensor,
    write: Tensor,
    positions: Tensor,
    rotation: Rotation | None,
    norms: HeadNorms | None,
    given: Tensor | None = None,
) -> Tensor:
    """Return query [T, heads, head_dim], normalized and rotated, of qkv [T, (heads + 2 * kv_heads) * head_dim]. May overwrite
    qkv.

    Keys, normalized and rotated, and values are written to `write` [T] in kv [pages, 2, kv_heads, page_size, head_dim]; to an
    8-bit cache with the `given` scales [2, kv_heads] float32, if any.
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
    """Views of a projection and of the cache, valid for these tensors. On a CPU a view costs as much as the arithmetic of one
    token, so callers with fixed memory reuse them.
    """

    def __init__(self, qkv: Tensor, kv: Tensor) -> None:
        kv_heads, head_dim = kv.shape[2], kv.shape[4]
        self.qkv, self.kv = qkv, kv
        lanes = qkv.view(len(qkv), -1, head_dim)
        heads = lanes.shape[1] - 2 * kv_heads
        self.query, self.key = lanes[:, :heads], lanes[:, heads : heads + kv_heads]
        self.rotated = lanes[:, : heads + kv_heads]
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
        """Apply norms and RoPE to queries and keys in place."""
        if norms is not None:
            self.query.copy_(reference_rms_norm(self.query, norms.query, norms.eps, norms.offset))
            self.key.copy_(reference_rms_norm(self.key, norms.key, norms.eps, norms.offset))
        if rotation is not None:
            turn(self.rotated, *rotation.rows(positions), rotation.interleaved)


def turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> None:
    """Apply rotary position embedding to the first rotary_dim dimensions of each head in place, by halves or interleaved.
    Computed in float32.

    x: [T, heads, head_dim]
    cos, sin: [T, 1, rotary_dim] float32, the sines of each pair's first dimension negative
    """
    size = cos.shape[-1]
    rotary = x if size == x.shape[-1] else x[..., :size]
    wide = rotary if rotary.dtype == torch.float32 else rotary.float()
    if interleaved:
        swapped = wide.view(*wide.shape[:-1], -1, 2).flip(-1).flatten(-2)
    else:
        swapped = torch.cat(wide.chunk(2, dim=-1)[::-1], dim=-1)
    rotated = torch.mul(wide, cos, out=wide).addcmul_(swapped, sin)
    if rotated is not rotary:
        rotary.copy_(rotated)


def place_rows(
    rows: Tensor, kv: Tensor, write: Tensor, positions: Tensor, norm: Tensor, eps: float, rotation: Rotation
) -> None:
    """Normalize rows [T, rank + rotary], as projected, apply RoPE to their end, and write them to `write` [T] in
    kv [pages, 1, 1, page_size, rank + rotary].
    """
    rank, page_size = len(norm), kv.shape[3]
    made = torch.empty_like(rows, memory_format=torch.contiguous_format)
    made[:, :rank] = reference_rms_norm(rows[:, :rank], norm, eps, 0.0)
    made[:, rank:] = rows[:, rank:]
    turn(made.unsqueeze(1)[:, :, rank:], *rotation.rows(positions), rotation.interleaved)
    kv[write // page_size, 0, 0, write % page_size] = made.to(kv.dtype)


def turn_queries(query: Tensor, nope: int, positions: Tensor, rotation: Rotation) -> Tensor:
    """Return query [T, heads, nope + rotary] with RoPE applied to its end."""
    query = query.clone(memory_format=torch.contiguous_format)
    turn(query[:, :, nope:], *rotation.rows(positions), rotation.interleaved)
    return query


def gather_rows(kv: Tensor, pages: Tensor, length: int) -> Tensor:
    """Return the first `length` rows of pages [P], [length, rank + rotary]."""
    return kv[:, 0, 0].index_select(0, pages).flatten(0, 1)[:length]


def add_to_near(near: Tensor, query: Tensor, matrix: Tensor, nope: int, rows: AdapterTiles, table: AdapterTable) -> None:
    """Apply adapters to projected queries near [K, heads, rank + rotary], in place. GPU only.

    query: [K, heads, nope + rotary]
    matrix: [heads, nope + values, rank]
    """
    from quire.ops.kernels import latent_adapters

    latent_adapters.add_to_near(near, query, matrix, nope, rows, table)


def add_to_values(out: Tensor, found: Tensor, nope: int, rows: AdapterTiles, table: AdapterTable) -> None:
    """Apply adapters to out [K, heads, values], in place; found [K, heads, rank]. GPU only."""
    from quire.ops.kernels import latent_adapters

    latent_adapters.add_to_values(out, found, nope, rows, table)
