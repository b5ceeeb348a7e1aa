"""A host that waits for its device is freed when the device waits for a rank that has ended, and gets the reason."""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from types import SimpleNamespace

import pytest

from patience import PATIENCE
from quire.engine.executor import local, wire, workers
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

    def find_blocking(self, seconds, in_step, late):
        return None

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


class RunningWorkers(workers.Workers):
    """Two other ranks, of which nothing runs but a process each."""

    def __init__(self, processes, hang):
        self._timeouts, self._dead, self._starts = workers.RankTimeouts(0.0, hang), None, False
        self.end = SimpleNamespace(alive=True)
        self.ends = [socket.socketpair() for _ in processes]
        self._workers = [workers.Worker(rank, process, self.ends[rank - 1][0]) for rank, process in enumerate(processes, 1)]


class LaunchingRunner(Runner):
    """A step ends when its device does."""

    def launch(self, plan):
        self.warm_up()
        return SimpleNamespace(result=lambda: "tokens")

    def samples_itself(self, plan):
        return True


@pytest.fixture
def processes():
    started = [subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"]) for _ in range(2)]
    yield started
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def running(processes):
    """Return what makes the ranks, which have a time limit for steps."""
    made = []

    def make(hang):
        made.append(RunningWorkers(processes, hang))
        return made[-1]

    yield make
    for end in (end for each in made for pair in each.ends for end in pair):
        end.close()


@pytest.fixture
def quick_guard(monkeypatch):
    monkeypatch.setattr(local, "GUARD_POLL_S", 0.02)
    monkeypatch.setattr(workers, "STOPPED_TIMEOUT_S", 0.05)
    monkeypatch.setattr(wire, "encode", lambda command: b"a step")


def test_a_launch_that_waits_for_a_stopped_rank_ends_and_names_it(running, processes, quick_guard, caplog):
    executor = RanksExecutor(runner := LaunchingRunner(), running(hang=PATIENCE))
    os.kill(processes[1].pid, signal.SIGSTOP)
    stopped = rf"rank 2 \(process {processes[1].pid}\) is stopped \(SIGSTOP\) and delayed the other ranks for "
    with caplog.at_level(logging.ERROR):
        flight = executor.submit(SimpleNamespace(step=1))
    assert runner.abandoned.is_set() and len(caplog.records) == 1
    with pytest.raises(EngineDead, match=stopped):
        flight.result()
    with pytest.raises(EngineDead, match=stopped):
        executor.check()


@pytest.mark.parametrize(("waits_for", "named"), [([2], r"rank 2 \(process \d+\)"), ([], r"rank 1 \(.*\) and rank 2 \(.*\)")])
def test_a_launch_that_waits_for_a_rank_that_hangs_ends_and_names_it(running, quick_guard, waits_for, named):
    executor = RanksExecutor(runner := LaunchingRunner(), running(hang=0.1))
    runner.late_ranks = lambda: waits_for
    with pytest.raises(EngineDead, match=rf"^{named} delayed the other ranks for .* \(limit: distributed_timeout_seconds or"):
        executor.submit(SimpleNamespace(step=1)).result()
    assert runner.abandoned.is_set()


def test_a_device_that_does_not_answer_delays_no_report(running, quick_guard, monkeypatch):
    monkeypatch.setattr(local, "DEVICE_ANSWER_TIMEOUT_S", 0.05)
    executor, asked = RanksExecutor(runner := LaunchingRunner(), running(hang=0.1)), threading.Event()
    runner.late_ranks = lambda: asked.wait(PATIENCE) and []
    with pytest.raises(EngineDead, match=r"rank 1 .* and rank 2 .* delayed the other ranks"):
        executor.submit(SimpleNamespace(step=1)).result()
    asked.set()


def test_only_steps_have_the_time_limit_of_steps(running, quick_guard):
    executor, done = DividedExecutor(runner := LaunchingRunner(), running(hang=0.0)), threading.Event()
    executor._workers.answers = list
    runner.warm_up = lambda: done.wait(0.2)
    assert executor.call_all("warm_up") == [False]
    assert not runner.abandoned.is_set()
    executor._guard.stop()
