"""Attention by the kernel in C against torch's, over the same cache."""

import shutil
from dataclasses import dataclass

import pytest
import torch
from test_paged_attention import make_batch

from quire.attn.backend import AttentionSpec
from quire.attn.cpu import CPUAttention
from quire.ops import paged_attention
from quire.ops.arguments import HeadNorms, Rotation
from quire.ops.kv import attend
from quire.ops.native import kernels
from quire.ops.paged_attention import AttentionRows, PagedAttention, suits
from quire.ops.qkv import reference_place_heads

by_kernel = pytest.mark.skipif(kernels() is None, reason="no C compiler was there when Quire was installed")


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    turned: int = 0
    normed: bool = False
    window: int | None = None
    soft_cap: float | None = None
    layout: str = "pages"


SHAPES = [
    Shape(9, 3, 64, 32, turned=64),
    Shape(4, 4, 16, 4),
    Shape(5, 1, 128, 16, turned=32, normed=True),
    Shape(6, 3, 80, 64, turned=80, window=13),
    Shape(8, 1, 64, 7, normed=True, layout="lines"),
    Shape(4, 2, 512, 48, turned=512, window=1, layout="apart"),
    Shape(7, 1, 32, 256, turned=16, layout="lines"),
    Shape(6, 2, 64, 16, turned=64, soft_cap=0.7),
    Shape(4, 2, 48, 8, turned=48, window=21, soft_cap=50.0, layout="lines"),
]
MANY_HEADS = [
    Shape(80, 1, 16, 32),
    Shape(12, 12, 64, 32, turned=64),
    Shape(16, 2, 256, 16, window=40),
    Shape(40, 1, 512, 48, soft_cap=30.0),
]
LENGTHS = [1, 2, 33, 64, 100, 31, 5]


def make_cache(shape: Shape, pages: int) -> torch.Tensor:
    """[pages, 2, kv_heads, page_size, head_dim], as the layout has it in memory."""
    kv = torch.randn(pages, 2, shape.kv_heads, shape.page_size, shape.head_dim, generator=torch.Generator().manual_seed(1))
    if shape.layout == "lines":
        return kv.permute(1, 2, 0, 3, 4).contiguous().permute(2, 0, 1, 3, 4)
    return kv.transpose(0, 1).contiguous().transpose(0, 1) if shape.layout == "apart" else kv


