"""Attention in Triton against the reference backend."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from kernel_support import DTYPES, float8_cache
from test_paged_attention import make_batch

from quire.attn import work_split
from quire.attn.backend import AttentionSpec, Room, choose_backend
from quire.attn.batch import Batch, GroupView
from quire.attn.reference import ReferenceAttention
from quire.attn.work_split import NOTHING_SHARED, find_alike, nothing_shared
from quire.ops import order
from quire.types.errors import ConfigError

pytest.importorskip("triton")
from quire.attn import triton as backend

# (token count, kv length) of each row
ROWS = [(1, 1), (1, 70), (9, 9), (0, 20), (3, 52), (1, 40), (1, 33), (37, 61), (1, 64), (2, 2), (0, 9)]
SPECS = {
    "plain": AttentionSpec(2, 2, 16, 16**-0.5),
    "shared heads, odd head": AttentionSpec(6, 2, 24, 0.3),
    "many share": AttentionSpec(20, 1, 16, 0.3),
    "window": AttentionSpec(6, 2, 16, 0.2, window=7),
    "long window": AttentionSpec(4, 1, 16, 0.2, window=45),
    "window of one": AttentionSpec(2, 1, 8, 0.2, window=1),
    "soft cap": AttentionSpec(6, 3, 16, 0.9, soft_cap=2.0),
    "sinks": AttentionSpec(3, 1, 16, 0.3, sinks=True),
    "slopes": AttentionSpec(6, 2, 16, 0.3, slopes=(0.5, 0.25, 0.125, 0.0625, 0.7, 0.35)),
    "sinks and window": AttentionSpec(4, 2, 40, 0.3, window=20, sinks=True),
}
SHAPES = [(32, 8, 128), (14, 2, 64), (8, 1, 256), (6, 6, 96), (16, 2, 80), (4, 4, 192)]
LARGE = {
    f"{heads} over {kv_heads} of {size}": AttentionSpec(heads, kv_heads, size, size**-0.5) for heads, kv_heads, size in SHAPES
}


@pytest.fixture
def small_splits(monkeypatch):
    monkeypatch.setattr(work_split, "SPLIT", 32)


def inputs(spec, rows, page_size, dtype, device, prefixes=()):
    """A batch, its queries as a view of wider rows, and a cache that holds NaN wherever no key lies that a row sees.

    prefixes: (rows, pages) each; those rows have the first so many pages of the first of them.
    """
    batch, pages = make_batch(rows, page_size)
    for same, count in prefixes:
        batch.groups[0].tables[same, :count] = batch.groups[0].tables[same[0], :count].clone()
    generator = torch.Generator().manual_seed(2)
    kv = torch.full((pages, 3, spec.kv_heads, page_size, spec.head_dim), float("nan"))[:, :2]
    for row, (count, length) in enumerate(rows):
        at = torch.arange(0 if spec.window is None else max(0, length - count - spec.window + 1), length)
        page = batch.groups[0].tables[row, at // page_size].long()
        kv.transpose(2, 3)[page, :, at % page_size] = torch.randn(len(at), 2, spec.kv_heads, spec.head_dim, generator=generator)
    width = spec.heads * spec.head_dim
    query = torch.randn(len(batch.ids), width + 16, generator=generator).to(device, dtype)
    query = query[:, :width].view(len(batch.ids), spec.heads, spec.head_dim)
    sinks = torch.randn(spec.heads, generator=generator).to(device, dtype) if spec.sinks else None
    view = batch.groups[0]
    there = dataclasses.replace(
        batch, row_starts=batch.row_starts.to(device), kv_lengths=batch.kv_lengths.to(device),
        groups=(dataclasses.replace(view, tables=view.tables.to(device), write=view.write.to(device)),),
    )  # fmt: skip
    return there, query, kv.to(device, dtype), sinks


def sharing(batch, page_size):
    """The batch, with a finder of the rows of one token that begin alike."""
    view = batch.groups[0]
    tables, slots = view.tables.cpu().numpy(), np.arange(len(batch.rows), dtype=np.int32)
    full = np.array([(length - 1) // page_size if count == 1 else 0 for _, count, length in batch.rows], np.int32)
    found = dataclasses.replace(view, alike=lambda keys: find_alike(tables, slots, full, page_size, keys))
    return dataclasses.replace(batch, groups=(found,), plans={})


def compare(spec, rows, page_size, dtype, device, kind=None):
    """kind: of a cache of 8 bits."""
    batch, query, kv, sinks = inputs(spec, rows, page_size, dtype, device)
    kv = kv if kind is None else float8_cache(kv, kind)
    expected = ReferenceAttention().run(spec, query.float(), kv.float() if kind is None else kv, batch, 0, sinks)
    out = backend.TritonAttention().run(spec, query, kv, batch, 0, sinks)
    assert out.dtype == dtype
    loose = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(out.float(), expected, atol=loose, rtol=loose)
    return batch


@pytest.mark.usefixtures("small_splits")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "page_size"), [*((name, 4) for name in SPECS), ("plain", 16), ("sinks and window", 16)])
def test_ragged_rows(name, page_size, dtype, device):
    compare(SPECS[name], ROWS, page_size, dtype, device)


@pytest.mark.usefixtures("small_splits")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("name", ["shared heads, odd head", "long window", "sinks and window"])
def test_a_cache_of_8_bits(name, kind, dtype, device):
    compare(SPECS[name], ROWS, 4, dtype, device, kind)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("name", LARGE)
def test_real_shapes_in_8_bits(name, kind, dtype, device):
    rows = [(1, 5000), (1, 256), (300, 300), (130, 1700), (1, 257), (17, 4000), (1, 1), (2, 513), (600, 5000)]
    for changes in ({}, {"window": 512}, {"window": 128, "sinks": True}):
        compare(dataclasses.replace(LARGE[name], **changes), rows, 16, dtype, device, kind)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", LARGE)
def test_real_shapes(name, dtype, device):
    rows = [(1, 5000), (1, 256), (300, 300), (130, 1700), (1, 257), (17, 4000), (1, 1), (2, 513)]
    for window in (None, 512):
        compare(dataclasses.replace(LARGE[name], window=window), rows, 16, dtype, device)


class Sequences:
    """Sequences whose tokens may be computed in any batch; common: keys at the start that all of them share."""

    def __init__(self, spec, lengths, page_size, dtype, device, kind=None, common=0):
        self.spec, self.page_size, self.device = spec, page_size, device
        generator = torch.Generator().manual_seed(3)
        first = torch.randn(2, spec.kv_heads, common, spec.head_dim, generator=generator)
        held, self.queries = [], []
        for length in lengths:
            rest = torch.randn(2, spec.kv_heads, length - common, spec.head_dim, generator=generator)
            held.append(torch.cat((first, rest), 2))
            self.queries.append(torch.randn(length, spec.heads, spec.head_dim, generator=generator).to(device, dtype))
        self.sinks = torch.randn(spec.heads, generator=generator).to(device, dtype) if spec.sinks else None
        shared = common // page_size
        each = [-(-length // page_size) - shared for length in lengths]
        order = torch.randperm(shared + sum(each), generator=torch.Generator().manual_seed(4)).to(torch.int32) + 1
        kv = torch.zeros(len(order) + 1, 2, spec.kv_heads, page_size, spec.head_dim)
        self.tables = torch.zeros(len(lengths), shared + max(each), dtype=torch.int32)
        begin = shared
        for row, (length, pages) in enumerate(zip(lengths, each, strict=True)):
            own = torch.cat((order[:shared], order[begin : begin + pages]))
            begin += pages
            self.tables[row, : len(own)] = own
            at = torch.arange(length)
            kv.transpose(2, 3)[own[at // page_size].long(), :, at % page_size] = held[row].permute(2, 0, 1, 3)
        kv = kv.to(device, dtype)
        self.kv = kv if kind is None else float8_cache(kv, kind)
        self.tables = self.tables.to(device)

    def run(self, pieces, share=False):
        """Return the output of each (sequence, first token, token after the last), and the plan."""
        tables = self.tables[[sequence for sequence, _, _ in pieces]]
        rows, start = [], 0
        for _, begin, end in pieces:
            rows.append((start, end - begin, end))
            start += end - begin
        view = GroupView(tables, torch.zeros(start, dtype=torch.long))
        batch = Batch(
            ids=torch.zeros(start, dtype=torch.long), positions=torch.zeros(start, dtype=torch.long),
            row_starts=torch.tensor([at for at, _, _ in rows] + [start], dtype=torch.int32, device=self.device),
            kv_lengths=torch.tensor([length for _, _, length in rows], dtype=torch.int32, device=self.device),
            rows=tuple(rows), logit_index=torch.empty(0, dtype=torch.long), groups=(view,),
        )  # fmt: skip
        batch = sharing(batch, self.page_size) if share else batch
        query = torch.cat([self.queries[sequence][begin:end] for sequence, begin, end in pieces])
        out = backend.TritonAttention().run(self.spec, query, self.kv, batch, 0, self.sinks)
        plans = batch.plans["triton", 0]
        return out.split([end - begin for _, begin, end in pieces]), plans


def chunks_of(length, sizes):
    """Return the begins and ends of chunks of these sizes, in turn, until `length`."""
    borders, sizes = [0], itertools.cycle(sizes)
    while borders[-1] < length:
        borders.append(min(length, borders[-1] + next(sizes)))
    return list(itertools.pairwise(borders))


def differing(case, name, got, expected):
    """Return a message if tokens differ, else nothing."""
    bits = {2: torch.int16, 4: torch.int32}[expected.element_size()]
    zero = torch.zeros((), dtype=expected.dtype, device=expected.device)
    different = ((got + zero).view(bits) != (expected + zero).view(bits)).flatten(1).any(1)
    if not different.any():
        return []
    apart = (got.float() - expected.float()).abs().max().item()
    where = different.nonzero().flatten()[:5].tolist()
    return [f"{case}: {name}: {int(different.sum())} of {len(different)} tokens differ, by up to {apart:.3g}; first {where}"]


def compare_ways(
    case, spec, lengths, common, dtype, device, kind=None, *, page_size, others, chunks, monkeypatch, in_blocks, step=1
):  # fmt: skip
    """Return messages about tokens whose outputs depend on how they are computed.

    lengths: of the sequences, the longest first
    others: page sizes to compare
    in_blocks: whether keys of long rows are expected to be copied
    step: compare every so many tokens of a sequence only
    """
    one = Sequences(spec, lengths, page_size, dtype, device, kind, common)
    longest, found, decoded = lengths[0], [], []
    tokens = [sorted({*range(0, size, step), size - 1}) for size in lengths]
    for row, at in enumerate(tokens):
        decoded.append(torch.cat(one.run([(row, token, token + 1) for token in at])[0]))
        assert torch.isfinite(decoded[-1]).all()

    def check(name, pieces, outputs):
        for (row, begin, end), out in zip(pieces, outputs, strict=True):
            chosen = [(index, token) for index, token in enumerate(tokens[row]) if begin <= token < end]
            expected = decoded[row][[index for index, _ in chosen]]
            got = out[[token - begin for _, token in chosen]]
            found.extend(differing(case, f"{name}, tokens {begin} to {end} of sequence {row}", got, expected))

    whole = [(row, 0, size) for row, size in enumerate(lengths)]
    ends = [(row, size - 1, size) for row, size in enumerate(lengths)]
    half = longest // 2 - 3
    for token in tokens[0][:: max(1, len(tokens[0]) // 5)]:
        check("decode alone", [(0, token, token + 1)], one.run([(0, token, token + 1)])[0])

    with monkeypatch.context() as patch:
        patch.setattr(backend, "reads_in_blocks", lambda spec, query, kv: False)
        out, plans = one.run(whole[:1])
        assert len(plans[0].tiles) > 0 and not len(plans[0].long_tiles)
        check("prefill in one row", whole[:1], out)
        check("prefill in a batch", whole, one.run(whole)[0])
        for sizes in chunks:
            for begin, end in chunks_of(longest, sizes):
                check(f"prefill in chunks of {sizes}", [(0, begin, end)], one.run([(0, begin, end)])[0])
    if in_blocks:
        for name, pieces in (("long tiles", whole[:1]), ("long tiles after a cached prefix", [(0, half, longest)])):
            out, plans = one.run(pieces)
            assert len(plans[0].long_tiles) > 0 and not len(plans[0].tiles)
            check(name, pieces, out)
        pieces = [*whole, *ends]
        check("long tiles in a batch", pieces, one.run(pieces)[0])

    out, plans = one.run(ends, share=True)
    assert (len(plans[0].shared) > 0) == (spec.window is None)
    check("decode with a shared prefix", ends, out)
    mixed = [*ends, (0, 3, half), (0, half, longest)]
    check("decode with a shared prefix and prefill", mixed, one.run(mixed, share=True)[0])

    for other in others:
        two = Sequences(spec, lengths, other, dtype, device, kind, common)
        check(f"prefill over pages of {other}", whole[:1], two.run(whole[:1])[0])
        check(f"decode over pages of {other}", ends, two.run(ends, share=True)[0])
    return found


INVARIANT = {
    "plain": AttentionSpec(1, 1, 16, 0.25),
    "shared heads, odd head": SPECS["shared heads, odd head"],
    "window": AttentionSpec(2, 1, 16, 0.3, window=45),
    "sinks": SPECS["sinks"],
    "sinks and window": AttentionSpec(2, 1, 16, 0.3, window=70, sinks=True),
    "soft cap": AttentionSpec(2, 1, 16, 0.9, soft_cap=2.0),
    "slopes": AttentionSpec(3, 1, 16, 0.3, slopes=(0.5, 0.0625, 0.7)),
}


@pytest.fixture
def fixed_order(monkeypatch, dots_in_order):
    monkeypatch.setattr(order, "_fixed", True)


@pytest.mark.usefixtures("fixed_order")
@pytest.mark.skipif(torch.cuda.is_available(), reason="in the interpreter; a GPU runs the next tests")
@pytest.mark.parametrize(
    ("name", "kind"), [*((name, None) for name in INVARIANT), ("sinks and window", torch.float8_e4m3fn)]
)  # fmt: skip
def test_tokens_are_the_same_however_they_are_computed_in_the_interpreter(name, kind, monkeypatch):
    """Splits have two blocks of keys each."""
    in_blocks = kind is None and name != "shared heads, odd head"
    monkeypatch.setattr(work_split, "SPLIT", 64)
    monkeypatch.setattr(backend, "LONG_ROW_TOKENS", 30)
    monkeypatch.setattr(backend, "reads_in_blocks", lambda spec, query, kv: in_blocks)
    found = compare_ways(
        name, INVARIANT[name], [78, 66, 65, 70], 64, torch.float32, "cpu", kind, page_size=16, others=(4,),
        chunks=((35, 2, 41),), monkeypatch=monkeypatch, in_blocks=in_blocks, step=40,
    )  # fmt: skip
    assert not found, "\n".join(found)


REAL = {
    "32 heads over 8 of 128": AttentionSpec(32, 8, 128, 128**-0.5),
    "14 heads over 2 of 64": AttentionSpec(14, 2, 64, 64**-0.5),
    "6 heads over 2 of 96": AttentionSpec(6, 2, 96, 96**-0.5),
    "8 heads over 1 of 256": AttentionSpec(8, 1, 256, 256**-0.5),
    "window": AttentionSpec(32, 8, 128, 128**-0.5, window=300),
    "window of 64": AttentionSpec(14, 2, 64, 0.125, window=128),
    "sinks": AttentionSpec(64, 8, 64, 0.125, sinks=True),
    "sinks and window": AttentionSpec(64, 8, 64, 0.125, window=128, sinks=True),
    "soft cap": AttentionSpec(16, 8, 128, 0.3, soft_cap=5.0),
    "slopes": AttentionSpec(8, 8, 64, 0.125, slopes=tuple(2.0**-power for power in range(1, 9))),
}


@pytest.mark.gpu
@pytest.mark.usefixtures("fixed_order")
@pytest.mark.parametrize("kind", [None, torch.float8_e4m3fn, torch.float8_e5m2], ids=["16 bits", "e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", REAL)
def test_tokens_are_the_same_however_they_are_computed(name, dtype, kind, device, monkeypatch):
    spec = REAL[name]
    in_blocks = kind is None and spec.head_dim in (64, 128) and torch.cuda.get_device_capability() == (9, 0)
    case = f"{name}, {dtype}, cache in {kind or dtype}"
    found = compare_ways(
        case, spec, [1411, 1100, 1030, 1281, 1025], 1024, dtype, device, kind, page_size=16, others=(32, 128),
        chunks=((129, 2, 333, 77), (511,), (64,), (5,)), monkeypatch=monkeypatch, in_blocks=in_blocks,
    )  # fmt: skip
    assert not found, "\n".join(found)


@pytest.mark.gpu
@pytest.mark.usefixtures("fixed_order")
@pytest.mark.parametrize("name", ["6 heads over 2 of 96", "sinks and window", "slopes"])
def test_tokens_in_float32_are_the_same_however_they_are_computed(name, device, monkeypatch):
    found = compare_ways(
        f"{name}, float32", REAL[name], [700, 530, 513, 600], 512, torch.float32, device, page_size=16, others=(32,),
        chunks=((129, 2, 77),), monkeypatch=monkeypatch, in_blocks=False,
    )  # fmt: skip
    assert not found, "\n".join(found)


@pytest.mark.usefixtures("small_splits")
def test_a_row_does_not_depend_on_the_batch(device):
    spec, dtype = SPECS["shared heads, odd head"], torch.float32
    batch, query, kv, _ = inputs(spec, ROWS, 4, dtype, device)
    together = backend.TritonAttention().run(spec, query, kv, batch, 0, None)
    for row, (start, count, length) in enumerate(batch.rows):
        if count != 1:
            continue
        view = batch.groups[0]
        alone = dataclasses.replace(
            batch, rows=((0, 1, length),), row_starts=torch.tensor([0, 1], dtype=torch.int32, device=device), plans={},
            kv_lengths=batch.kv_lengths[row : row + 1], groups=(dataclasses.replace(view, tables=view.tables[row : row + 1]),),
        )  # fmt: skip
        out = backend.TritonAttention().run(spec, query[start : start + 1], kv, alone, 0, None)
        assert torch.equal(out[0], together[start])


def test_tokens_outside_the_rows_get_zeros(device):
    spec = SPECS["plain"]
    batch, query, kv, _ = inputs(spec, [(2, 2), (1, 3)], 4, torch.float32, device)
    out = backend.TritonAttention().run(spec, torch.cat((query, query)), kv, batch, 0, None)
    assert out[:3].abs().sum() > 0
    assert not out[3:].any()


def test_what_it_cannot_do_is_refused_with_reasons():
    with pytest.raises(ConfigError, match=r"triton: it requires a CUDA device; got cpu, .* at most 256; got 512"):
        choose_backend(AttentionSpec(2, 2, 512, 1.0), torch.device("cpu"), torch.float32, "triton")


@pytest.mark.gpu
def test_it_is_the_first_choice_on_a_gpu():
    chosen = choose_backend(SPECS["plain"], torch.device("cuda"), torch.bfloat16)
    assert isinstance(chosen, backend.TritonAttention)


@pytest.mark.usefixtures("small_splits")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "copied", "blocks"),
    [
        *(("plain", *memory) for memory in ((1, 2), (700, 10), (1 << 18, 10))),
        *(("many share", 700, 10), ("soft cap", 1 << 18, 10), ("sinks", 1, 2)),
    ],
)
def test_long_rows_over_a_copy_of_their_keys(name, copied, blocks, dtype, device, monkeypatch):
    """The rows' keys do not fill their blocks of 128; memory is for one row, for one head, and for all."""
    monkeypatch.setattr(backend, "LONG_ROW_TOKENS", 5)
    monkeypatch.setattr(backend, "DEEP_ROW_KEYS", 200)
    monkeypatch.setattr(backend, "MAX_COPIED_KEYS", copied)
    monkeypatch.setattr(backend, "reads_in_blocks", lambda spec, query, kv: True)
    rows = [(9, 9), (1, 270), (37, 161), (130, 130), (3, 52), (5, 260), (2, 200)]
    kind = torch.float8_e4m3fn if name == "sinks" else None
    batch = compare(SPECS[name], rows, 16, dtype, device, kind)
    (plan,) = batch.plans["triton", 0]
    assert (len(plan.copies), plan.keys, plan.copied) == (blocks, blocks * 128, max(copied, blocks * 128))


