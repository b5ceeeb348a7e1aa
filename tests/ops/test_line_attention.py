"""Attention of single tokens by ONNX Runtime against torch's, over the same cache."""

import numpy as np
import pytest
import torch

pytest.importorskip("onnxruntime")
from quire.attn.backend import AttentionSpec
from quire.attn.batch import Batch, GroupView
from quire.attn.copies import Copies
from quire.attn.lines import (
    SCATTERED,
    TOO_MANY,
    Form,
    LineAttention,
    Seats,
    agrees,
    cut_rows,
    find_form,
    find_seats,
    find_starts,
)
from quire.ops.attention import attend
from quire.ops.kv import kv_lines
from quire.ops.qkv import HeadNorms, Rotation, reference_place_heads

PAGE = 4


def cache(form: Form, pages: int) -> torch.Tensor:
    """[pages, 2, kv_heads, page_size, head_dim], kept line by line."""
    dice = torch.Generator().manual_seed(1)
    lines = torch.randn(2, form.kv_heads, pages, PAGE, form.head_dim, generator=dice)
    return lines.permute(2, 0, 1, 3, 4)


def rotation_of(form: Form) -> Rotation | None:
    angles = torch.rand(64, form.turned // 2, generator=torch.Generator().manual_seed(2)) * 6
    return Rotation(angles.cos(), angles.sin()) if form.turned else None


def norms_of(form: Form) -> HeadNorms | None:
    weights = torch.rand(2, form.head_dim, generator=torch.Generator().manual_seed(3))
    return None if form.eps is None else HeadNorms(weights[0], weights[1], form.eps, 1.0)


def run_lines(form: Form, kv: torch.Tensor, qkv: torch.Tensor, starts: list[int], lengths: list[int]) -> torch.Tensor:
    seats, out = Seats(len(qkv)), torch.full((len(qkv), form.heads * form.head_dim), float("nan"))
    attention = LineAttention(form, kv, rotation_of(form), norms_of(form), qkv, out, seats)
    seats.take(np.array(starts), np.array(lengths, np.int32))
    attention.place()
    attention.run()
    return out


def run_torch(form: Form, kv: torch.Tensor, qkv: torch.Tensor, starts: list[int], lengths: list[int]) -> torch.Tensor:
    at = torch.tensor(lengths) - 1
    query = reference_place_heads(qkv.clone(), kv, torch.tensor(starts) + at, at, rotation_of(form), norms_of(form))
    lines, out = kv_lines(kv), []
    for one, start, length in zip(query, starts, lengths, strict=True):
        keys, values = lines[:, None, :, start : start + length]
        out.append(attend(one[None, None], keys, values, None, scale=form.scale).flatten())
    return torch.stack(out)


@pytest.mark.parametrize(
    "form",
    [
        Form(9, 3, 64, 0.125, 64, None),
        Form(4, 4, 16, 0.3, 16, None),
        Form(4, 1, 32, 0.2, 16, None),  # half of a head turns
        Form(6, 2, 32, 0.2, 0, None),  # nothing turns
        Form(4, 2, 32, 0.2, 32, 1e-6),  # heads are normed
        Form(4, 2, 16, 0.25, 0, 1e-5),
    ],
)
@pytest.mark.parametrize("rows", [1, 3, 21])
def test_like_torch(form, rows):
    assert agrees(form)
    starts = [PAGE * (1 + 8 * row) for row in range(rows)]
    lengths = [1 + 7 * row % 31 for row in range(rows)]
    qkv = torch.randn(rows, (form.heads + 2 * form.kv_heads) * form.head_dim, generator=torch.Generator().manual_seed(4))
    ours, theirs = cache(form, 200), cache(form, 200)
    found, expected = (
        run_lines(form, ours, qkv.clone(), starts, lengths),
        run_torch(form, theirs, qkv, starts, lengths),
    )
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)  # the new keys are in, and nothing else was touched


