"""Latent attention in the fixed order: a token has the same bits however it is computed, and so has its row of the cache."""

import dataclasses

import numpy as np
import pytest
import torch
from kernel_support import numbers
from test_triton_attention import chunks_of, differing

from quire.attn.backend import AttentionSpec, Latents
from quire.attn.batch import Batch, GroupView, LoRATokens, Tokens, with_final_tokens
from quire.attn.reference import LatentAttention
from quire.ops import order
from quire.ops.adapters import make_table, tile
from quire.ops.arguments import Rotation

pytest.importorskip("triton")
from quire.attn import latent_triton
from quire.attn.latent_triton import FixedLatents, LatentTriton

# heads, rank, nope, rotary, values
SMALL = {"one lane": (2, 16, 12, 8, 10), "two lanes": (3, 24, 12, 8, 10)}
LARGE = {
    "DeepSeek V2 Lite": (16, 512, 128, 64, 128),
    "DeepSeek V2": (128, 512, 128, 64, 128),
    "Kimi K2": (64, 512, 128, 64, 128),
    "GLM 4.7 Flash": (20, 512, 192, 64, 256),
    "MiniCPM3": (40, 256, 64, 32, 64),
    "a small rank": (6, 96, 24, 16, 40),
}
KINDS = [*((name, torch.bfloat16) for name in LARGE), ("DeepSeek V2 Lite", torch.float16)]
CHUNK = [(at, at + 1) for at in range(60, 67)]
SPARE = 3  # work items that a recorded plan has room for and no row needs


@pytest.fixture(autouse=True)
def fixed_order(monkeypatch, dots_in_order):
    monkeypatch.setattr(order, "_fixed", True)


