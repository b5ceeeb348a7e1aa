"""The reference backend against attention written out token by token."""

import math

import pytest
import torch

from quire.attn.backend import AttentionSpec, choose_backend
from quire.attn.batch import Batch, GroupView
from quire.ops.kv import kv_gather, kv_lines, kv_write
from quire.types.errors import ConfigError

PAGE = 4
# (token count, kv length) of each row
ROWS = [(0, 7), (1, 1), (1, 17), (5, 5), (3, 22), (1, 40), (1, 9), (30, 41), (1, 12), (0, 21)]


def naive(spec, query, keys, values, position, sinks):
    """One query token [heads, d] over a row's keys [length, kv_heads, d]."""
    out = torch.zeros_like(query)
    for head in range(spec.heads):
        kv_head = head // (spec.heads // spec.kv_heads)
        lowest = 0 if spec.window is None else max(0, position - spec.window + 1)
        logits = keys[lowest : position + 1, kv_head] @ query[head] * spec.scale
        if spec.soft_cap is not None:
            logits = torch.tanh(logits / spec.soft_cap) * spec.soft_cap
        if sinks is not None:
            logits = torch.cat((logits, sinks[head : head + 1]))
        weights = torch.softmax(logits, 0)[: position + 1 - lowest]
        out[head] = weights @ values[lowest : position + 1, kv_head]
    return out


