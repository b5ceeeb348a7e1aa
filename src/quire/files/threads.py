"""Run a function over parts of large files in several threads, which pays where most of the work is outside of Python.

The threads are reused: in a busy process a new thread waits long until it first runs.
"""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from queue import SimpleQueue
from threading import Condition, Thread, get_native_id
from typing import TypeVar

MAX_THREADS = 12
FILE_NICENESS = 5  # above 0: threads that serve requests go first

Item = TypeVar("Item")
Result = TypeVar("Result")


def lower_priority() -> None:
    """Lower the scheduling priority of the calling thread."""
    if sys.platform == "linux":  # elsewhere niceness applies to the process
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, get_native_id(), FILE_NICENESS)


class HelperThreads:
    """Threads that start when they are first needed, and then wait for more work."""

    def __init__(self) -> None:
        self._process, self._count = os.getpid(), 0
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def ask(self, work: Callable[[], None], times: int) -> None:
        if self._process != os.getpid():  # a forked process has none of the threads
            HelperThreads.__init__(self)
        for _ in range(times):
            self._work.put(work)
        while self._count < times:
            self._count += 1
            Thread(target=self._run, args=(self._work,), name="quire-files", daemon=True).start()

    @staticmethod
    def _run(work: "SimpleQueue[Callable[[], None]]") -> None:
        lower_priority()
        while True:
            work.get()()


HELPERS = HelperThreads()


def in_threads(work: Callable[[Item], Result], items: Sequence[Item], most: int = MAX_THREADS) -> list[Result]:
    """Return `work` of each item, in order, computed by at most `most` threads.

    The first error is raised when the calls that have started have ended.
    """
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
            if running < 0:  # all items are done: this thread was busy with another call
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
