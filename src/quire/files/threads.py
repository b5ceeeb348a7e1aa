"""Large files looked at by several threads, which pays where most of the work is done outside of Python."""

import os
from collections.abc import Callable, Sequence
from itertools import count
from threading import Thread
from typing import TypeVar

MOST = 8

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_threads(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Of each, in their order. One that fails is raised, when those that had begun have ended."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found: dict[int, Result] = {}
    failed: list[BaseException] = []
    numbers = count()

    def run() -> None:
        try:
            while not failed and (number := next(numbers)) < len(items):
                found[number] = work(items[number])
        except BaseException as error:
            failed.append(error)

    others = [Thread(target=run, name="quire-files", daemon=True) for _ in range(min(MOST, cores, len(items)) - 1)]
    for thread in others:
        thread.start()
    run()
    for thread in others:
        thread.join()
    if failed:
        raise failed[0]
    return [found[number] for number in range(len(items))]
