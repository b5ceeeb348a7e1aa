"""The next step is planned shortly before the one in flight ends, and who comes by then is in it."""

import time
from types import SimpleNamespace

import pytest

from quire.engine import ipc
from quire.engine.pace import EASING, FORESEEN, LEAST_LEAD, MOST_LEAD, Pace
from quire.engine.process import Engine
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams

STEP, HOST = 0.01, 0.001  # seconds


def turn(pace: Pace, ended: float, rows: int = 8, tokens: int | None = None, waited: float = 0.004) -> float:
    """-> seconds after the turn at which the next step is due."""
    pace.turned(ended - waited - HOST, ended, waited, rows, rows if tokens is None else tokens)
    return pace.due - ended if pace.due else 0.0


def steady() -> Pace:
    pace = Pace()
    for i in range(3):
        turn(pace, 1.0 + i * STEP)
    return pace  # a step of 8 rows of one token is in flight, and began at 1 + 2 * STEP


SPARE = FORESEEN * STEP - HOST


def test_even_steps_are_foreseen_after_one_has_been_timed():
    pace = Pace()
    assert turn(pace, 1.0) == 0.0
    assert turn(pace, 1.0 + STEP) == pytest.approx(SPARE - LEAST_LEAD)
    assert turn(pace, 1.0 + 2 * STEP, rows=7) == pytest.approx(SPARE - LEAST_LEAD)


@pytest.mark.parametrize(
    ("rows", "tokens"), [(8, 300), (9, 9), (0, 0)], ids=["with a prompt", "with more rows", "nothing submitted"]
)
def test_what_is_not_like_the_step_before_is_not_foreseen(rows, tokens):
    assert turn(steady(), 1.0 + 3 * STEP, rows, tokens) == 0.0


def test_a_step_behind_a_prompt_is_not_foreseen():
    pace = steady()
    turn(pace, 1.0 + 3 * STEP, 8, 300)
    assert turn(pace, 1.0 + 8 * STEP, 9) == 0.0  # how long the prompt took says nothing
    assert turn(pace, 1.0 + 9 * STEP, 9) == pytest.approx(SPARE - LEAST_LEAD)


def test_when_the_device_had_to_wait_plans_are_made_earlier():
    pace = steady()
    assert turn(pace, 1.0 + 3.5 * STEP, waited=0.0) == 0.0  # too late: when the step ended is not known
    assert turn(pace, 1.0 + 4.5 * STEP) == 0.0
    assert turn(pace, 1.0 + 5.5 * STEP) == pytest.approx(SPARE - 2 * LEAST_LEAD * EASING**2)
    for i in range(20):
        turn(pace, 2.0 + i * STEP)
        pace.due = 1.0
        turn(pace, 2.0 + i * STEP, waited=0.0)
    assert pace._lead == MOST_LEAD
    for i in range(400):
        turn(pace, 3.0 + i * STEP)
    assert pace._lead == LEAST_LEAD


class Core:
    """Each step of one row takes 30 ms, the newcomers are noted with the step they are in; it ends after ten."""

    def __init__(self) -> None:
        self.stats, self.tokens, self.rows, self.waited, self.steps = None, 1, 1, 0.0, 0
        self.joined: dict[str, int] = {}

    @property
    def has_unfinished(self) -> bool:
        return self.steps < 10

    def add(self, request: EngineRequest) -> None:
        self.joined[request.id] = self.steps

    def step(self) -> list:
        self.steps += 1
        self.waited = 0.03
        time.sleep(self.waited)
        return []


def test_who_comes_while_a_step_runs_is_in_the_next():
    """It arrives while the fifth step runs."""
    core = Core()
    request = EngineRequest("late", (1,), SamplingParams(max_tokens=1), 0, frozenset(), frozenset(), 0.0)
    sent: list[int] = []
    inbox: list[ipc.Command] = []

    class Link:
        def wait(self, milliseconds: int) -> bool:
            if core.steps == 5 and not sent:
                sent.append(milliseconds)
                inbox.append(ipc.Add([request]))
                return True
            return False

        def receive(self):
            return inbox.pop() if inbox else None

        def send(self, report) -> None:
            pass

    engine = Engine(core, Link(), SimpleNamespace(busy_since=0.0))
    core.__class__.step = stopping(engine, core.__class__.step)
    engine.run()
    assert core.joined == {"late": 5}
    assert 0 < sent[0] <= 27  # of the 30 ms that the step takes


def stopping(engine: Engine, step):
    def last(core: Core) -> list:
        engine.stopping = core.steps >= 9
        return step(core)

    return last
