"""The next step is planned shortly before the one in flight ends, and who comes by then is in it."""

import time
from types import SimpleNamespace

import pytest

from quire.engine import ipc
from quire.engine.plan_deadline import LEAD_DECAY, MAX_LEAD_S, MIN_LEAD_S, PREDICTED_SHARE, PlanDeadline
from quire.engine.process import EngineLoop
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams

STEP, HOST = 0.01, 0.001  # seconds


def turn(deadline: PlanDeadline, ended: float, rows: int = 8, tokens: int | None = None, waited: float = 0.004) -> float:
    """-> seconds after the turn at which the next step is due."""
    deadline.turned(ended - waited - HOST, ended, waited, rows, rows if tokens is None else tokens)
    return deadline.due - ended if deadline.due else 0.0


def steady() -> PlanDeadline:
    deadline = PlanDeadline()
    for i in range(3):
        turn(deadline, 1.0 + i * STEP)
    return deadline  # a step of 8 rows of one token is in flight, and began at 1 + 2 * STEP


SPARE = PREDICTED_SHARE * STEP - HOST


def test_even_steps_are_foreseen_after_one_has_been_timed():
    deadline = PlanDeadline()
    assert turn(deadline, 1.0) == 0.0
    assert turn(deadline, 1.0 + STEP) == pytest.approx(SPARE - MIN_LEAD_S)
    assert turn(deadline, 1.0 + 2 * STEP, rows=7) == pytest.approx(SPARE - MIN_LEAD_S)


@pytest.mark.parametrize(
    ("rows", "tokens"), [(8, 300), (9, 9), (0, 0)], ids=["with a prompt", "with more rows", "nothing in flight"]
)
def test_what_is_not_like_the_step_before_is_not_foreseen(rows, tokens):
    assert turn(steady(), 1.0 + 3 * STEP, rows, tokens) == 0.0


def test_a_step_behind_a_prompt_is_not_foreseen():
    deadline = steady()
    turn(deadline, 1.0 + 3 * STEP, 8, 300)
    assert turn(deadline, 1.0 + 8 * STEP, 9) == 0.0  # how long the prompt took says nothing
    assert turn(deadline, 1.0 + 9 * STEP, 9) == pytest.approx(SPARE - MIN_LEAD_S)


def test_when_the_device_had_to_wait_plans_are_made_earlier():
    deadline = steady()
    assert turn(deadline, 1.0 + 3.5 * STEP, waited=0.0) == 0.0  # too late: when the step ended is not known
    assert turn(deadline, 1.0 + 4.5 * STEP) == 0.0
    assert turn(deadline, 1.0 + 5.5 * STEP) == pytest.approx(SPARE - 2 * MIN_LEAD_S * LEAD_DECAY**2)
    for i in range(20):
        turn(deadline, 2.0 + i * STEP)
        deadline.due = 1.0
        turn(deadline, 2.0 + i * STEP, waited=0.0)
    assert deadline._lead == MAX_LEAD_S
    for i in range(400):
        turn(deadline, 3.0 + i * STEP)
    assert deadline._lead == MIN_LEAD_S


class Core:
    """Each step of one row takes 30 ms; newcomers are noted with the steps before them. It ends after ten."""

    def __init__(self, ahead: bool) -> None:
        self.stats, self.tokens, self.rows, self.waited, self.steps, self.step_in_flight = None, 1, 1, 0.0, 0, ahead
        self.joined: dict[str, int] = {}
        self.constraints, self.watch = SimpleNamespace(on_refused=None), None
        self.adapters = SimpleNamespace(reading=False)

    @property
    def has_unfinished(self) -> bool:
        return self.steps < 10

    def add(self, request: EngineRequest) -> None:
        self.joined[request.id] = self.steps

    def idle(self) -> bool:
        return False

    def check(self) -> None:
        pass

    def step(self) -> list:
        self.steps += 1
        self.waited = 0.03
        time.sleep(self.waited)
        return []


class Link:
    """A request comes at the first wait behind the fifth step."""

    def __init__(self, core: Core) -> None:
        self.core, self.waits, self.inbox, self.engine = core, list[int](), list[ipc.Command](), None

    def wait(self, milliseconds: int) -> bool:
        self.engine.stopping = not self.core.has_unfinished
        if self.core.has_unfinished:
            self.waits.append(milliseconds)
        if self.core.steps != 5 or self.core.joined:
            return False
        self.inbox.append(ipc.Add([EngineRequest("late", (1,), SamplingParams(), 0, frozenset(), frozenset(), 0.0)]))
        return True

    def receive(self) -> ipc.Command | None:
        return self.inbox.pop() if self.inbox else None

    def send(self, report) -> None:
        pass


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Time passes in steps alone."""
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.sleep", lambda seconds: now.append(now.pop() + seconds))


def run(ahead: bool) -> Link:
    core = Core(ahead)
    link = Link(core)
    link.engine = EngineLoop(core, link, SimpleNamespace(busy_since=0.0))
    link.engine.run()
    assert core.steps == 10
    return link


def test_who_comes_while_a_step_runs_is_in_the_next():
    link = run(ahead=True)
    assert link.core.joined == {"late": 5}
    assert max(link.waits) == 26  # of the 30 ms that a step takes


def test_where_no_step_is_in_flight_nothing_is_waited_for():
    assert run(ahead=False).waits == []