@pytest.mark.usefixtures("small_splits")
@pytest.mark.parametrize(
    ("name", "window"), [*(("plain", window) for window in (1, 20, 128, 150, 1000)), ("many share", 150), ("sinks", 20)]
)
def test_long_rows_with_a_window(name, window, device, monkeypatch):
    """Of keys that no token sees nothing is copied: tests' caches hold NaN there."""
    monkeypatch.setattr(backend, "LONG_ROW_TOKENS", 5)
    monkeypatch.setattr(backend, "DEEP_ROW_KEYS", 200)
    monkeypatch.setattr(backend, "reads_in_blocks", lambda spec, query, kv: True)
    rows = [(9, 9), (1, 270), (37, 461), (130, 430), (5, 260), (2, 200)]
    batch = compare(dataclasses.replace(SPECS[name], window=window), rows, 16, torch.float32, device)
    (plan,) = batch.plans["triton", 0]
    assert len(plan.long_tiles) > 0
    seen = [min(length, count + window - 1) for count, length in rows if count >= 5]
    assert plan.keys <= sum(-(-keys // 128) * 128 + 128 for keys in seen) + (256 if window == 1000 else 0)


def test_few_tokens_behind_many_keys_join_the_long_rows_where_they_are_few():
    shape = backend.geometry(4, 128, torch.bfloat16)

    def long_rows(rows):
        (plan,) = backend.cut(make_batch(rows, 16)[0], None, NOTHING_SHARED, shape, 4, True)
        assert len(plan.tiles) + len(plan.long_tiles) > 0
        return sorted(set(plan.long_tiles[:, 0].tolist()))

    assert long_rows([(3, 4096), (600, 600), (1, 9000), (300, 4095)]) == [0, 1]
    assert long_rows([(2, 5000)]) == [0]
    assert long_rows([(600, 600), *[(64, 4200)] * 16]) == list(range(17))
    assert long_rows([(600, 600), *[(64, 4200)] * 17]) == [0]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["32 over 8 of 128", "14 over 2 of 64"])
def test_real_long_rows(name, dtype, device):
    rows = [(2048, 2048), (1, 900), (513, 3000), (512, 512), (511, 511), (1000, 1129), (3, 5000), (70, 4096)]
    for changes in ({}, {"soft_cap": 30.0}, {"sinks": True}, {"window": 700}, {"window": 128, "sinks": True}):
        batch = compare(dataclasses.replace(LARGE[name], **changes), rows, 16, dtype, device)
        assert len(batch.plans["triton", 0][0].long_tiles) > 30


# two prefixes, one of them going on for some of its rows, among rows of other kinds
FAMILY = [
    (1, 70),
    (1, 140),
    (9, 140),
    (1, 129),
    (1, 66),
    (1, 40),
    (1, 133),
    (1, 97),
    (1, 98),
    (1, 99),
    (1, 100),
    (37, 61),
    (1, 150),
]
PREFIXES = [([0, 1, 3, 4, 6, 12, 2], 16), ([1, 3, 6, 12], 32), ([7, 8, 9, 10], 24)]  # of pages of 4 keys


@pytest.mark.usefixtures("small_splits")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SPECS)
def test_rows_that_begin_alike(name, dtype, device):
    spec = SPECS[name]
    batch, query, kv, sinks = inputs(spec, FAMILY, 4, dtype, device, PREFIXES)
    kv = float8_cache(kv, torch.float8_e5m2) if name == "sinks" else kv
    expected = ReferenceAttention().run(spec, query.float(), kv if name == "sinks" else kv.float(), batch, 0, sinks)
    together = sharing(batch, 4)
    out = backend.TritonAttention().run(spec, query, kv, together, 0, sinks)
    (plan,) = together.plans["triton", 0]
    assert (len(plan.shared) > 0) == (spec.window is None)
    loose = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(out.float(), expected, atol=loose, rtol=loose)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", LARGE)
