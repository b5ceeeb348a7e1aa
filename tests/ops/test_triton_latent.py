"""Latent attention in Triton against torch."""

import dataclasses

import numpy as np
import pytest
import torch
from kernel_support import DTYPES, numbers
from test_paged_attention import make_batch

from quire.attn.backend import AttentionSpec, Latents
from quire.attn.batch import LoRATokens, Tokens, with_final_tokens
from quire.attn.reference import LatentAttention
from quire.ops.adapters import make_table, tile
from quire.ops.arguments import Rotation

pytest.importorskip("triton")
from quire.attn import latent_triton
from quire.attn.latent_triton import FixedLatents, LatentTriton

ROWS = [(1, 1), (1, 70), (9, 9), (0, 20), (3, 52), (1, 40), (37, 61), (1, 64), (2, 2), (0, 9)]
SHAPES = {"plain": (6, 32, 12, 8, 10), "many heads, odd rank": (20, 40, 16, 16, 20)}  # heads, rank, nope, rotary, values
LARGE = {
    "DeepSeek V2 Lite": (16, 512, 128, 64, 128),
    "Kimi K2": (64, 512, 128, 64, 128),
    "GLM 4.7 Flash": (20, 512, 192, 64, 256),
}


def inputs(shape, rows, dtype, device, interleaved, page_size=4):
    heads, rank, nope, rotary, values = shape
    batch, pages = make_batch(rows, page_size)
    dice = torch.Generator().manual_seed(2)
    kv = torch.full((pages, 2, 1, page_size, rank + rotary), float("nan"))[:, :1]
    for row, (count, length) in enumerate(rows):
        at = torch.arange(length - count)
        kv[batch.groups[0].tables[row, at // page_size].long(), 0, 0, at % page_size] = torch.randn(
            len(at), rank + rotary, generator=dice
        )
    tokens = len(batch.ids)
    positions = torch.cat([torch.arange(length - count, length) for count, length in rows])
    write = torch.cat(
        [
            batch.groups[0].tables[row, torch.arange(length - count, length) // page_size].long() * page_size
            + torch.arange(length - count, length) % page_size
            for row, (count, length) in enumerate(rows)
        ]
    )
    angles = torch.arange(max(length for _, length in rows)).float()[:, None] / 10 ** torch.arange(rotary // 2)
    table = Rotation(angles.cos().to(device), angles.sin().to(device), interleaved)
    scale = (nope + rotary) ** -0.5
    spec = AttentionSpec(heads, 1, rank + rotary, scale, latent=rank)
    up = torch.randn(heads, nope + values, rank, generator=dice) * rank**-0.5
    latents = Latents(torch.rand(rank, generator=dice).to(device, dtype), 1e-6, table, up.to(device, dtype), nope)
    both = torch.randn(tokens, heads * (nope + rotary) + rank + rotary, generator=dice).to(device, dtype)
    query, row = both.split((heads * (nope + rotary), rank + rotary), dim=1)
    view = dataclasses.replace(batch.groups[0], tables=batch.groups[0].tables.to(device), write=write.to(device))
    batch = dataclasses.replace(
        batch, ids=batch.ids.to(device), positions=positions.to(device), row_starts=batch.row_starts.to(device), groups=(view,),
        kv_lengths=batch.kv_lengths.to(device),
    )  # fmt: skip
    return spec, latents, query.unflatten(1, (heads, -1)), row, kv.to(device, dtype), batch


def keep_two(batch, device):
    """The last two of each row."""
    counts = torch.tensor([min(count, 2) for _, count, _ in batch.rows])
    ends = torch.tensor([start + count for start, count, _ in batch.rows])
    index = torch.cat([torch.arange(end - n, end) for end, n in zip(ends.tolist(), counts.tolist(), strict=True)])
    starts = torch.cat((torch.zeros(1), counts.cumsum(0))).int().to(device)
    return with_final_tokens(batch, counts.numpy(), starts, index.to(device))


def compare(shape, rows, dtype, device, interleaved=True, page_size=4, final=False):
    spec, latents, query, row, kv, batch = inputs(shape, rows, dtype, device, interleaved, page_size)
    if final:
        batch = keep_two(batch, device)
        query = batch.take_final(query)
    made = dataclasses.replace(latents, up=latents.up.float(), norm=latents.norm.float())
    theirs = kv.float()
    expected = LatentAttention().run_latent(spec, made, query.float(), row.float(), theirs, batch, 0, final)
    batch.plans.clear()
    out = LatentTriton().run_latent(spec, latents, query, row, kv, batch, 0, final)
    loose = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}[dtype]
    torch.testing.assert_close(out.float(), expected, atol=loose, rtol=loose)
    torch.testing.assert_close(kv.float(), theirs, atol=loose, rtol=loose, equal_nan=True)
    return spec, latents, query, row, kv, batch, out


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(latent_triton, "SPLIT", 32)
    monkeypatch.setattr(latent_triton, "LONG_ROW_TOKENS", 30)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_ragged_rows(name, dtype, device):
    *_, batch, _ = compare(SHAPES[name], ROWS, dtype, device)
    plan = batch.plans["latent", 0]
    assert plan.expanded is not None and len(plan.absorbed.merges) and len(plan.absorbed.tiles)


@pytest.mark.usefixtures("small")
def test_the_last_tokens_and_halves(device):
    compare(SHAPES["plain"], ROWS, torch.float32, device, interleaved=False, final=True)


def test_nothing_but_single_tokens(device):
    compare(SHAPES["plain"], [(1, 7), (1, 33)], torch.float32, device, page_size=16)


@pytest.mark.usefixtures("small")
def test_a_plan_that_stays_gives_the_same(device):
    rows = [(1, 70), (5, 9), (1, 40), (3, 64)]
    spec, latents, query, row, kv, batch, out = compare(SHAPES["plain"], rows, torch.float32, device)
    fixed = FixedLatents(spec)
    counts, lengths = (torch.tensor(column).int().numpy() for column in zip(*rows, strict=True))
    made, room = fixed.cut(counts, lengths, None, None)
    room = room._replace(splits=room.splits + 5, tiles=room.tiles + 3)
    numbers = torch.from_numpy(fixed.numbers(made, len(rows) + 2, room)).to(device)
    batch.plans.clear()
    fixed.attach(batch, 0, numbers, len(rows) + 2, room)
    assert torch.equal(LatentTriton().run_latent(spec, latents, query, row, kv, batch, 0, False), out)
    assert fixed.cut(counts, lengths + 1, None, None) is not None
    assert fixed.cut(counts * 30, lengths * 30, None, None) is None


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dora", "final", "tiled"), [(False, False, True), (True, True, False)])
def test_adapters_of_what_makes_keys_and_values(dora, final, tiled, dtype, device):
    """Rows of three mixed with rows of none, absorbed and expanded: against attention with matrices that have them in."""
    spec, latents, query, row, kv, batch = inputs(SHAPES["many heads, odd rank"], ROWS, dtype, device, True)
    heads, outputs, rank = latents.up.shape
    entries, held, matrices = torch.zeros(4, 6, dtype=torch.int64), [], [latents.up.float()]
    for place, low in ((1, 3), (2, 20), (3, 37)):
        down, up = (numbers(low, n, dtype=dtype, device=device, seed=place) * 0.15 for n in (rank, heads * outputs))
        gain = numbers(heads * outputs, dtype=dtype, device=device, seed=place).abs() + 0.5 if dora else None
        held.append((down, up, gain))
        entries[place, :4] = torch.tensor([down.data_ptr(), up.data_ptr(), low, 0 if gain is None else gain.data_ptr()])
        changed = latents.up.float() + (up.float().t() @ down.float()).view_as(latents.up)
        matrices.append(changed if gain is None else changed * gain.float().view(heads, outputs, 1))
    table = make_table(entries.to(device).view(-1), 6, 40, [(0, heads * outputs)])
    places = np.repeat(np.arange(len(ROWS)) % 4, [count for count, _ in ROWS])
    rows = LoRATokens(places, torch.device(device), tile(places, torch.device(device)) if tiled else None)
    batch = dataclasses.replace(batch, tokens=Tokens(rows))
    if final:
        batch = keep_two(batch, device)
        query = batch.take_final(query)
    plain = dataclasses.replace(latents, norm=latents.norm.float())
    of_each = [
        LatentAttention().run_latent(
            spec, dataclasses.replace(plain, up=up), query.float(), row.float(), kv.float(), batch, 0, final
        )
        for up in matrices
    ]
    mine = torch.from_numpy(batch.final.tokens.lora.slots).to(device)
    expected = torch.stack(of_each)[mine, torch.arange(len(query), device=device)]
    batch.final.plans.clear()
    out = LatentTriton().run_latent(spec, dataclasses.replace(latents, table=table), query, row, kv, batch, 0, final)
    assert (batch.final.plans["latent", 0].expanded is None) == final
    loose = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]
    torch.testing.assert_close(out.float(), expected, atol=loose, rtol=loose)
    assert not torch.allclose(of_each[0], expected, atol=loose)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", LARGE)
def test_real_shapes(name, dtype, device):
    rows = [(1, 5000), (1, 128), (300, 300), (130, 1700), (1, 129), (17, 4000), (1, 1), (2, 513), (600, 2000)]
    compare(LARGE[name], rows, dtype, device, page_size=16)
    compare(LARGE[name], [(1, 900)], dtype, device, page_size=16)
