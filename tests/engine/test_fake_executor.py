"""The fake executor must not be fooled: wrong bookkeeping has to show in its tokens or raise."""

import numpy as np
import pytest
from msgspec.structs import replace

from quire.cache.layout import make_layout
from quire.engine.executor.fake import FakeExecutor
from quire.engine.executor.fake_model import FakeModel, mix, mix_one
from quire.types.cache import LayerCache
from quire.types.errors import EngineError
from quire.types.plan import Admission, Outputs, RowShapes, StepPlan
from quire.types.sampling import SamplingParams

LAYOUT = make_layout([LayerCache(1, 8), LayerCache(1, 8, 3)], 2, 2)
MODEL = FakeModel.of(LAYOUT, vocab_size=10_000)
PROMPT = [11, 12, 13, 14, 15]


def executor(**more) -> FakeExecutor:
    return FakeExecutor(LAYOUT, MODEL, pages=20, max_seqs=3, max_model_len=20, **more)


def ints(values) -> np.ndarray:
    return np.array(values, np.int32)


def plan(step: int, *, admit=(), retired=(), entries=(), copies=(), rows=()) -> StepPlan:
    """entries: (group, slot, index, page); copies: (from, to); rows: (slot, count, end, sample)."""
    entries, copies, rows = ints(entries).reshape(-1, 4), ints(copies).reshape(-1, 2), list(rows)
    slot, count, end, sample = ints(rows).reshape(-1, 4).T
    shapes = RowShapes(count, ints([0] * len(rows)), Outputs.last(count, sample))
    return StepPlan(slot, end, shapes, step, ints(retired), tuple(admit), *entries.T, *copies.T)


def admission(slot: int = 0, tokens=PROMPT, start: int = 0, **params) -> Admission:
    return Admission(slot, ints(tokens), len(PROMPT), start, SamplingParams(**params), 5, (), ())


ENTRIES = [(0, 0, i, 1 + i) for i in range(4)] + [(1, 0, i, 5 + i) for i in range(4)]
FIRST = plan(0, admit=[admission()], entries=ENTRIES, rows=[(0, 5, 5, True)])
SECOND = plan(1, rows=[(0, 1, 6, True)])


def run(device: FakeExecutor, *plans: StepPlan) -> list[list[int]]:
    return [device.submit(p).result().ids.tolist() for p in plans]


def test_it_says_what_the_definition_says():
    expected = MODEL.generate(PROMPT, seed=5, max_tokens=2)
    assert run(executor(), FIRST, SECOND) == [[expected[0]], [expected[1]]]
    chunks = (
        plan(0, admit=[admission()], entries=ENTRIES, rows=[(0, 1, 1, False)]),
        plan(1, rows=[(0, 3, 4, False)]),
        plan(2, rows=[(0, 1, 5, True)]),
        plan(3, rows=[(0, 1, 6, True)]),
    )
    assert run(executor(), *chunks) == [[], [], [expected[0]], [expected[1]]]


def test_both_hash_functions_are_one():
    words = np.random.default_rng(0).integers(0, 2**64, 100, dtype=np.uint64)
    assert mix(words).tolist() == [mix_one(word) for word in words.tolist()]


@pytest.mark.parametrize("wrong", [(0, 0, 0, 9), (0, 0, 1, 1), (1, 0, 2, 6), (1, 0, 1, 3)])
def test_a_wrong_table_entry_changes_the_token(wrong):
    right = run(executor(), FIRST, SECOND)
    bad = replace(SECOND, **dict(zip(("entry_group", "entry_slot", "entry_index", "entry_page"), ints([wrong]).T, strict=True)))
    assert run(executor(), FIRST, bad)[1] != right[1]


def test_pages_outside_the_window_do_not_matter():
    right = run(executor(), FIRST, SECOND)
    assert run(executor(), FIRST, replace(SECOND, **entry(1, 0, 0, 0)))[1] == right[1]


def entry(*values: int) -> dict[str, np.ndarray]:
    return dict(zip(("entry_group", "entry_slot", "entry_index", "entry_page"), ints([values]).T, strict=True))


