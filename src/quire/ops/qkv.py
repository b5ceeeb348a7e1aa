"""Between the projection and attention: head norms, rotation, and the way of keys and values to their pages."""

from dataclasses import dataclass

from torch import Tensor

from quire.ops.kv import kv_write
from quire.ops.norm import reference_rms_norm
from quire.ops.rotary import rotate


@dataclass(frozen=True)
class HeadNorms:
    """Root-mean-square norms of every query head and of every key head."""

    query: Tensor  # [head_dim]
    key: Tensor  # [head_dim]
    eps: float
    offset: float  # added to both weights


@dataclass(frozen=True)
class Rotation:
    cos: Tensor  # [max_position, rotary_dim / 2] float32
    sin: Tensor  # [max_position, rotary_dim / 2] float32


def place_heads(
    qkv: Tensor, kv: Tensor, write: Tensor, positions: Tensor, rotation: Rotation | None, norms: HeadNorms | None
) -> Tensor:
    """qkv [T, (heads + 2 * kv_heads) * head_dim] -> query [T, heads, head_dim], normed and turned; it may overwrite qkv.

    Keys, normed and turned, and values go to `write` [T] in kv [pages, 2, kv_heads, page_size, head_dim].
    """
    if qkv.is_cuda:
        from quire.ops.kernels import qkv as kernels

        return kernels.place_heads(qkv, kv, write, positions, rotation, norms)
    return reference_place_heads(qkv, kv, write, positions, rotation, norms)


def reference_place_heads(
    qkv: Tensor, kv: Tensor, write: Tensor, positions: Tensor, rotation: Rotation | None, norms: HeadNorms | None
) -> Tensor:
    kv_heads, head_dim = kv.shape[2], kv.shape[4]
    lanes = qkv.view(len(qkv), -1, head_dim)
    heads = lanes.shape[1] - 2 * kv_heads
    query, key, value = lanes[:, :heads], lanes[:, heads : heads + kv_heads], lanes[:, heads + kv_heads :]
    if norms is not None:
        query = reference_rms_norm(query, norms.query, norms.eps, norms.offset)
        key = reference_rms_norm(key, norms.key, norms.eps, norms.offset)
    if rotation is not None:
        query, key = (rotate(part, positions, rotation.cos, rotation.sin) for part in (query, key))
    kv_write(kv, key, value, write)
    return query
