"""An engine process on the fake executor, with faults on order: python faulty_engine.py FAULT ARGUMENT DIRECTORY PARENT SOCKET.

start exit    dies while starting                step N       dies in every step from the N-th on
start raise   fails in an unforeseen way         poison T     dies when it is to run token T
once FILE     only the first one starts          hang FILE    the first one sleeps in its step 3
add T         cannot add a prompt with token T   schedule T   raises while a prompt with token T is waiting
grammar S     has faulty grammar processes (tests/grammar/faulty_grammar.py), and gives masks up after S seconds
"""

import os
import sys
import time
from pathlib import Path

from quire.engine import assemble, process
from quire.engine.executor.fake import FakeExecutor
from quire.features.structured.grammar import client as grammar_client
from quire.features.structured.grammar import wire as grammar_process
from quire.sched.scheduler import Scheduler

argument = ""
submit, add, schedule = FakeExecutor.submit, Scheduler.add, Scheduler.schedule


def first_time() -> bool:
    try:
        Path(argument).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def start(*_, **__):
    if argument == "exit":
        print("the disk is on fire", file=sys.stderr, flush=True)
        os._exit(3)
    raise KeyError("no such thing")


def die(self, plan):
    if plan.step >= int(argument):
        os._exit(9)
    return submit(self, plan)


def poison(self, plan):
    flight = submit(self, plan)
    for slot, end, count in zip(plan.slot, plan.end, plan.count, strict=True):
        if int(argument) in self.tokens[slot, end - count : end].tolist():
            os._exit(9)
    return flight


def refuse(self, spec):
    if int(argument) in spec.prompt:
        raise ZeroDivisionError("on order")
    add(self, spec)


def stumble(self, now):
    if any(int(argument) in request.spec.prompt for request in self._queue):
        raise ZeroDivisionError("on order")
    return schedule(self, now)


def hang(self, plan):
    if plan.step == 3 and first_time():
        time.sleep(600)
    return submit(self, plan)


def install(fault: str, given: str) -> None:
    global argument
    argument = given
    if fault == "start":
        assemble.start_core = start
    elif fault == "once":
        if not first_time():
            os._exit(4)
    elif fault == "grammar":
        grammar_process.COMMAND = (sys.executable, str(Path(__file__).parents[1] / "grammar" / "faulty_grammar.py"))
        grammar_client.MAX_MASK_CPU_S = float(argument)
    elif fault == "add":
        Scheduler.add = refuse
    elif fault == "schedule":
        Scheduler.schedule = stumble
    else:
        FakeExecutor.submit = {"step": die, "poison": poison, "hang": hang}[fault]


if __name__ == "__main__":
    install(*sys.argv[1:3])
    sys.exit(process.main(sys.argv[3:]))