def test_the_null_page_is_not_read_or_written():
    for wrong in ((0, 0, 0, 0), (1, 0, 2, 0)):
        device = executor()
        run(device, FIRST)
        with pytest.raises(EngineError, match="null page"):
            device.submit(replace(SECOND, **entry(*wrong)))


def test_shared_pages_and_a_copy_give_the_same_token_and_a_missing_copy_does_not():
    shared = [(0, 1, 0, 1), (0, 1, 1, 2), (0, 1, 2, 11), (1, 1, 0, 5), (1, 1, 1, 6), (1, 1, 2, 12)]
    fork = plan(1, admit=[admission(1, [*PROMPT, 16], 5)], entries=shared, copies=[(3, 11), (7, 12)], rows=[(1, 1, 6, True)])
    expected = MODEL.generate([*PROMPT, 16], seed=5, max_tokens=1)
    assert run(executor(), FIRST, fork)[1] == expected
    careless = replace(fork, copy_from=ints([]), copy_to=ints([]))
    assert run(executor(), FIRST, careless)[1] != expected
    with pytest.raises(EngineError, match="depend on each other"):
        run(executor(), FIRST, replace(fork, copy_from=ints([3, 11]), copy_to=ints([11, 12])))


def test_a_row_of_the_same_step_may_read_what_an_earlier_one_writes():
    shared = [(0, 1, 0, 1), (0, 1, 1, 2), (0, 1, 2, 11), (1, 1, 0, 5), (1, 1, 1, 6), (1, 1, 2, 12)]
    both = plan(
        0, admit=[admission(), admission(1, PROMPT, 4)], entries=ENTRIES + shared, rows=[(0, 5, 5, True), (1, 1, 5, True)]
    )
    [sampled] = run(executor(), both)
    assert sampled == MODEL.generate(PROMPT, seed=5, max_tokens=1) * 2


def test_leftovers_of_an_earlier_owner_are_poison():
    device = executor()
    run(device, FIRST)
    stale = device.cells[2].copy()
    run(
        device,
        plan(1, retired=[0], admit=[admission(1, PROMPT[:1])], entries=[(0, 1, 0, 2), (1, 1, 0, 9)], rows=[(1, 1, 1, True)]),
    )
    assert device.cells[2, 1] != stale[1]
    assert device.sums[2] == device.cells[2].sum(dtype=np.uint64)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((0, 1, 7, True), "does not begin where"),
        ((0, 2, 7, True), "after its last token"),
        ((0, 1, 6, False), "samples before"),
        ((1, 1, 1, True), "after its last token"),
    ],
)
def test_rows_must_follow_the_cursor(row, message):
    device = executor()
    run(device, FIRST)
    with pytest.raises(EngineError, match=message):
        device.submit(plan(1, rows=[row]))
    with pytest.raises(EngineError, match="had a request"):
        device.submit(plan(1, admit=[admission()], rows=[(0, 5, 5, True)]))


def test_stop_ids_are_suppressed_until_min_tokens_and_eos_comes_by_chance():
    model = FakeModel.of(LAYOUT, vocab_size=5, eos_id=3, eos_probability=0.5)
    answers = [model.generate(PROMPT, seed=seed, max_tokens=8, stop_ids=[3], min_tokens=3) for seed in range(200)]
    assert all(3 not in answer[:3] for answer in answers)
    assert 60 < sum(len(answer) == 4 for answer in answers) < 140
    never = FakeModel.of(LAYOUT, vocab_size=5, eos_id=3)
    assert all(3 not in never.generate(PROMPT, seed=seed, max_tokens=8) for seed in range(50))


def test_latency_keeps_the_device_busy_one_step_after_the_other(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.sleep", lambda seconds: now.append(now.pop() + seconds))
    device = executor(latency=0.5)
    flights = [device.submit(FIRST), device.submit(SECOND)]
    assert now == [100.0], "nobody has waited for them"
    for flight, ready in zip(flights, (100.5, 101.0), strict=True):
        flight.result()
        assert now == [ready]


def test_unknown_calls_are_refused():
    with pytest.raises(EngineError, match="no method 'profile'"):
        executor().call("profile")
