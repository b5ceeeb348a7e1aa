"""Slots and batches against a naive reference that walks token by token."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runner_support import CPU, admission, entries, ints, plan

from quire.runner.batch import build_batch
from quire.runner.slots import Slots
from quire.types.errors import EngineError
from quire.types.plan import spans

SLOTS, LENGTH, PAGE, GROUPS = 5, 40, 4, 2
PAGES = LENGTH // PAGE


@st.composite
def tenants(draw):
    """Different slots: (slot, tokens, prompt length, start, count of the row)."""
    found = []
    for slot in draw(st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=SLOTS, unique=True)):
        known = draw(st.integers(1, LENGTH))
        start = draw(st.integers(0, known - 1))
        count = draw(st.integers(1, known - start))
        tokens = draw(st.lists(st.integers(0, 999), min_size=known, max_size=known))
        found.append((slot, tokens, draw(st.integers(1, known)), start, count))
    return found


@settings(max_examples=100, deadline=None)
@given(tenants=tenants(), seed=st.integers(0, 99), reporters=st.sets(st.integers(0, SLOTS - 1)))
def test_a_batch_is_what_walking_the_plan_gives(tenants, seed, reporters):
    pages = np.random.default_rng(seed).permutation(np.arange(1, 1 + GROUPS * SLOTS * PAGES)).reshape(GROUPS, SLOTS, PAGES)
    slots = Slots(SLOTS, LENGTH, GROUPS, PAGE, CPU)
    slots.tokens.fill_(-5)  # an old tenant's tokens must never be read
    admitted = tuple(admission(s, tokens, prompt=prompt, start=start) for s, tokens, prompt, start, _ in tenants)
    written = [(g, s, i, int(pages[g, s, i])) for g in range(GROUPS) for s, *_ in tenants for i in range(PAGES)]
    rows = [(s, count, start + count, start + count == len(tokens)) for s, tokens, _, start, count in tenants]
    begins = np.cumsum([0, *(row[1] for row in rows)]).tolist()
    scored = [token for row, at in zip(rows, begins, strict=False) if row[0] in reporters for token in range(at, at + row[1])]
    step = plan(rows=rows, scored=scored, admitted=admitted, **entries(*written))
    slots.take_in(step)
    slots.check(step)
    built = build_batch(step, slots)
    batch, drawing = built.batch, built.rows

    ids, positions, places, starts, kept, final = [], [], [[], []], [0], [], []
    for slot, tokens, _, start, count in tenants:
        for position in range(start, start + count):
            ids.append(tokens[position])
            positions.append(position)
            for g in range(GROUPS):
                places[g].append(int(pages[g, slot, position // PAGE]) * PAGE + position % PAGE)
        starts.append(len(ids))
        draws = start + count == len(tokens)
        own = count if slot in reporters else int(draws)
        final.append((len(kept), own, start + count, draws))
        kept += range(len(ids) - own, len(ids))
    assert batch.ids.tolist() == ids
    assert batch.positions.tolist() == positions
    assert batch.row_starts.tolist() == starts
    assert batch.kv_lengths.tolist() == [row[2] for row in rows]
    assert batch.rows == tuple((first, row[1], row[2]) for first, row in zip(starts, rows, strict=False))
    if not kept:
        kept, final = [len(ids) - 1], [*final[:-1], (0, 1, *final[-1][2:])]
    assert batch.logit_index.tolist() == [first + own - 1 for first, own, _, draws in final if draws]
    assert (batch.logit_tokens is None) == (len(kept) == len(ids))
    assert kept == (list(range(len(ids))) if batch.logit_tokens is None else batch.logit_tokens.index.tolist())
    assert batch.final.rows == tuple(row[:3] for row in final)
    assert batch.final.row_starts.tolist() == [*(row[0] for row in final), len(kept)]
    assert batch.final.positions.tolist() == [positions[token] for token in kept]
    assert batch.final.ids.tolist() == [ids[token] for token in kept]
    assert all(
        kept[token + built.shift[row]] == token for token, row in zip(scored, step.shapes.rows_of(ints(*scored)), strict=True)
    )
    assert batch.final.groups[1].write.tolist() == [places[1][token] for token in kept]
    width = -(-max(row[2] for row in rows) // PAGE)
    for g, view in enumerate(batch.groups):
        assert view.write.tolist() == places[g]
        for table, (slot, _, end, _) in zip(view.tables.tolist(), rows, strict=True):
            own = -(-end // PAGE)
            assert table == [*pages[g, slot, :own].tolist(), *[0] * (width - own)]
    assert drawing.slot.tolist() == drawing.slots.tolist() == [row[0] for row in rows if row[3]]
    assert drawing.end.tolist() == drawing.ends.tolist() == [row[2] for row in rows if row[3]]
    assert drawing.prompt.tolist() == [t[2] for t, row in zip(tenants, rows, strict=True) if row[3]]


def test_a_row_may_follow_a_draw_the_host_has_not_seen():
    slots = Slots(2, LENGTH, 1, PAGE, CPU)
    first = plan(rows=[(1, 2, 2, True)], admitted=(admission(1, [4, 5]),))
    slots.take_in(first)
    slots.check(first)
    drawing = build_batch(first, slots).rows
    slots.tokens[drawing.slot, drawing.end] = torch.tensor([77], dtype=torch.int32)
    slots.advance(first)
    second = plan(rows=[(1, 1, 3, True)])
    slots.check(second)
    batch = build_batch(second, slots).batch
    assert batch.ids.tolist() == [77] and batch.positions.tolist() == [2]


@pytest.mark.parametrize(
    "row",
    [(0, 2, 2, False), (0, 1, 4, False), (0, 1, 3, True), (0, 3, 5, False), (0, 4, 6, True), (0, 0, 2, False)],
    ids=["behind", "ahead", "draws early", "does not draw", "beyond what is known", "empty"],
)
def test_a_row_that_does_not_fit_its_slot_is_refused(row):
    slots = Slots(1, LENGTH, 1, PAGE, CPU)
    slots.take_in(plan(admitted=(admission(0, [1, 2, 3, 4, 5], start=2),)))
    slots.check(plan(rows=[(0, 3, 5, True)]))
    with pytest.raises(EngineError, match="slot 0"):
        slots.check(plan(rows=[row]))


def test_a_new_tenant_gets_an_empty_table():
    slots = Slots(2, LENGTH, GROUPS, PAGE, CPU)
    slots.take_in(plan(**entries((0, 1, 0, 9), (1, 1, 2, 8), (0, 0, 0, 7))))
    slots.take_in(plan(retired=ints(1), admitted=(admission(1),)))
    assert not slots.tables[:, 1].any() and slots.tables[0, 0, 0] == 7
    slots.take_in(plan(retired=ints(1), admitted=(admission(1),), **entries((1, 1, 0, 5), (1, 0, 1, 6))))
    assert slots.tables[:, 1].sum() == slots.tables[1, 1, 0] == 5 and slots.tables[1, 0, 1] == 6


def test_too_many_tokens_are_refused():
    with pytest.raises(EngineError, match="41 tokens"):
        Slots(1, LENGTH, 1, PAGE, CPU).take_in(plan(admitted=(admission(0, [0] * 41),)))


def test_drafts_stand_behind_the_last_token_and_are_all_sampled_from():
    slots = Slots(2, LENGTH, 1, PAGE, CPU, drafts=3)
    first = plan(rows=[(1, 2, 2, True)], admitted=(admission(1, [4, 5]),))
    slots.take_in(first)
    slots.advance(first)
    slots.tokens[1, 2:6] = torch.tensor([77, 8, 9, 10])  # drawn, and drafts
    second = plan(rows=[(1, 3, 5, True, 2)])
    slots.check(second)
    built = build_batch(second, slots)
    assert (built.batch.ids.tolist(), built.batch.positions.tolist()) == ([77, 8, 9], [2, 3, 4])
    assert (built.rows.slots.tolist(), built.rows.end.tolist()) == ([1, 1, 1], [3, 4, 5])
    assert built.batch.logit_index.tolist() == [0, 1, 2]
    slots.advance(second)
    third = plan(rows=[(1, 1, 4, True)])  # the first draft was wrong
    slots.check(third)
    built = build_batch(third, slots)
    assert (built.batch.positions.tolist(), built.batch.rows, built.rows.ends.tolist()) == ([3], ((0, 1, 4),), [4])
    for row in ((1, 1, 7, True), (1, 5, 9, True, 4), (1, 1, 6, True, 1)):
        with pytest.raises(EngineError, match="slot 1"):
            slots.check(plan(rows=[row]))
    with pytest.raises(EngineError, match="2 drafts"):
        Slots(1, LENGTH, 1, PAGE, CPU).check(plan(rows=[(0, 3, 3, True, 2)]))


def test_spans():
    assert spans(np.array([7, 2, 9, 4]), np.array([1, 3, 0, 2])).tolist() == [7, 2, 3, 4, 4, 5]