def make_batch(rows, page_size=PAGE, scattered=True):
    """Rows with scattered pages, or pages in a row; what no token was written to is NaN."""
    per_row = [math.ceil(length / page_size) for _, length in rows]
    pages = 1 + sum(per_row)
    order = list(range(1, pages))
    if scattered:
        order = (torch.randperm(pages - 1, generator=torch.Generator().manual_seed(1)) + 1).tolist()
    tables = torch.zeros(len(rows), max(per_row), dtype=torch.int32)
    for row, count in enumerate(per_row):
        tables[row, :count] = torch.tensor(order[:count])
        order = order[count:]
    starts = [0]
    for count, _ in rows:
        starts.append(starts[-1] + count)
    positions = torch.cat([torch.arange(length - count, length) for count, length in rows])
    row_of = torch.cat([torch.full((count,), row) for row, (count, _) in enumerate(rows)])
    write = tables[row_of, positions // page_size].long() * page_size + positions % page_size
    batch = Batch(
        ids=torch.zeros(starts[-1], dtype=torch.long),
        positions=positions,
        row_starts=torch.tensor(starts, dtype=torch.int32),
        kv_lengths=torch.tensor([length for _, length in rows], dtype=torch.int32),
        rows=tuple((start, count, length) for start, (count, length) in zip(starts, rows, strict=False)),
        logit_index=torch.empty(0, dtype=torch.long),
        groups=(GroupView(tables, write),),
    )
    return batch, pages


def filled_cache(spec, batch, pages, lengths, *, stride=1, generator):
    """The cache with every row's keys in place, and those keys as [length, kv_heads, d] per row."""
    room = torch.full((pages, 2 * stride, spec.kv_heads, PAGE, spec.head_dim), float("nan"))
    kv = room[:, :2]
    rows = []
    for row, length in enumerate(lengths):
        keys, values = torch.randn(2, length, spec.kv_heads, spec.head_dim, generator=generator)
        at = torch.arange(length)
        kv_write(kv, keys, values, batch.groups[0].tables[row, at // PAGE].long() * PAGE + at % PAGE)
        rows.append((keys, values))
    return kv, rows


SPECS = {
    "plain": AttentionSpec(4, 4, 8, 8**-0.5),
    "shared heads, own scale": AttentionSpec(6, 2, 8, 0.2),
    "window": AttentionSpec(6, 2, 8, 0.2, window=7),
    "window of one": AttentionSpec(2, 1, 8, 0.2, window=1),
    "soft cap": AttentionSpec(6, 3, 8, 0.9, soft_cap=2.0),
    "sinks and window": AttentionSpec(6, 2, 8, 0.3, window=10, sinks=True),
}


@pytest.mark.parametrize("stride", [1, 2], ids=["contiguous", "strided"])
@pytest.mark.parametrize("name", SPECS)
def test_ragged_rows(name, stride):
    spec = SPECS[name]
    generator = torch.Generator().manual_seed(2)
    batch, pages = make_batch(ROWS)
    kv, rows = filled_cache(spec, batch, pages, [length for _, length in ROWS], stride=stride, generator=generator)
    query = torch.randn(len(batch.ids), spec.heads, spec.head_dim, generator=generator)
    sinks = torch.randn(spec.heads, generator=generator) if spec.sinks else None
    backend = choose_backend(spec, torch.device("cpu"), torch.float32, "reference")
    out = backend.run(spec, query, kv, batch, 0, sinks)
    for (start, count, length), (keys, values) in zip(batch.rows, rows, strict=True):
        for i in range(count):
            expected = naive(spec, query[start + i], keys, values, length - count + i, sinks)
            torch.testing.assert_close(out[start + i], expected, atol=1e-5, rtol=1e-4)


EQUAL = [(6, 6), (6, 6), (1, 9), (6, 6), (6, 6), (6, 6), (6, 8), (6, 8)]


@pytest.mark.parametrize("scattered", [True, False], ids=["scattered", "in a row"])
@pytest.mark.parametrize("lies", ["by line", "by page", "apart"])
@pytest.mark.parametrize("rows", [ROWS, [(1, 17), (1, 40), (1, 1)], EQUAL], ids=["mixed", "single tokens", "equal lengths"])
@pytest.mark.parametrize("name", SPECS)
def test_the_cpu_backend_on_every_layout(name, rows, lies, scattered):
    spec = SPECS[name]
    generator = torch.Generator().manual_seed(2)
    batch, pages = make_batch(rows, scattered=scattered)
    kv, each = filled_cache(spec, batch, pages, [length for _, length in rows], generator=generator)
    if lies == "by line":
        kv = kv.permute(1, 2, 0, 3, 4).contiguous().permute(2, 0, 1, 3, 4)
        assert kv_lines(kv) is not None
    elif lies == "apart":
        kv = kv.transpose(0, 1).contiguous().transpose(0, 1)
    query = torch.randn(len(batch.ids), spec.heads, spec.head_dim, generator=generator)
    sinks = torch.randn(spec.heads, generator=generator) if spec.sinks else None
    out = choose_backend(spec, torch.device("cpu"), torch.float32, "cpu").run(spec, query, kv, batch, 0, sinks)
    for (start, count, length), (keys, values) in zip(batch.rows, each, strict=True):
        for i in range(count):
            expected = naive(spec, query[start + i], keys, values, length - count + i, sinks)
            torch.testing.assert_close(out[start + i], expected, atol=1e-5, rtol=1e-4)


def test_a_long_row_is_cut_into_tiles():
    spec = AttentionSpec(2, 1, 8, 0.3, window=300)
    generator = torch.Generator().manual_seed(4)
    batch, pages = make_batch([(700, 720)])
    kv, [(keys, values)] = filled_cache(spec, batch, pages, [720], generator=generator)
    query = torch.randn(700, 2, 8, generator=generator)
    out = choose_backend(spec, torch.device("cpu"), torch.float32).run(spec, query, kv, batch, 0, None)
    for i in (0, 255, 256, 299, 511, 512, 699):
        torch.testing.assert_close(out[i], naive(spec, query[i], keys, values, 20 + i, None), atol=1e-5, rtol=1e-4)


def test_tokens_outside_the_rows_get_zeros():
    """Padding at the end of a batch belongs to no row."""
    spec = SPECS["plain"]
    generator = torch.Generator().manual_seed(5)
    batch, pages = make_batch([(2, 2)])
    kv, _ = filled_cache(spec, batch, pages, [2], generator=generator)
    out = choose_backend(spec, torch.device("cpu"), torch.float32).run(spec, torch.randn(5, 4, 8), kv, batch, 0, None)
    assert out[:2].abs().sum() > 0
    assert not out[2:].any()


@pytest.mark.parametrize("apart", [False, True])
def test_gather_reads_what_write_wrote(apart):
    kv = torch.zeros(2, 6, 2, PAGE, 3).transpose(0, 1) if apart else torch.zeros(6, 2, 2, PAGE, 3)
    key, value = torch.randn(2, 7, 2, 3)
    pages = torch.tensor([[5, 2]], dtype=torch.int32)
    write = torch.tensor([20, 21, 22, 23, 8, 9, 10])
    kv_write(kv, key, value, write)
    gathered = kv_gather(kv, pages)
    assert torch.equal(gathered[0, 0, :, :7], key.transpose(0, 1))
    assert torch.equal(gathered[1, 0, :, :7], value.transpose(0, 1))
    assert not gathered[:, :, :, 7:].any()


def test_an_unknown_backend_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"reference.*'flush'"):
        choose_backend(SPECS["plain"], torch.device("cpu"), torch.float32, "flush")
