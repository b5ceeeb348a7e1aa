"""Latent attention's rows: their norm and rotation, their way to the pages, and back."""

import torch
from torch import Tensor

from quire.ops.arguments import AdapterTable, AdapterTiles, Rotation
from quire.ops.norm import reference_rms_norm
from quire.ops.qkv import turn


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