def make_rows(shape: Shape, lengths: list[int]) -> tuple[AttentionRows, torch.Tensor, int]:
    """Rows with scattered pages, their tables, and how many pages there are."""
    needed = [-(-length // shape.page_size) for length in lengths]
    order = (torch.randperm(sum(needed), generator=torch.Generator().manual_seed(2)) + 1).int()
    tables = torch.full((len(lengths), max(needed) + 1), -(1 << 30), dtype=torch.int32)  # to be followed by nobody
    for row, part in enumerate(order.split(needed)):
        tables[row, : len(part)] = part
    return rows_of(tables, lengths), tables, sum(needed) + 1


def rows_of(tables: torch.Tensor, lengths: list[int], counts: list[int] | None = None) -> AttentionRows:
    """Rows of so many tokens, or of one each."""
    starts = torch.tensor([0, *(counts or [1] * len(lengths))]).cumsum(0)
    return AttentionRows(tables, torch.tensor(lengths, dtype=torch.int32), starts.int())


def make_extras(shape: Shape) -> tuple[Rotation | None, HeadNorms | None]:
    dice = torch.Generator().manual_seed(3)
    angles, weights = torch.rand(128, shape.turned // 2, generator=dice) * 6, torch.rand(2, shape.head_dim, generator=dice)
    rotation = Rotation(angles.cos(), angles.sin()) if shape.turned else None
    return rotation, HeadNorms(weights[0], weights[1], 1e-6, 1.0) if shape.normed else None


def make_qkv(shape: Shape, rows: int) -> torch.Tensor:
    return torch.randn(rows, (shape.heads + 2 * shape.kv_heads) * shape.head_dim, generator=torch.Generator().manual_seed(4))


def bind(shape: Shape, kv: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor | None, placed: bool = False) -> PagedAttention:
    rotation, norms = make_extras(shape)
    terms = {"scale": shape.head_dim**-0.5, "window": shape.window, "soft_cap": shape.soft_cap}
    return PagedAttention(kv, qkv, out, rotation=rotation, norms=norms, placed=placed, **terms)


def run_kernel(shape: Shape, kv: torch.Tensor, qkv: torch.Tensor, rows: AttentionRows) -> torch.Tensor:
    out = torch.full((len(qkv), shape.heads * shape.head_dim), float("nan"))
    bind(shape, kv, qkv, out).run(rows)
    return out


def run_in_two(shape: Shape, kv: torch.Tensor, qkv: torch.Tensor, rows: AttentionRows) -> torch.Tensor:
    bind(shape, kv, qkv, None).run(rows)
    out = torch.full((len(qkv), shape.heads * shape.head_dim), float("nan"))
    bind(shape, kv, qkv[:, : shape.heads * shape.head_dim], out, placed=True).run(rows)
    return out


def run_torch(shape: Shape, kv: torch.Tensor, qkv: torch.Tensor, tables: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    at = torch.tensor(lengths) - 1
    write = tables[torch.arange(len(at)), at // shape.page_size].long() * shape.page_size + at % shape.page_size
    query, out = reference_place_heads(qkv.clone(), kv, write, at, *make_extras(shape)), []
    for one, table, length in zip(query, tables, lengths, strict=True):
        pages = table[: -(-length // shape.page_size)].long()
        lowest = max(0, length - (shape.window or length))
        keys, values = kv[pages].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, None, :, lowest:length]
        out.append(attend(one[None, None], keys, values, None, scale=shape.head_dim**-0.5, soft_cap=shape.soft_cap).flatten())
    return torch.stack(out)


@by_kernel
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.turned and shape.window != 1], ids=str)
def test_tokens_may_have_their_own_rows_of_the_rotation(shape, monkeypatch):
    rows, tables, pages = make_rows(shape, LENGTHS)
    qkv = make_qkv(shape, len(LENGTHS))
    runs = run_kernel, run_in_two
    expected = [run(shape, make_cache(shape, pages), qkv, rows) for run in runs]
    rotation, norms = make_extras(shape)
    places = torch.randperm(len(rotation.cos), generator=torch.Generator().manual_seed(5))
    moved = Rotation(rotation.cos[places], rotation.sin[places])
    monkeypatch.setattr(f"{__name__}.make_extras", lambda _: (moved, norms))
    rotary = places.argsort()[torch.tensor(LENGTHS) - 1]
    lengths, starts = torch.tensor(LENGTHS, dtype=torch.int32), torch.arange(len(LENGTHS) + 1, dtype=torch.int32)
    turned = AttentionRows(tables, lengths, starts, rotary)
    for run, was in zip(runs, expected, strict=True):
        assert torch.equal(run(shape, make_cache(shape, pages), qkv, turned), was)
    assert not torch.equal(run_kernel(shape, make_cache(shape, pages), qkv, rows), expected[0])


@pytest.mark.skipif(not shutil.which("cc"), reason="there is no C compiler")
def test_where_there_is_a_compiler_there_is_a_kernel():
    assert kernels() is not None


@by_kernel
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_like_torch(shape):
    rows, tables, pages = make_rows(shape, LENGTHS)
    qkv, ours, theirs = make_qkv(shape, len(LENGTHS)), make_cache(shape, pages), make_cache(shape, pages)
    assert suits(ours)
    found, expected = run_kernel(shape, ours, qkv, rows), run_torch(shape, theirs, qkv, tables, LENGTHS)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(
        ours, theirs, atol=2e-6, rtol=2e-6
    )  # every key is where it belongs, and nothing else was touched


@by_kernel
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_gets_the_same_bits_in_any_company(shape, monkeypatch):
    rows, tables, pages = make_rows(shape, LENGTHS)
    qkv = make_qkv(shape, len(LENGTHS))
    monkeypatch.setattr(paged_attention, "workers", lambda: 3)
    together = run_kernel(shape, make_cache(shape, pages), qkv, rows)
    monkeypatch.setattr(paged_attention, "workers", lambda: 1)
    for row, length in enumerate(LENGTHS):
        alone = rows_of(tables[row : row + 1], [length])
        assert torch.equal(run_kernel(shape, make_cache(shape, pages), qkv[row : row + 1].clone(), alone)[0], together[row])


@by_kernel
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_placing_first_and_attending_then_gives_the_same_bits(shape):
    rows, _, pages = make_rows(shape, LENGTHS)
    kv, qkv = make_cache(shape, pages), make_qkv(shape, len(LENGTHS))
    other = kv.clone().as_strided(kv.shape, kv.stride())
    expected = run_kernel(shape, kv, qkv, rows)
    assert torch.equal(run_in_two(shape, other, qkv, rows), expected)
    assert torch.equal(kv, other)


# (token count, length) of each row: whole prompts, later parts of them, single tokens, nothing, blocks that end anywhere
PARTS = [(1, 1), (70, 70), (0, 9), (5, 33), (64, 127), (1, 100), (33, 64), (2, 2), (23, 41), (9, 128)]


@by_kernel
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("shape", [*SHAPES, *MANY_HEADS], ids=str)
def test_tokens_get_the_same_bits_however_their_rows_are_cut(shape, workers, monkeypatch):
    """One by one, in pieces, or all at once."""
    monkeypatch.setattr(paged_attention, "workers", lambda: workers)
    lengths = [length for _, length in PARTS]
    _, tables, pages = make_rows(shape, lengths)
    qkv = make_qkv(shape, sum(count for count, _ in PARTS))

    def run(most: int) -> tuple[torch.Tensor, torch.Tensor]:
        kv, found, done = make_cache(shape, pages), [], [length - count for count, length in PARTS]
        tokens = torch.tensor([0] + [count for count, _ in PARTS]).cumsum(0)[:-1]
        while done != lengths:
            counts = [min(most, length - begun) for length, begun in zip(lengths, done, strict=True)]
            index = torch.cat([torch.arange(count) + first for first, count in zip(tokens, counts, strict=True)])
            done = [begun + count for begun, count in zip(done, counts, strict=True)]
            found.append((index, run_in_two(shape, kv, qkv[index], rows_of(tables, done, counts))))
            tokens = tokens + torch.tensor(counts)
        return kv, torch.cat([out for _, out in found])[torch.cat([index for index, _ in found]).argsort()]

    expected_kv, expected = run(1)
    assert not expected.isnan().any()
    for most in (128, 7, 30):
        kv, out = run(most)
        assert torch.equal(kv, expected_kv) and torch.equal(out, expected)


@by_kernel
@pytest.mark.parametrize("window", [None, 20])
def test_tokens_see_nothing_that_comes_later(window):
    """What is not a number in later keys and values, or before the window, reaches nobody."""
    shape = Shape(6, 2, 32, 16, window=window)
    _, tables, pages = make_rows(shape, [90])
    qkv = make_qkv(shape, 90)
    clean = run_in_two(shape, make_cache(shape, pages), qkv, rows_of(tables, [90], [90]))
    for spoilt in (0, 40, 70):
        broken = qkv.clone()
        broken[spoilt] = float("nan")
        found = run_in_two(shape, make_cache(shape, pages), broken, rows_of(tables, [90], [90]))
        end = 90 if window is None else min(90, spoilt + window)
        assert found[spoilt:end].isnan().all() and not found[:spoilt].isnan().any()
        assert torch.equal(found[:spoilt], clean[:spoilt]) and torch.equal(found[end:], clean[end:])


@by_kernel
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_many_rows_are_divided(workers, monkeypatch):
    """Far more than one thread is worth."""
    shape, lengths = Shape(6, 2, 32, 16), [200 + row for row in range(40)]
    monkeypatch.setattr(paged_attention, "workers", lambda: workers)
    rows, tables, pages = make_rows(shape, lengths)
    qkv, ours, theirs = make_qkv(shape, 40), make_cache(shape, pages), make_cache(shape, pages)
    found, expected = run_kernel(shape, ours, qkv, rows), run_torch(shape, theirs, qkv, tables, lengths)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


@by_kernel
@pytest.mark.parametrize("size", [1e-3, 30.0, 3e4])
def test_scores_of_any_size(size):
    """Weights from nearly equal to all for one key."""
    shape = Shape(3, 1, 64, 32)
    rows, tables, pages = make_rows(shape, LENGTHS)
    qkv, kv = make_qkv(shape, len(LENGTHS)) * size, make_cache(shape, pages)
    expected = run_torch(shape, kv.clone(), qkv, tables, LENGTHS)
    torch.testing.assert_close(run_kernel(shape, kv, qkv, rows), expected, atol=1e-4 * max(size, 1), rtol=1e-4)


@by_kernel
@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_what_is_not_a_number_stays_with_its_row(soft_cap):
    shape = Shape(4, 2, 16, 4, soft_cap=soft_cap)
    rows, _, pages = make_rows(shape, [9, 9, 9])
    qkv = make_qkv(shape, 3)
    healthy = run_kernel(shape, make_cache(shape, pages), qkv, rows)
    qkv[1] = float("nan")
    found = run_kernel(shape, make_cache(shape, pages), qkv, rows)
    assert found[1].isnan().all() and torch.equal(found[[0, 2]], healthy[[0, 2]])


MIXED = [(0, 7), (1, 1), (5, 5), (3, 22), (1, 40), (1, 9), (30, 41), (600, 700), (2, 700), (1, 12), (0, 21)]


@by_kernel
@pytest.mark.parametrize("soft_cap", [None, 0.5])
@pytest.mark.parametrize("window", [None, 11])
@pytest.mark.parametrize("rows", [MIXED, [(0, 7), (300, 400), (0, 21)]])
def test_prompts_and_single_tokens_through_the_backend(rows, window, soft_cap, monkeypatch):
    """Whatever goes to the kernel, the answer is torch's. What nobody has written is not read: it is not a number."""
    spec = AttentionSpec(4, 2, 32, 0.2, window, soft_cap)
    batch, pages = make_batch(rows, page_size=16)
    dice = torch.Generator().manual_seed(5)
    kv = torch.full((pages, 2, 2, 16, 32), float("nan"))
    for (_, _, length), table in zip(batch.rows, batch.groups[0].tables.long(), strict=True):
        at = torch.arange(length)
        kv[table[at // 16], :, :, at % 16] = torch.randn(length, 2, 2, 32, generator=dice)
    query = torch.randn(len(batch.ids), 4, 32, generator=dice)
    found = CPUAttention().run(spec, query, kv, batch, 0, None)
    batch.plans.clear()
    monkeypatch.setattr(paged_attention, "suits", lambda kv: False)
    torch.testing.assert_close(found, CPUAttention().run(spec, query, kv, batch, 0, None), atol=1e-5, rtol=1e-5)


def test_caches_that_are_not_for_the_kernel(monkeypatch):
    kv = torch.zeros(3, 2, 2, 4, 32)
    assert suits(kv) == (kernels() is not None)
    assert not suits(kv.double()) and not suits(kv.bfloat16()) and not suits(torch.zeros(3, 2, 2, 4, 24))
    assert not suits(torch.zeros(3, 2, 2, 4, 544)) and not suits(torch.zeros(3, 2, 2, 32, 4).transpose(3, 4))
    monkeypatch.setattr(paged_attention, "kernels", lambda: None)
    assert not suits(kv)


@by_kernel
def test_a_layer_of_another_release_is_refused():
    with pytest.raises(ValueError, match="another release"):
        kernels().attend(b"short", b"shorter", 1)
    with pytest.raises(ValueError, match="another release"):
        kernels().run(b"short", 1, 1)