def test_many_rows_that_begin_alike(name, dtype, device):
    spec = LARGE[name]
    rows = [(1, 1030 + 7 * row) for row in range(90)] + [(5, 700), (1, 3)]
    prefixes = [(list(range(70)), 64), (list(range(20, 50)), 70), (list(range(70, 90)), 50)]
    batch, query, kv, sinks = inputs(spec, rows, 16, dtype, device, prefixes)
    expected = ReferenceAttention().run(spec, query.float(), kv.float(), batch, 0, sinks)
    together = sharing(batch, 16)
    out = backend.TritonAttention().run(spec, query, kv, together, 0, sinks)
    assert len(together.plans["triton", 0][0].shared) > 6
    loose = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(out.float(), expected, atol=loose, rtol=loose)


@pytest.mark.usefixtures("small_splits")
def test_more_parts_than_are_held_at_a_time(device, monkeypatch):
    spec = SPECS["plain"]
    batch, query, kv, _ = inputs(spec, FAMILY, 4, torch.float32, device, PREFIXES)
    expected = backend.TritonAttention().run(spec, query, kv, sharing(batch, 4), 0, None)
    for most in (4, 25):
        monkeypatch.setattr(backend, "MAX_PARTS", most)
        several = sharing(batch, 4)
        torch.testing.assert_close(backend.TritonAttention().run(spec, query, kv, several, 0, None), expected)
        assert len(several.plans["triton", 0]) > 1


