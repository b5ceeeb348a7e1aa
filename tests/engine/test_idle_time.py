"""The engine process uses moments without work to prepare, and waits only when there is nothing left to prepare."""

from types import SimpleNamespace

from quire.engine import ipc
from quire.engine.process import IDLE_POLL_MS, IDLE_WORK_AFTER_MS, EngineLoop


class Core:
    """Has `chores` to do in idle time; has work when told so, for one step."""

    def __init__(self, chores: int) -> None:
        self.chores, self.has_unfinished, self.stats, self.steps, self.checks = chores, False, None, 0, 0
        self.constraints, self.watch = SimpleNamespace(), None
        self.tokens, self.rows, self.waited, self.step_in_flight = 0, 0, 0.0, False

    def idle(self) -> bool:
        self.chores -= 1
        return self.chores >= 0

    def check(self) -> None:
        self.checks += 1

    def step(self) -> list:
        self.steps += 1
        self.has_unfinished, self.chores = False, 1
        return []


class Link:
    """Nothing comes in but what the script says at each look; the engine stops at its end."""

    def __init__(self, core: Core, script: list[str]) -> None:
        self.core, self.script, self.waits, self.engine = core, script, [], None

    def wait(self, milliseconds: int) -> bool:
        self.waits.append(milliseconds)
        word = self.script.pop(0)
        self.engine.stopping = not self.script
        self.core.has_unfinished = word == "work"
        return word == "work"

    def receive(self) -> ipc.Command | None:
        return None

    def send(self, report) -> None:
        assert isinstance(report, ipc.StepReport)


def test_idle_time_is_used_until_nothing_is_left_to_prepare():
    core = Core(chores=2)
    link = Link(core, ["", "", "", "", "work", "", "", ""])
    pulse = SimpleNamespace(busy_since=0.0)
    link.engine = EngineLoop(core, link, pulse)
    link.engine.run()
    # a lull, two chores and the answer that there is none; a real wait, in which work comes; then again
    assert link.waits == [IDLE_WORK_AFTER_MS, 0, 0, IDLE_POLL_MS, IDLE_POLL_MS, IDLE_WORK_AFTER_MS, 0, IDLE_POLL_MS]
    assert core.steps == 1 and core.checks == 7
    assert pulse.busy_since == 0.0