class Sequences:
    """Sequences whose tokens may be computed in any batch. The cache holds NaN where no token was written."""

    def __init__(self, shape, lengths, page_size, dtype, device, adapted=False):
        self.heads, self.rank, nope, rotary, values = shape
        self.page_size, self.device, self.wide = page_size, torch.device(device), nope + rotary
        self.spec = AttentionSpec(self.heads, 1, self.rank + rotary, self.wide**-0.5, latent=self.rank)
        dice = torch.Generator().manual_seed(5)
        angles = torch.arange(max(lengths)).float()[:, None] / 10 ** torch.arange(rotary // 2)
        up = torch.randn(self.heads, nope + values, self.rank, generator=dice) * self.rank**-0.5
        self.latents = Latents(
            torch.rand(self.rank, generator=dice).to(device, dtype), 1e-6,
            Rotation(angles.cos().to(device), angles.sin().to(device), True), up.to(device, dtype), nope,
            self._table(nope + values, dtype) if adapted else None,
        )  # fmt: skip
        size = self.heads * self.wide + self.rank + rotary
        self.projected = [torch.randn(length, size, generator=dice).to(device, dtype) for length in lengths]
        each = [-(-length // page_size) for length in lengths]
        pages = torch.randperm(sum(each), generator=torch.Generator().manual_seed(4)).int() + 1
        self.tables = torch.zeros(len(lengths), max(each), dtype=torch.int32)
        for row, own in enumerate(pages.split(each)):
            self.tables[row, : len(own)] = own
        kv = torch.full((len(pages) + 1, 1, 1, page_size, self.rank + rotary), float("nan"))
        self.kv = kv.to(device, dtype)

    def _table(self, outputs, dtype):
        low = 20
        self.halves = [
            numbers(low, size, dtype=dtype, device=self.device, seed=9) * 0.15 for size in (self.rank, self.heads * outputs)
        ]
        entry = [self.halves[0].data_ptr(), self.halves[1].data_ptr(), low, 0, 0, 0]
        entries = torch.tensor([0] * 6 + entry, dtype=torch.int64, device=self.device)
        return make_table(entries, 6, 24, [(0, self.heads * outputs)])

    def batch(self, pieces, last):
        """Return the batch of these pieces, of which the `last` tokens of each attend; 0: all."""
        counts = [end - begin for _, begin, end in pieces]
        starts = np.concatenate(([0], np.cumsum(counts))).tolist()
        positions = torch.cat([torch.arange(begin, end) for _, begin, end in pieces])
        tables = self.tables[[row for row, _, _ in pieces]]
        owner = torch.arange(len(pieces)).repeat_interleave(torch.tensor(counts))
        write = tables[owner, positions // self.page_size].long() * self.page_size + positions % self.page_size
        slots, send = np.ones(len(positions), np.int64), lambda values: values.to(self.device)
        batch = Batch(
            ids=send(positions), positions=send(positions), row_starts=send(torch.tensor(starts).int()),
            kv_lengths=send(torch.tensor([end for _, _, end in pieces]).int()),
            rows=tuple((start, count, end) for start, count, (_, _, end) in zip(starts, counts, pieces, strict=False)),
            logit_index=torch.empty(0, dtype=torch.long), groups=(GroupView(send(tables), send(write)),),
            tokens=Tokens(LoRATokens(slots, self.device, tile(slots, self.device))) if self.latents.table else Tokens(),
        )  # fmt: skip
        if not last:
            return batch
        kept = np.minimum(counts, last)
        index = torch.cat([torch.arange(end - n, end) for end, n in zip(starts[1:], kept.tolist(), strict=True)])
        return with_final_tokens(batch, kept, send(torch.tensor([0, *np.cumsum(kept)]).int()), send(index))

    def run(self, pieces, last=0, recorded=False, backend=None):
        """Return the output of each (sequence, first token, token after the last). recorded: as a CUDA graph plans it."""
        batch = self.batch(pieces, last)
        both = torch.cat([self.projected[row][begin:end] for row, begin, end in pieces])
        query, rows = both.split((self.heads * self.wide, self.spec.head_dim), dim=1)
        query = batch.take_final(query).unflatten(1, (self.heads, -1))
        if recorded:
            counts, lengths = (np.array(column, np.int32) for column in list(zip(*batch.final.rows, strict=True))[1:])
            fixed = FixedLatents(self.spec)
            made, room = fixed.cut(counts, lengths, None, None)
            room = room._replace(splits=room.splits + SPARE, tiles=room.tiles + SPARE if room.tiles else 0)
            plan = torch.from_numpy(fixed.numbers(made, len(pieces), room)).to(self.device)
            fixed.attach(batch.final, 0, plan, len(pieces), room)
        run = (backend or LatentTriton()).run_latent
        out = run(self.spec, self.latents, query, rows, self.kv, batch, 0, bool(last))
        return out.split([count for _, count, _ in batch.final.rows])

    def cached(self, row):
        at = torch.arange(len(self.projected[row]))
        return self.kv[self.tables[row, at // self.page_size].long(), 0, 0, at % self.page_size]


def compare_ways(case, shape, lengths, dtype, device, *, others, chunks, step, copies=1, adapted=False):
    """Return messages about tokens whose outputs or cached rows depend on how they are computed.

    lengths: of the sequences, the longest first
    others: page sizes to compare with pages of 16
    chunks: sizes of the chunks of the first sequence
    step: compare every so many tokens of a sequence only
    copies: of each row, for a large batch
    """
    one = Sequences(shape, lengths, 16, dtype, device, adapted)
    whole = [(row, 0, size) for row, size in enumerate(lengths)]
    outputs = one.run(whole)
    cached = [one.cached(row).clone() for row in range(len(lengths))]
    tokens = [sorted({*range(0, size, step), size - 1}) for size in lengths]
    expected = [torch.cat([one.run([(row, at, at + 1)])[0] for at in own]) for row, own in enumerate(tokens)]
    assert all(torch.isfinite(each).all() for each in expected)
    found = []

    def compare(name, pieces, outputs, sequences=one):
        for (row, begin, end), out in zip(pieces, outputs, strict=True):
            first = end - len(out)
            chosen = [(index, at) for index, at in enumerate(tokens[row]) if first <= at < end]
            wanted, got = expected[row][[index for index, _ in chosen]], out[[at - first for _, at in chosen]]
            where = f"tokens {begin} to {end} of sequence {row}"
            found.extend(differing(case, f"{name}, {where}", got, wanted))
            mine = sequences.cached(row)[begin:end]
            found.extend(differing(case, f"{name}, cached {where}", mine, cached[row][begin:end]))

    def check(name, pieces, **how):
        compare(name, pieces, one.run(pieces, **how))

    ends = [(row, size - 1, size) for row, size in enumerate(lengths)]
    drafts = [(row, size - 4, size) for row, size in enumerate(lengths)]
    mixed = [ends[1], (0, 3, lengths[0] // 2), *drafts[2:], (0, lengths[0] // 2 - 3, lengths[0])]
    compare("prefill in a batch", whole, outputs)
    check("prefill in a batch, last tokens only", whole, last=2)
    check("decode in a batch", ends * copies)
    check("drafts", drafts)
    check("decode and drafts, recorded", ends + drafts, recorded=True)
    check("decode and prefill", mixed)
    for sizes in chunks:
        for begin, end in chunks_of(lengths[0], sizes):
            check(f"chunks of {sizes}", [(0, begin, end)], recorded=end - begin < latent_triton.LONG_ROW_TOKENS)
    for other in others:
        two = Sequences(shape, lengths, other, dtype, device, adapted)
        for name, pieces in (("prefill", whole), ("decode and drafts", ends + drafts)):
            compare(f"{name} over pages of {other}", pieces, two.run(pieces), two)
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="in the interpreter; a GPU runs the next tests")
@pytest.mark.parametrize(("name", "adapted"), [*((name, False) for name in SMALL), ("two lanes", True)])
def test_tokens_are_the_same_however_they_are_computed_in_the_interpreter(name, adapted, monkeypatch):
    """Splits have two blocks of keys each. Without the fixed order the longest row and two chunks would be expanded."""
    monkeypatch.setattr(latent_triton, "SPLIT", 32)
    monkeypatch.setattr(latent_triton, "MAX_LANE_VALUES", 16)
    monkeypatch.setattr(latent_triton, "LONG_ROW_TOKENS", 30)
    found = compare_ways(
        name, SMALL[name], [67, 18, 33], torch.float32, "cpu", others=(4,), chunks=((35, 2, 41),), step=22, adapted=adapted
    )
    assert not found, "\n".join(found)


def test_tokens_that_differ_would_be_noticed(monkeypatch, device):
    """Tiles in any order."""
    monkeypatch.setattr(latent_triton, "SPLIT", 32)
    one = Sequences(SMALL["two lanes"], [67], 16, torch.float32, device)
    one.run([(0, 0, 60)])
    together, alone = (torch.cat([one.run([(0, *ends)])[0] for ends in parts]) for parts in ([(60, 67)], CHUNK))
    assert not differing("", "", together, alone)
    monkeypatch.setattr(latent_triton, "order_is_fixed", lambda: False)
    assert differing("", "", one.run([(0, 60, 67)])[0], alone)


@pytest.mark.parametrize("name", SMALL)
def test_it_is_attention(name, device, monkeypatch):
    monkeypatch.setattr(latent_triton, "SPLIT", 32)
    monkeypatch.setattr(latent_triton, "MAX_LANE_VALUES", 16)
    mine, theirs = (Sequences(SMALL[name], [45, 33, 64], 16, torch.float32, device) for _ in range(2))
    for sequences, backend in ((mine, None), (theirs, LatentAttention())):
        sequences.run([(1, 0, 30), (2, 0, 63)], backend=backend)
    pieces = [(0, 0, 45), (1, 30, 33), (2, 63, 64)]
    for got, wanted in zip(mine.run(pieces), theirs.run(pieces, backend=LatentAttention()), strict=True):
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtype"), KINDS)
def test_tokens_are_the_same_however_they_are_computed(name, dtype, device):
    found = compare_ways(
        f"{name}, {dtype}", LARGE[name], [1411, 1100, 897, 1025], dtype, device, others=(64,), step=3, copies=30,
        chunks=((1411,), (129, 2, 333, 77), (511,), (64,), (5,)),
    )  # fmt: skip
    assert not found, "\n".join(found)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["DeepSeek V2 Lite", "GLM 4.7 Flash"])
def test_tokens_with_an_adapter_are_the_same_however_they_are_computed(name, device):
    found = compare_ways(
        f"{name}, adapted", LARGE[name], [700, 530, 513], torch.bfloat16, device, others=(64,), step=5, copies=30,
        chunks=((700,), (129, 2, 77),), adapted=True,
    )  # fmt: skip
    assert not found, "\n".join(found)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtype"), KINDS)
def test_real_shapes(name, dtype, device):
    lengths = [2000, 513, 1700]
    mine = Sequences(LARGE[name], lengths, 16, dtype, device)
    theirs = Sequences(LARGE[name], lengths, 16, torch.float32, device)
    norm, up = mine.latents.norm.float(), mine.latents.up.float()
    theirs.latents = dataclasses.replace(theirs.latents, norm=norm, up=up)
    theirs.projected = [each.float() for each in mine.projected]
    pieces = [(row, 0, size) for row, size in enumerate(lengths)]
    loose = {torch.float16: 6e-3, torch.bfloat16: 4e-2}[dtype]
    for got, wanted in zip(mine.run(pieces), theirs.run(pieces, backend=LatentAttention()), strict=True):
        torch.testing.assert_close(got.float(), wanted, atol=loose, rtol=loose)