@pytest.mark.parametrize(
    ("name", "prefixes"),
    [
        *((name, [([1, 3, 4, 5, 6], 16)]) for name in ("shared heads, odd head", "long window", "sinks")),
        *((name, ()) for name in ("window", "sinks and window", "sinks")),
    ],
)
def test_a_plan_with_room_to_spare_gives_the_same(small_splits, device, name, prefixes):
    spec, rows = SPECS[name], [(1, 1), (1, 70), (1, 40), (1, 129), (1, 66), (1, 90), (1, 91)]
    batch, query, kv, sinks = inputs(spec, rows, 4, torch.float32, device, prefixes)
    batch = sharing(batch, 4)
    expected = backend.TritonAttention().run(spec, query, kv, batch, 0, sinks)
    fixed, lengths = backend.TritonAttention().fixed(spec, torch.float32), batch.kv_lengths.cpu().numpy()
    cut, need = fixed.cut(np.ones_like(lengths), lengths, spec.window, batch.groups[0].alike)
    assert need.splits < 30 and (need.shared > 0) == (bool(prefixes) and spec.window is None)
    room = Room(30, 5 if need.shared else 0)
    numbers = torch.from_numpy(fixed.numbers(cut, len(rows), room)).to(device)
    fixed.attach(batch, 0, numbers, len(rows), room)
    assert torch.equal(backend.TritonAttention().run(spec, query, kv, batch, 0, sinks), expected)


