"""What an engine sees of itself while somebody watches, and that it does nothing of that kind while nobody does."""

import numpy as np
import pytest

from quire.cache.layout import make_layout
from quire.cache.pool import Pool
from quire.engine.core import EngineCore
from quire.engine.executor.fake import FakeExecutor
from quire.engine.executor.fake_model import FakeModel
from quire.engine.watch import MAP_CHUNK_CELLS, PageMap
from quire.sched.scheduler import Scheduler
from quire.types import engine_snapshot as snapshots
from quire.types.cache import LayerCache
from quire.types.engine_snapshot import PARTS, STEP_COLUMNS
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams

PAGE = 4
VOCABULARY = 50


class Clock:
    """Every look at it takes a millisecond."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


def make_core(clock, depth=1, pages=64, max_seqs=4, budget=16, drafts=0):
    layout = make_layout([LayerCache(1, 8, None)], PAGE, 2)
    scheduler = Scheduler(
        layout, pages=pages, max_model_len=64, max_batched_tokens=budget, max_seqs=max_seqs, drafts=drafts,
    )  # fmt: skip
    guess = (lambda tenant, position: [1] * drafts) if drafts else None
    executor = FakeExecutor(
        layout, FakeModel.of(layout, vocab_size=VOCABULARY), pages=pages, max_seqs=max_seqs, max_model_len=64, guess=guess,
    )  # fmt: skip
    return EngineCore(scheduler, executor, depth, clock=clock)


def request(name, prompt=6, tokens=5, tenant=""):
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    ids = tuple((int(name) * 7 + i) % VOCABULARY for i in range(prompt))
    return EngineRequest(name, ids, params, 0, stop_ids=frozenset(), eos_ids=frozenset(), arrival=0.0, tenant=tenant)


def run(core):
    """Until nothing is left; everything that was seen."""
    seen = []
    while core.has_unfinished:
        core.step()
        core.watch._next = 0.0  # at once
        seen.append(core.watch.look())
    return [each for each in seen if each is not None]


def finished(seen):
    return {each.key: each for one in seen for each in one.requests if each.state == "finished"}


def test_nothing_is_collected_while_nobody_watches():
    core = make_core(Clock())
    assert core.watch is None and core.scheduler.roster.on_move is None
    core.be_watched(True)
    watch = core.watch
    core.add(request("1"))
    assert watch._records and core.scheduler.roster.on_move is not None
    core.be_watched(False)
    assert core.watch is None and core.scheduler.roster.on_move is None
    before = dict(watch._records), list(watch._steps)
    while core.has_unfinished:
        core.step()
    assert (dict(watch._records), list(watch._steps)) == before


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("pages", [64, 9])
def test_the_parts_of_every_request_are_its_whole_time_in_the_engine(depth, pages):
    clock = Clock()
    core = make_core(clock, depth=depth, pages=pages, budget=8)
    core.be_watched(True)
    for i in range(6):
        core.add(request(str(i), prompt=5 + 3 * i if pages > 9 else 5 + i, tokens=12))
    seen = run(core)
    ended = finished(seen)
    assert len(ended) == 6 and not core.watch._records
    for each in ended.values():
        assert sum(each.parts) == pytest.approx(each.since - each.seen, abs=1e-9) and min(each.parts) >= 0
        assert each.drawn == 12 and each.reason == "length" and each.fresh
    totals = dict(zip(PARTS, np.sum([each.parts for each in ended.values()], axis=0), strict=True))
    assert totals["queue"] > 0 and totals["prompt"] > 0 and totals["decode"] > 0 and totals["others"] > 0
    assert (totals["preempted"] > 0) == (pages == 9) == any(each.preemptions for each in ended.values())
    steps = [dict(zip(STEP_COLUMNS, step, strict=True)) for one in seen for step in one.steps]
    assert sum(step["drawn"] for step in steps) >= 72
    assert sum(step["preempted"] for step in steps) == core.stats.preemptions


def test_who_came_before_the_viewer_is_not_told_as_new():
    core = make_core(Clock())
    core.add(request("1", tokens=20))
    for _ in range(4):
        core.step()
    core.be_watched(True)
    [first] = core.watch.look().requests
    assert (first.key, first.state, first.fresh) == ("1", "decode", False)


def test_prompts_of_others_are_what_a_decoding_request_waits_for():
    clock = Clock()
    core = make_core(clock, depth=0, budget=16)
    core.be_watched(True)
    core.add(request("1", prompt=4, tokens=30))
    for _ in range(2):
        core.step()
    assert [each.state for each in core.watch._running.values()] == ["decode"]
    quiet = core.watch._shared
    core.step()
    assert core.watch._shared == quiet, "nobody else is there"
    core.add(request("2", prompt=15, tokens=2))
    core.step()
    assert core.watch._shared > quiet
    ended = finished(run(core))
    assert ended["1"].parts[snapshots.OTHERS] > 0 and ended["1"].parts[snapshots.DECODE] > ended["1"].parts[snapshots.OTHERS]


def test_the_running_are_told_in_columns():
    core = make_core(Clock(), depth=0)
    core.be_watched(True)
    core.add(request("1", prompt=4))
    core.add(request("2", prompt=6))
    core.step()
    core.watch._next = 0.0
    one = core.watch.look()
    assert one.keys == ["1", "2"] and one.row.tolist() == [4, 6] == one.computed.tolist() and one.drawn.tolist() == [1, 1]
    core.watch._next = 0.0
    core.step()
    assert core.watch.look().row.tolist() == [1, 1]


def test_sights_are_not_told_more_often_than_said():
    clock = Clock()
    core = make_core(clock)
    core.be_watched(True)
    core.add(request("1", tokens=40))
    told = []
    while core.has_unfinished:
        core.step()
        clock.now += 0.03
        if (one := core.watch.look()) is not None:
            told.append(one.t)
    assert len(told) > 1 and np.diff(told).min() >= snapshots.SNAPSHOT_INTERVAL_S


def test_the_map_shows_every_page_and_whose_it_is():
    core = make_core(Clock(), depth=0)
    core.be_watched(True)
    core.add(request("1", tenant="a", tokens=30))
    core.add(request("2", tenant="b", tokens=30))
    for _ in range(3):
        core.step()
    core.watch._next = 0.0
    one = core.watch.look()
    assert one.first == 0 and len(one.cells) == 64 and sorted(one.tenants) == ["a", "b"]
    running = {each.spec.tenant: each for each in core.scheduler.roster.running}
    for number, tenant in enumerate(one.tenants):
        for page in running[tenant].pages[0]:
            assert one.cells[page - 1] == snapshots.USED + 2 * number
    assert one.cells.count(snapshots.BLANK) == one.blank == core.scheduler.pool.blank
    run(core)
    core.watch._pages.changed()
    core.watch._next = 0.0
    one = core.watch.look()
    assert one.cells.count(snapshots.CACHED) == one.cached > 0 and one.blank + one.cached == 64


def test_a_large_map_is_told_in_pieces_of_a_bounded_number_of_cells():
    pool = Pool(20_000)
    pages = PageMap(pool)
    pool.take(10)
    told = {}
    while pages.stale:
        first, cells = pages.next_chunk()
        assert len(cells) <= MAP_CHUNK_CELLS
        told |= {first + i: cell for i, cell in enumerate(cells)}
    assert len(told) == 4000 <= snapshots.MAX_CELLS and sorted(told) == list(range(4000))
    assert told[0] == snapshots.USED == told[1] and told[2] == snapshots.BLANK, "pages 1 and 6 of those taken in a row"


def test_guesses_are_counted():
    core = make_core(Clock(), drafts=2)
    core.be_watched(True)
    core.add(request("1", tokens=20))
    seen = run(core)
    steps = [dict(zip(STEP_COLUMNS, step, strict=True)) for one in seen for step in one.steps]
    drafted, accepted = (sum(step[name] for step in steps) for name in ("drafted", "accepted"))
    assert drafted > 0 and accepted <= drafted
    ended = finished(seen)["1"]
    assert (ended.drafted, ended.accepted) == (drafted, accepted)
