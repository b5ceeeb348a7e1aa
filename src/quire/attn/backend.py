"""The seam between attention layers and kernels: a backend refuses with reasons, plans a batch, and runs one layer.

`plan` does whatever needs the host (it may look at `batch.rows`, build index tensors); `run` only launches work. Where plans
can be kept in memory that stays (`fixed`), the launches of `run` do not depend on the rows, and can be recorded.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from quire.attn.batch import Batch
from quire.attn.work_split import FindSharedPrefix, Ints
from quire.ops.arguments import AdapterTable, HeadNorms, Rotation
from quire.ops.qkv import place_heads
from quire.types.errors import ConfigError

NO_LATENTS = "it needs values beside keys"


@dataclass(frozen=True)
class AttentionSpec:
    """The mathematics of one attention layer."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None  # positions a query sees, itself included; None = all before it
    soft_cap: float | None = None
    sinks: bool = False
    slopes: tuple[float, ...] | None = None  # of each head: what a key's logit loses for every position it lies back (ALiBi)
    latent: int | None = None  # the first so many numbers of a key are its value; None = values lie beside keys


class Room(NamedTuple):
    """Pieces of attention work."""

    splits: int
    shared: int
    tiles: int = 0  # of rows of several tokens


class FixedPlans(Protocol):
    """Plans as numbers in memory that stays: only the numbers change from step to step."""

    def cut(self, counts: Ints, lengths: Ints, window: int | None, find: FindSharedPrefix) -> tuple[Any, Room] | None:
        """The work of rows with so many tokens and keys [R], and how much it is; None = it is more than any plan can take."""
        ...

    def size(self, rows: int, room: Room) -> int:
        """How many numbers a plan with so much room has."""
        ...

    def numbers(self, cut: Any, rows: int, room: Room) -> Ints:
        """[size(rows, room)] what was cut. Without room for tiles, all rows have one token, and there is one split for each row
        beyond those that were cut: its key length is 1."""
        ...

    def renew(self, cut: Any, lengths: Ints, numbers: Ints) -> bool:
        """Rows of one token that were cut have so many keys [R] by now, and their `numbers` are made to say so. False = they
        are to be cut anew."""
        ...

    def attach(self, batch: Batch, group: int, numbers: Tensor, rows: int, room: Room) -> None:
        """From now on `run` of this batch and cache group follows what stands in `numbers` [size(rows, room)] int32."""
        ...


@dataclass(frozen=True)
class Heads:
    """What is done to a layer's projected heads before and while it attends."""

    rotation: Rotation | None = None
    norms: HeadNorms | None = None
    sinks: Tensor | None = None  # [heads]
    cache_scales: Tensor | None = None  # [2, kv_heads] float32, of keys and values: the checkpoint's, for a cache of 8 bits


@dataclass(frozen=True)
class Latents:
    """What keys and values of all heads are made of: one row for each token, normed but for its end, which turns instead.

    row   [ rank: what keys and values are made of | rotary: turns, and is the same for all heads ]
    up    of each head: rows that make the first part of its keys, above those that make its values
    """

    norm: Tensor  # [rank]
    eps: float
    rotation: Rotation
    up: Tensor  # [heads, nope + values, rank]
    nope: int  # numbers of a query that do not turn; it begins with them
    table: AdapterTable | None = None  # what adapters add to `up`, for kernels; None = nothing

    @property
    def values(self) -> int:
        return self.up.shape[1] - self.nope

    def worth_expanding(self, count: int) -> bool:
        """Whether keys and values of all heads are worth making of the rows that so many tokens see: otherwise queries are
        taken to where the rows are, which is more work for every pair of them."""
        rank = self.up.shape[2]
        return count * (2 * rank - self.up.shape[1]) >= rank * self.up.shape[1]


class AttentionBackend:
    """One for each layer, so that it may keep views of the layer's cache."""

    def refuse(self, spec: AttentionSpec, device: torch.device, dtype: torch.dtype) -> list[str]:
        """Why this backend cannot serve such a layer, whose queries have that type; empty = it can."""
        raise NotImplementedError

    def plan(self, batch: Batch, group: int, spec: AttentionSpec, query: Tensor, kv: Tensor) -> None:
        """Prepares `run` for the layers of one cache group, into batch.plans. Run does it itself if nobody did before.

        `query` and `kv` are those of any of these layers.
        """
        raise NotImplementedError

    def run(self, spec: AttentionSpec, query: Tensor, kv: Tensor, batch: Batch, group: int, sinks: Tensor | None) -> Tensor:
        """query [T, heads, head_dim], kv [pages, 2, kv_heads, page_size, head_dim] (this batch's keys are in) of the same type,
        or of 8 bits with scales (`ops/kv.py`) -> like query."""
        raise NotImplementedError

    def run_heads(
        self, spec: AttentionSpec, heads: Heads, qkv: Tensor, kv: Tensor, batch: Batch, group: int, final: bool
    ) -> Tensor:
        """qkv [T, (heads + 2 * kv_heads) * head_dim], which it may overwrite: keys and values go to their pages, and queries
        attend -> [T, heads * head_dim], or those of the final tokens alone."""
        write = batch.groups[group].write
        query = place_heads(qkv, kv, write, batch.positions, heads.rotation, heads.norms, heads.cache_scales)
        if final:
            query, batch = batch.take_final(query), batch.final
        return self.run(spec, query, kv, batch, group, heads.sinks).flatten(1)

    def run_latent(
        self,
        spec: AttentionSpec,
        latents: Latents,
        query: Tensor,
        rows: Tensor,
        kv: Tensor,
        batch: Batch,
        group: int,
        final: bool,
    ) -> Tensor:
        """query [K, heads, nope + rotary] of all tokens or of the final ones, and rows [T, rank + rotary] of all, as projected:
        rows go to their pages, and queries attend -> [K, heads * values]. For backends of latent attention alone."""
        raise NotImplementedError

    def fixed(self, spec: AttentionSpec, dtype: torch.dtype) -> FixedPlans | None:  # noqa: ARG002
        """None = the launches of this backend depend on the rows."""
        return None


# in order of preference; the targets are imported when first tried
BACKENDS: Mapping[str, str] = MappingProxyType(
    {
        "triton": "quire.attn.triton:TritonAttention",
        "cpu": "quire.attn.cpu:CPUAttention",
        "reference": "quire.attn.reference:ReferenceAttention",
        "latent triton": "quire.attn.latent_triton:LatentTriton",
        "latent": "quire.attn.reference:LatentAttention",
    }
)


@lru_cache
def slopes_of(spec: AttentionSpec, device: torch.device) -> Tensor | None:
    """[heads] float32, where a layer has them."""
    return None if spec.slopes is None else torch.tensor(spec.slopes, dtype=torch.float32, device=device)


def choose_backend(spec: AttentionSpec, device: torch.device, dtype: torch.dtype, name: str = "auto") -> AttentionBackend:
    """The backend of that name, or with "auto" the first that does not refuse."""
    if name != "auto" and name not in BACKENDS:
        raise ConfigError(f"unknown attention backend {name!r}; known are auto, {', '.join(BACKENDS)}")
    reasons = []
    for candidate in BACKENDS if name == "auto" else (name,):
        module, attribute = BACKENDS[candidate].split(":")
        backend: AttentionBackend = getattr(importlib.import_module(module), attribute)()
        refusals = backend.refuse(spec, device, dtype)
        if not refusals:
            return backend
        reasons.append(f"{candidate}: {', '.join(refusals)}")
    raise ConfigError(f"no attention backend can serve this layer ({'; '.join(reasons)})")