@pytest.mark.parametrize("name", ["shared heads, odd head", "window", "sinks and window", "sinks"])
def test_a_ragged_plan_with_room_to_spare_gives_the_same(small_splits, device, name):
    """Rows of one and of several tokens, a row that takes the tokens that are left, and an empty one."""
    spec, rows = SPECS[name], [(1, 70), (40, 45), (1, 3), (7, 90), (33, 33)]
    batch, query, kv, sinks = inputs(spec, rows, 4, torch.float32, device)
    expected = backend.TritonAttention().run(spec, query, kv, batch, 0, sinks)
    counts, lengths = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    fixed, room = backend.TritonAttention().fixed(spec, torch.float32), Room(30, 0, 40)
    cut, need = fixed.cut(counts, lengths, spec.window, batch.groups[0].alike)
    assert need.splits < 30 and 3 <= need.tiles < 40
    left, size = 14, len(rows) + 2
    starts = torch.tensor([*batch.row_starts.tolist(), len(query) + left, len(query) + left], dtype=torch.int32, device=device)
    view = batch.groups[0]
    ragged = dataclasses.replace(
        batch, row_starts=starts, kv_lengths=torch.cat([batch.kv_lengths, torch.ones_like(batch.kv_lengths[:2])]), rows=(),
        groups=(dataclasses.replace(view, tables=torch.cat([view.tables, torch.zeros_like(view.tables[:2])])),), plans={},
    )  # fmt: skip
    numbers = torch.from_numpy(fixed.numbers(cut, size, room)).to(device)
    fixed.attach(ragged, 0, numbers, size, room)
    longer = torch.cat([query, query[:left]])
    out = backend.TritonAttention().run(spec, longer, kv, ragged, 0, sinks)
    assert torch.equal(out[: len(query)], expected) and not out[len(query) :].any()


def test_plans_in_memory_that_stays_have_an_end(small_splits, monkeypatch):
    monkeypatch.setattr(backend, "MAX_PARTS", 10)
    fixed, ones = backend.TritonAttention().fixed(SPECS["plain"], torch.float32), np.ones(2, np.int32)
    assert fixed.cut(ones, np.array([300, 40], np.int32), None, nothing_shared) is None
    assert fixed.cut(ones, np.array([250, 40], np.int32), None, nothing_shared) is not None
