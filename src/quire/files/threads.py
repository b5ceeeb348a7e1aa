"""Large files looked at by several threads, which pays where most of the work is done outside of Python. Threads stay when that
is done: to start one takes until it has had a turn, which in a process that is busy is long."""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from queue import SimpleQueue
from threading import Condition, Thread, get_native_id
from typing import TypeVar

MOST = 12
GIVING_WAY = 5  # steps down: who serves somebody has a core before who reads for somebody

Item = TypeVar("Item")
Result = TypeVar("Result")


def give_way() -> None:
    """This thread, from now on."""
    if sys.platform == "linux":  # where that is of a thread
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, get_native_id(), GIVING_WAY)


class Helpers:
    """Threads that are started when they are first needed, and then wait for more to do."""

    def __init__(self) -> None:
        self._process, self._count = os.getpid(), 0
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def ask(self, work: Callable[[], None], times: int) -> None:
        if self._process != os.getpid():  # threads do not come along to a process that was forked
            Helpers.__init__(self)
        for _ in range(times):
            self._work.put(work)
        while self._count < times:
            self._count += 1
            Thread(target=self._run, args=(self._work,), name="quire-files", daemon=True).start()

    @staticmethod
    def _run(asked: "SimpleQueue[Callable[[], None]]") -> None:
        give_way()
        while True:
            asked.get()()


HELPERS = Helpers()


def in_threads(work: Callable[[Item], Result], items: Sequence[Item], most: int = MOST) -> list[Result]:
    """Of each, in their order, by so many at most. One that fails is raised, when those that had begun have ended."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found: dict[int, Result] = {}
    failed: list[BaseException] = []
    numbers, state = count(), Condition()
    running = 0

    def run() -> None:
        try:
            while not failed and (number := next(numbers)) < len(items):
                found[number] = work(items[number])
        except BaseException as error:
            failed.append(error)

    def help_out() -> None:
        nonlocal running
        with state:
            if running < 0:  # all is done: whoever was busy elsewhere comes too late
                return
            running += 1
        run()
        with state:
            running -= 1
            state.notify()

    HELPERS.ask(help_out, min(most, cores, len(items)) - 1)
    run()
    with state:
        state.wait_for(lambda: running == 0)
        running = -1
    if failed:
        raise failed[0]
    return [found[number] for number in range(len(items))]
