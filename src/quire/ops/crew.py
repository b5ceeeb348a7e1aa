"""Threads that wait for short work: jobs that let go of Python's lock while they run, such as calls of ONNX Runtime."""

from collections.abc import Callable, Sequence
from functools import cache
from queue import SimpleQueue
from threading import Thread

Job = Callable[[], None]
Outcome = BaseException | None


class Crew:
    def __init__(self, helpers: int) -> None:
        """`helpers`: threads beside the caller's."""
        self._jobs: SimpleQueue[tuple[Job, SimpleQueue[Outcome]]] = SimpleQueue()
        for number in range(helpers):
            Thread(target=self._help, name=f"crew-{number}", daemon=True).start()

    def run(self, jobs: Sequence[Job]) -> None:
        """All at the same time, the first in the caller's thread; returns when all are done."""
        outcomes: SimpleQueue[Outcome] = SimpleQueue()
        for job in jobs[1:]:
            self._jobs.put((job, outcomes))
        try:
            jobs[0]()
        finally:
            errors = [error for error in (outcomes.get() for _ in jobs[1:]) if error is not None]
        if errors:
            raise errors[0]

    def _help(self) -> None:
        while True:
            job, outcomes = self._jobs.get()
            try:
                job()
                outcomes.put(None)
            except BaseException as error:
                outcomes.put(error)


@cache
def crew_of(threads: int) -> Crew:
    """The caller's thread counts."""
    return Crew(threads - 1)
