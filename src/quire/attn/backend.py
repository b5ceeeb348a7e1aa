"""The interface of attention backends: a backend refuses layers with reasons, plans a batch, and runs one layer.

`plan` does what needs the host (it reads `batch.rows` and builds index tensors); `run` only launches kernels. If plans can be
stored in fixed memory (`fixed`), the launches of `run` do not depend on the rows, so CUDA graphs can record them.
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
from quire.attn.spans import attend_spans
from quire.attn.work_split import FindSharedPrefix, Ints
from quire.ops.arguments import AdapterTable, HeadNorms, Rotation
from quire.ops.qkv import place_heads
from quire.types.errors import ConfigError

NO_LATENTS = "it requires keys and values"


@dataclass(frozen=True)
class AttentionSpec:
    """The mathematics of one attention layer."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None  # positions a query sees, itself included; None: all before it
    soft_cap: float | None = None
    sinks: bool = False
    slopes: tuple[float, ...] | None = None  # ALiBi slope of each head: what a logit loses per position of distance
    latent: int | None = None  # size of the latent, the first values of a cached row; None: keys and values are cached


class Room(NamedTuple):
    """Numbers of work items of an attention plan."""

    splits: int
    shared: int
    tiles: int = 0  # of rows with several tokens


class FixedPlans(Protocol):
    """Plans stored in fixed memory: only their values change from step to step."""

    def cut(self, counts: Ints, lengths: Ints, window: int | None, find: FindSharedPrefix) -> tuple[Any, Room] | None:
        """Return the work of rows with these tokens and keys [R], and its number of items; None: more than a plan holds."""
        ...

    def size(self, rows: int, room: Room) -> int:
        """Return how many integers a plan with this room has."""
        ...

    def numbers(self, cut: Any, rows: int, room: Room) -> Ints:
        """Return the plan [size(rows, room)] int32. Without room for tiles, all rows have one token, and every row beyond the
        cut ones gets one split of key length 1.
        """
        ...

    def renew(self, cut: Any, lengths: Ints, numbers: Ints) -> bool:
        """Update `numbers` in place to key lengths [R]; all rows have one token. Return False if the rows must be cut again."""
        ...

    def attach(self, batch: Batch, group: int, numbers: Tensor, rows: int, room: Room) -> None:
        """Make `run` of this batch and cache group follow the plan in `numbers` [size(rows, room)] int32."""
        ...


@dataclass(frozen=True)
class Heads:
    """What is applied to a layer's projected heads before and during attention."""

    rotation: Rotation | None = None
    norms: HeadNorms | None = None
    sinks: Tensor | None = None  # [heads]
    cache_scales: Tensor | None = None  # [2, kv_heads] float32 of keys and values, from the checkpoint, for an 8-bit cache


@dataclass(frozen=True)
class Latents:
    """How one cached row per token expands to the keys and values of all heads (multi-head latent attention).

    row   [ rank: normalized latent | rotary: key dimensions with RoPE, shared by all heads ]
    up    for each head, the projection to its keys' dimensions without RoPE, above the projection to its values
    """

    norm: Tensor  # [rank]
    eps: float
    rotation: Rotation
    up: Tensor  # [heads, nope + values, rank]
    nope: int  # dimensions of a query without RoPE; they come first
    table: AdapterTable | None = None  # LoRA additions to `up`, for kernels; None: none

    @property
    def values(self) -> int:
        return self.up.shape[1] - self.nope

    def worth_expanding(self, count: int) -> bool:
        """Return whether computing keys and values of all heads takes less work than projecting queries into the latent space,
        for rows that `count` tokens see.
        """
        rank = self.up.shape[2]
        return count * (2 * rank - self.up.shape[1]) >= rank * self.up.shape[1]


class AttentionBackend:
    """One attention kernel family. Every layer has its own instance, which may keep views of the layer's cache."""

    def refuse(self, spec: AttentionSpec, device: torch.device, dtype: torch.dtype) -> list[str]:
        """Return why this backend cannot serve such a layer with queries of that dtype; empty: it can."""
        raise NotImplementedError

    def plan(self, batch: Batch, group: int, spec: AttentionSpec, query: Tensor, kv: Tensor) -> None:
        """Prepare `run` for the layers of one cache group, in batch.plans; `run` does it if it was not called.

        `query` and `kv` are those of any of these layers.
        """
        raise NotImplementedError

    def run(self, spec: AttentionSpec, query: Tensor, kv: Tensor, batch: Batch, group: int, sinks: Tensor | None) -> Tensor:
        """Return attention's output, shaped like query [T, heads, head_dim].

        kv: [pages, 2, kv_heads, page_size, head_dim] with this batch's keys and values, of the same dtype, or of 8 bits with
            scales (`ops/kv.py`)
        """
        raise NotImplementedError

    def run_heads(
        self, spec: AttentionSpec, heads: Heads, qkv: Tensor, kv: Tensor, batch: Batch, group: int, final: bool
    ) -> Tensor:
        """Write keys and values to their pages and attend. May overwrite qkv [T, (heads + 2 * kv_heads) * head_dim].

        Return [T, heads * head_dim], or only the final tokens.
        """
        write = batch.groups[group].write
        query = place_heads(qkv, kv, write, batch.rotary_rows, heads.rotation, heads.norms, heads.cache_scales)
        if final:
            query, batch = batch.take_final(query), batch.final
        out = self.run(spec, query, kv, batch, group, heads.sinks)
        attend_spans(spec, lambda tokens: query[tokens], kv, batch, group, heads.sinks, out)
        return out.flatten(1)

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
        """Write rows to their pages and attend, for backends of latent attention.

        query: [K, heads, nope + rotary] of all tokens or of the final ones, as projected
        rows: [T, rank + rotary] of all tokens, as projected
        Return [K, heads * values].
        """
        raise NotImplementedError

    def fixed(self, spec: AttentionSpec, dtype: torch.dtype) -> FixedPlans | None:  # noqa: ARG002
        """Return the backend's fixed plans; None: its launches depend on the rows."""
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
    """Return the ALiBi slopes [heads] float32; None: the layer has none."""
    return None if spec.slopes is None else torch.tensor(spec.slopes, dtype=torch.float32, device=device)


def choose_backend(spec: AttentionSpec, device: torch.device, dtype: torch.dtype, name: str = "auto") -> AttentionBackend:
    """Return the backend of that name, or with "auto" the first that does not refuse."""
    if name != "auto" and name not in BACKENDS:
        raise ConfigError(f"attention backend must be auto, {', '.join(BACKENDS)}; got {name!r}")
    reasons = []
    for candidate in BACKENDS if name == "auto" else (name,):
        module, attribute = BACKENDS[candidate].split(":")
        backend: AttentionBackend = getattr(importlib.import_module(module), attribute)()
        refusals = backend.refuse(spec, device, dtype)
        if not refusals:
            return backend
        reasons.append(f"{candidate}: {', '.join(refusals)}")
    raise ConfigError(f"no attention backend can serve this layer ({'; '.join(reasons)})")