@pytest.mark.parametrize("form", [Form(9, 3, 64, 0.125, 64, None), Form(4, 2, 32, 0.2, 32, 1e-6)])
def test_scattered_rows_are_attended_to_on_copies(form, monkeypatch):
    """They share pages, grow, come and go; layers differ in their norms. The bits are those of rows in line."""
    monkeypatch.setattr("quire.attn.copies.ROOM", 4 * PAGE)
    monkeypatch.setattr("quire.attn.copies.MOST_BYTES", 3 * 4 * PAGE * 2 * form.kv_heads * form.head_dim * 4)
    copies, layers = Copies(form, PAGE, rows=6), [(cache(form, 40), norms_of(form), rotation_of(form)) for _ in range(2)]
    tables = np.array([[3, 9, 5, 6, 7], [3, 9, 12, 11, 0], [20, 19, 0, 0, 0], [30, 2, 1, 0, 0]], np.int32)
    steps = [([0], 1), ([0, 1], 2), ([2, 1, 0], 3), ([1, 0, 2], 2), ([3, 0, 2, 1], 3), ([2], 1)]  # and how many have room
    for step, (rows, fit) in enumerate(steps):
        lengths = np.array([14, 12, 5, 9], np.int32)[rows] + step % 4
        seats = np.arange(len(rows)) * 2 % 5
        assert copies.take(seats, tables[rows], lengths).tolist() == seats[fit:].tolist()
        for number, (kv, norms, rotation) in enumerate(layers):
            qkv = torch.randn(6, sum(form.columns), generator=torch.Generator().manual_seed(9 * step + number))
            out, before = torch.full((6, form.columns[0]), 7.0), kv.clone()
            copies.attend(kv, rotation, norms, qkv, out)
            for row, seat, length in zip(rows, copies.seats.tolist(), lengths, strict=False):
                pages = torch.from_numpy(tables[row, : -(-length // PAGE)]).long()
                alone = torch.cat((before[:1], before[pages])).permute(1, 2, 0, 3, 4).contiguous().permute(2, 0, 1, 3, 4)
                assert torch.equal(run_lines(form, alone, qkv[seat : seat + 1].clone(), [PAGE], [int(length)])[0], out[seat])
                assert torch.equal(kv[pages], alone[1:])  # the new key is in its place
            others = sorted({*range(6)} - {*copies.seats.tolist()})
            assert torch.equal(out[others], torch.full((len(others), form.columns[0]), 7.0))


def test_company_changes_no_bit():
    form = Form(4, 2, 32, 0.2, 32, None)
    starts, lengths = [PAGE * (1 + 8 * row) for row in range(19)], [2 + row for row in range(19)]
    qkv = torch.randn(19, 8 * 32, generator=torch.Generator().manual_seed(4))
    together = run_lines(form, cache(form, 200), qkv.clone(), starts, lengths)
    for row in (0, 7, 18):
        alone = run_lines(form, cache(form, 200), qkv[row : row + 1].clone(), starts[row : row + 1], lengths[row : row + 1])
        assert torch.equal(alone[0], together[row])


def test_rows_that_move_are_followed():
    form = Form(4, 2, 16, 0.25, 16, None)
    kv, qkv = cache(form, 40), torch.randn(3, 8 * 16, generator=torch.Generator().manual_seed(4))
    seats, out = Seats(3), torch.empty(3, 4 * 16)
    attention = LineAttention(form, kv, rotation_of(form), None, qkv, out, seats)
    for starts in ([4, 20, 40], [4, 60, 40], [80, 60, 100]):
        seats.take(np.array(starts), np.full(3, 6, np.int32))
        attention.place()
        attention.run()
        torch.testing.assert_close(out, run_torch(form, kv.clone(), qkv, starts, [6] * 3), atol=1e-5, rtol=1e-5)


def test_threads_share_long_rows():
    form = Form(4, 2, 16, 0.25, 0, None)
    kv, qkv = cache(form, 320), torch.randn(2, 8 * 16, generator=torch.Generator().manual_seed(4))
    seats, out = Seats(2), torch.empty(2, 4 * 16)
    attention = LineAttention(form, kv, None, None, qkv, out, seats)
    for lengths in ([30, 20], [30, 1100]):
        seats.take(np.array([8, 80]), np.array(lengths, np.int32))
        attention.place()
        attention.run()
        torch.testing.assert_close(out, run_torch(form, kv.clone(), qkv, [8, 80], lengths), atol=1e-5, rtol=1e-5)
    assert seats.shared


@pytest.mark.parametrize("rows", [4, 7, 40])
def test_threads_divide_rows(rows):
    form, before = Form(4, 2, 16, 0.25, 16, None), torch.get_num_threads()
    starts, lengths = [PAGE * (1 + 8 * row) for row in range(rows)], [1 + 7 * row % 31 for row in range(rows)]
    qkv = torch.randn(rows, 8 * 16, generator=torch.Generator().manual_seed(4))
    torch.set_num_threads(3)
    try:
        found = run_lines(form, cache(form, 340), qkv.clone(), starts, lengths)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found, run_torch(form, cache(form, 340), qkv, starts, lengths), atol=1e-5, rtol=1e-5)


def test_rows_are_cut_for_threads():
    sizes = lambda count, spread: [part.stop - part.start for part in cut_rows(count, spread)]  # noqa: E731
    assert sizes(1, 1) == [1] and sizes(21, 1) == [16, 4, 1]
    assert sizes(16, 2) == [8, 8] and sizes(5, 2) == [2, 2, 1] and sizes(64, 2) == [16] * 4 and sizes(4, 16) == [1] * 4


def batch_of(tables: list[list[int]], lengths: list[int]) -> Batch:
    nothing = torch.empty(0, dtype=torch.int64)
    rows = tuple((i, 1, length) for i, length in enumerate(lengths))
    return Batch(*[nothing] * 4, rows, nothing, (GroupView(torch.tensor(tables, dtype=torch.int32), nothing),))


def test_where_rows_start():
    tables = [[3, 4, 5], [7, 8, 2], [9, 0, 0], [6, 5, 4], [0, 11, 12]]
    lengths = [12, 7, 3, 4, 11]  # not all pages are in use yet
    assert find_starts(batch_of(tables, lengths), 0, None, PAGE).tolist() == [12, 28, 36, 24, SCATTERED]
    assert find_starts(batch_of(tables, [12, 9, 3, 4, 11]), 0, None, PAGE)[1] == SCATTERED
    assert find_starts(batch_of(tables, lengths), 0, 7, PAGE).tolist() == [TOO_MANY, 28, 36, 24, TOO_MANY]


def test_rows_keep_their_seats():
    seated = np.array([10, 20, 30, 40])
    assert find_seats(np.array([10, 20, 30, 40]), seated) == [0, 1, 2, 3]
    assert find_seats(np.array([10, 30, 40]), seated) == [0, 2, 1]  # the fourth takes the free seat
    assert find_seats(np.array([50, 40, 20]), seated) == [0, 2, 1]
    assert find_seats(np.array([SCATTERED, 20, SCATTERED, 60, 10]), seated) == [4, 1, 0, 2, 3]
    assert find_seats(np.array([10, 10]), seated) == [1, 0]


def test_scattered_rows_do_no_harm():
    form = Form(4, 2, 16, 0.25, 16, None)
    kv, qkv = cache(form, 10), torch.randn(2, 8 * 16, generator=torch.Generator().manual_seed(4))
    before, seats, out = kv.clone(), Seats(2), torch.empty(2, 4 * 16)
    attention = LineAttention(form, kv, rotation_of(form), None, qkv, out, seats)
    seats.take(np.array([8, SCATTERED]), np.array([6, 7], np.int32))
    attention.place()
    attention.run()
    torch.testing.assert_close(out[:1], run_torch(form, before.clone(), qkv[:1], [8], [6]), atol=1e-5, rtol=1e-5)
    changed = (kv != before).flatten(1).any(dim=1).nonzero().flatten().tolist()
    assert changed == [0, 3]  # the null page, and the page of the first row's token


def test_what_the_runtime_cannot_do_stays_with_torch():
    odd, good = Form(4, 2, 20, 0.2, 20, None), Form(4, 2, 16, 0.25, 0, None)
    assert not agrees(odd)
    spec, lines = AttentionSpec(4, 2, 16, 0.25), cache(good, 3)
    assert find_form(spec, lines, None, None, None) == good
    assert find_form(spec, lines.contiguous(), None, None, None) is None  # page by page
    assert find_form(spec, lines.half(), None, None, None) is None
    assert find_form(spec, lines, None, None, torch.zeros(4)) is None
    assert find_form(AttentionSpec(4, 2, 16, 0.25, soft_cap=1.0), lines, None, None, None) is None
