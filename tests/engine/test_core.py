"""The loop: how many steps are in flight, and what becomes of a step that is lost."""

import numpy as np
import pytest

from quire.cache.layout import make_layout
from quire.engine.core import EngineCore
from quire.engine.executor.fake import FakeExecutor, Faults
from quire.engine.executor.fake_model import FakeModel
from quire.sched.scheduler import Scheduler
from quire.types.cache import LayerCache
from quire.types.errors import EngineDead
from quire.types.plan import StepPlan, StepResult
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams
from quire.types.stats import DeviceCounts

LAYOUT = make_layout([LayerCache(1, 8), LayerCache(1, 8, 6)], 4, 2)
MODEL = FakeModel.of(LAYOUT)
PAGES, SEATS, LENGTH = 40, 4, 64


def spec(name: str, prompt=(1, 2, 3, 4, 5), max_tokens: int = 5) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens)
    return EngineRequest(name, tuple(prompt), params, 0, frozenset(), frozenset(), 0.0)


def scheduler(**more) -> Scheduler:
    return Scheduler(LAYOUT, pages=PAGES, max_model_len=LENGTH, max_batched_tokens=64, max_seqs=SEATS, **more)


def fake(faults: Faults | None = None, latency: float = 0.0) -> FakeExecutor:
    return FakeExecutor(LAYOUT, MODEL, pages=PAGES, max_seqs=SEATS, max_model_len=LENGTH, faults=faults, latency=latency)


def collect(core: EngineCore) -> dict[str, list]:
    heard: dict[str, list] = {}
    for _ in range(200):
        for delta in core.step():
            heard.setdefault(delta.request_id, []).append(delta)
        if not core.has_unfinished:
            return heard
    raise AssertionError("the loop does not come to an end")


class Diary:
    """An executor that writes down when steps are submitted and awaited; every sample is token 9."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.counts = DeviceCounts(captures=2)

    def submit(self, plan: StepPlan):
        self.lines.append(f"submit {plan.step}")
        diary = self

        class Landing:
            def result(self) -> StepResult:
                diary.lines.append(f"result {plan.step}")
                lengths = plan.sample.astype(np.int32)
                return StepResult(plan.step, lengths, np.full(lengths.sum(), 9, np.int32))

        return Landing()

    def idle(self) -> bool:
        raise AssertionError("idle")

    def call(self, method, *args):
        raise AssertionError((method, args))

    def stop(self) -> None:
        self.lines.append("stop")


@pytest.mark.parametrize(
    ("depth", "lines"),
    [
        (0, ["submit 0", "result 0", "submit 1", "result 1", "submit 2", "result 2"]),
        (1, ["submit 0", "submit 1", "result 0", "submit 2", "result 1", "result 2"]),
        (2, ["submit 0", "submit 1", "submit 2", "result 0", "result 1", "result 2"]),
    ],
)
def test_depth_is_the_number_of_steps_in_flight(depth, lines):
    diary = Diary()
    core = EngineCore(scheduler(), diary, depth)
    core.add(spec("a", max_tokens=3))
    heard = collect(core)
    assert diary.lines == lines
    assert core.stats.device is diary.counts
    assert [delta.token_ids for delta in heard["a"]] == [[9], [9], [9]]
    core.stop()
    assert diary.lines[-1] == "stop"


def test_an_idle_step_does_nothing():
    diary = Diary()
    core = EngineCore(scheduler(), diary, 1)
    assert core.step() == []
    assert not core.has_unfinished
    assert diary.lines == []


def test_an_abort_is_answered_by_the_next_step():
    core = EngineCore(scheduler(), fake(), 1)
    core.add(spec("a"))
    core.step()
    core.abort(["a", "nobody"])
    assert core.has_unfinished
    [delta] = core.step()
    assert (delta.request_id, delta.token_ids, delta.finish_reason) == ("a", [], "abort")
    assert not core.has_unfinished


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("way", ["submit", "result"])
def test_a_lost_step_fails_only_its_own_requests_and_the_engine_goes_on(depth, way, caplog):
    core = EngineCore(scheduler(), fake(Faults(**{way: [2]})), depth)
    core.add(spec("short", max_tokens=1))
    core.add(spec("long", (7, 8), max_tokens=20))
    heard = collect(core)
    assert [delta.finish_reason for delta in heard["short"]] == ["length"]
    last = heard["long"][-1]
    assert (last.finish_reason, last.error) == ("error", f"EngineError: step 2 failed on order, in {way}")
    assert "step 2 failed" in caplog.text
    core.add(spec("next"))
    answer = [token for delta in collect(core)["next"] for token in delta.token_ids]
    assert answer == MODEL.generate((1, 2, 3, 4, 5), seed=0, max_tokens=5)
    core.scheduler.roster.check()
    assert core.stats.free_pages == PAGES


def test_a_dead_executor_is_not_survived():
    executor = fake()
    core = EngineCore(scheduler(), executor, 0)
    core.add(spec("a"))
    core.stop()
    with pytest.raises(EngineDead, match="stopped"):
        core.step()
