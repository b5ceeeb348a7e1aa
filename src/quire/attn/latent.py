"""Latent attention in torch, on any device, row by row: a cache of one row of numbers for each token, of which the keys and
values of all heads are made. What the kernels are compared with, and the way on CPUs.

Two ways to the same result. *Absorbed*: a query is taken to where the rows are, by the matrix that would make keys of them, and
what it finds there is made a value; nothing is made of the rows themselves. *Expanded*: the keys and values of all heads are
made of the rows, and attention is as always. The first is for few tokens, the second for prompts.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.attn.backend import AttentionBackend, AttentionSpec, Latents
from quire.attn.batch import Batch
from quire.ops.qkv import gather_rows, place_rows, turn_queries


class LatentAttention(AttentionBackend):
    def refuse(self, spec: AttentionSpec, device: torch.device, dtype: torch.dtype) -> list[str]:  # noqa: ARG002
        return ["it needs a cache of latents"] if spec.latent is None else []

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
        assert latents.table is None
        place_rows(rows, kv, batch.groups[group].write, batch.positions, latents.norm, latents.eps, latents.rotation)
        batch = batch.final if final else batch
        tables = batch.groups[group].tables
        query = turn_queries(query, latents.nope, batch.positions, latents.rotation)
        out = query.new_zeros(len(query), spec.heads, latents.values)
        few = [row for row, (_, count, _) in enumerate(batch.rows) if count and not latents.worth_expanding(count)]
        near = absorb(query, latents) if few else query
        found = near.new_zeros(len(query), spec.heads, len(latents.norm)) if few else out
        for row, (start, count, length) in enumerate(batch.rows):
            if not count:
                continue
            part = slice(start, start + count)
            pages = tables[row, : -(-length // kv.shape[3])].long()
            held = gather_rows(kv, pages, length).to(query.dtype)
            if latents.worth_expanding(count):
                out[part] = _expanded(spec, latents, query[part], held)
            else:
                found[part] = _absorbed(spec, near[part], held)
        for row in few:
            start, count, _ = batch.rows[row]
            part = slice(start, start + count)
            out[part] = torch.einsum("thr,hvr->thv", found[part], latents.up[:, latents.nope :])
        return out.flatten(1)


def absorb(query: Tensor, latents: Latents) -> Tensor:
    """query [T, heads, nope + rotary], turned -> [T, heads, rank + rotary]: its products with rows are those with keys."""
    near = torch.einsum("thn,hnr->thr", query[..., : latents.nope], latents.up[:, : latents.nope])
    return torch.cat((near, query[..., latents.nope :]), dim=-1)


def _absorbed(spec: AttentionSpec, query: Tensor, held: Tensor) -> Tensor:
    """query [N, heads, rank + rotary] of the last N of the rows held [S, rank + rotary] -> [N, heads, rank]."""
    assert spec.latent is not None
    logits = (query.flatten(0, 1) @ held.t()).view(*query.shape[:2], -1).float() * spec.scale
    if len(query) > 1:
        logits.masked_fill_(~_visible(len(query), len(held), held.device)[:, None], float("-inf"))
    weights = logits.softmax(-1).to(held.dtype)
    return (weights.flatten(0, 1) @ held[:, : spec.latent]).view(*query.shape[:2], -1)


def _expanded(spec: AttentionSpec, latents: Latents, query: Tensor, held: Tensor) -> Tensor:
    """query [N, heads, nope + rotary] of the last N of the rows held [S, rank + rotary] -> [N, heads, values]."""
    assert spec.latent is not None
    made = F.linear(held[:, : spec.latent], latents.up.flatten(0, 1)).view(len(held), spec.heads, -1)
    turned = held[:, None, spec.latent :].expand(-1, spec.heads, -1)
    keys, values = torch.cat((made[..., : latents.nope], turned), dim=-1), made[..., latents.nope :]
    whole = len(query) == len(held)
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None], keys.transpose(0, 1)[None], values.transpose(0, 1)[None],
        attn_mask=None if whole else _visible(len(query), len(held), held.device), is_causal=whole, scale=spec.scale,
    )  # fmt: skip
    return out[0].transpose(0, 1)


def _visible(queries: int, keys: int, device: torch.device) -> Tensor:
    """[queries, keys] bool: the last query's own key is the last."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril_(keys - queries)
