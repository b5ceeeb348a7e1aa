"""A host that waits for its device is freed when the device waits for a rank that has ended, and gets the reason."""

import threading
import weakref
from types import SimpleNamespace

import pytest

from patience import PATIENCE
from quire.engine.executor.local import DividedExecutor, RanksExecutor, RanksFlight
from quire.types.errors import EngineDead


class Runner:
    """Its device waits until collectives are abandoned."""

    def __init__(self, on_device=True, error=None):
        self.waits_on_device, self._error, self.abandoned = on_device, error, threading.Event()

    def check(self):
        pass

    def abandon(self):
        self.abandoned.set()
        return True

    def warm_up(self):
        if self.waits_on_device and not self.abandoned.wait(PATIENCE):
            raise AssertionError("it waits for ever")
        if self._error is not None:
            raise self._error

    def complete(self, plan):
        return plan

    def launch(self, plan):
        self.warm_up()


class Workers:
    """One other rank, which ends after the call began."""

    count = 1

    def __init__(self):
        self.began = False

    def send(self, command):
        self.began = True

    def any_ended(self):
        return self.began

    def check(self):
        if self.began:
            raise EngineDead("rank 1 (process 4711) ended with signal SIGKILL")

    def answers(self):
        self.check()


@pytest.mark.parametrize("error", [None, RuntimeError("NCCL communicator was aborted")])
def test_a_call_ends_when_a_rank_has_ended(error):
    runner = Runner(error=error)
    executor = DividedExecutor(runner, Workers())
    with pytest.raises(EngineDead, match=r"rank 1 \(process 4711\) ended with signal SIGKILL"):
        executor.call_all("warm_up")
    assert runner.abandoned.is_set()
    executor._guard.stop()
    assert not any(thread.name == "quire-rank-guard" for thread in threading.enumerate())


def test_a_step_that_fails_since_collectives_were_ended_names_the_rank():
    executor = RanksExecutor(Runner(error=RuntimeError("NCCL was aborted")), Workers())
    with pytest.raises(EngineDead, match=r"rank 1 \(process 4711\) ended with signal SIGKILL"):
        executor.submit(SimpleNamespace(step=1))


def test_a_result_that_comes_after_collectives_were_ended_is_refused():
    executor = RanksExecutor(Runner(), workers := Workers())
    flight = RanksFlight(SimpleNamespace(result=lambda: "tokens"), executor)
    assert flight.result() == "tokens"
    workers.began = True
    assert executor._guard.freed.wait(PATIENCE)
    with pytest.raises(EngineDead, match="rank 1"):
        flight.result()


def test_the_guard_keeps_nothing_alive():
    executor = DividedExecutor(runner := Runner(), workers := Workers())
    thread, kept = executor._guard._thread, weakref.ref(workers)
    del executor, runner, workers
    assert kept() is None
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_hosts_that_wait_for_ranks_themselves_need_no_guard():
    runner = Runner(on_device=False)
    with pytest.raises(EngineDead):
        DividedExecutor(runner, Workers()).call_all("warm_up")
    assert not runner.abandoned.is_set()
