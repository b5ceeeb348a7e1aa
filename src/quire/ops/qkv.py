"""Between the projection and attention: head norms, rotation, and the way of keys and values to their pages."""

import torch
from torch import Tensor

from quire.ops.arguments import HeadNorms, Rotation
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
