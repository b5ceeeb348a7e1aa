"""Attention of every token of a step by itself, by the kernel in C (`ops/one_query.py`): what a token gets depends neither on
how its prompt was cut nor on who is beside it. Where products have that property too (`ops/native.py`), a whole decoder does.
"""

import torch
from torch import Tensor

from quire.attn.backend import AttentionSpec
from quire.attn.batch import Batch
from quire.attn.cpu import token_rows
from quire.ops.native import run_decoders
from quire.ops.one_query import OneQuery, suits
from quire.ops.qkv import HeadNorms, Rotation


class Singly:
    """One step of one layer."""

    def __init__(self, spec: AttentionSpec, kv: Tensor, group: int, rotation: Rotation | None, norms: HeadNorms | None) -> None:
        self._spec, self._kv, self._group, self._rotation, self._norms = spec, kv, group, rotation, norms

    def place(self, qkv: Tensor, batch: Batch) -> Tensor:
        """qkv [T, (heads + 2 * kv_heads) * head_dim]: keys and values go to their pages; -> queries [T, heads * head_dim], as
        they were."""
        self._bind(qkv, None).run(token_rows(batch, self._group))
        return qkv[:, : self._spec.heads * self._spec.head_dim]

    def attend(self, query: Tensor, batch: Batch) -> Tensor:
        """query [T, heads * head_dim], neither normed nor turned -> the same shape."""
        out = torch.zeros(query.shape)
        self._bind(query, out).run(token_rows(batch, self._group))
        return out

    def _bind(self, qkv: Tensor, out: Tensor | None) -> OneQuery:
        spec = self._spec
        return OneQuery(
            self._kv, qkv, out,
            scale=spec.scale, window=spec.window, rotation=self._rotation, norms=self._norms, placed=out is not None,
        )  # fmt: skip


def wanted(spec: AttentionSpec, kv: Tensor) -> bool:
    return spec.soft_cap is None and not spec.sinks and not kv.is_cuda and suits(kv) and run_decoders()
