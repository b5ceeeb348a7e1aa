"""Short jobs side by side, on threads that wait for them. Worth it for jobs that let go of the interpreter and take longer than
waking a thread does, some ten microseconds."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from queue import SimpleQueue
from threading import Thread

import torch

MOST = 16  # threads, the caller's own included

Job = Callable[[], None]
Ends = SimpleQueue[Exception | None]
Task = tuple[Iterator[Job], Ends]  # jobs that nobody has taken yet, and where to say that none is left


def run_together(jobs: Sequence[Job]) -> None:
    """Returns when all are done. Who is free takes the next job."""
    helpers = min(len(jobs), crew_size()) - 1
    left, ends = iter(jobs), Ends()
    for _ in range(helpers):
        _crew(crew_size()).put((left, ends))
    errors = [_work(left), *(ends.get() for _ in range(helpers))]
    for error in errors:
        if error is not None:
            raise error


def crew_size() -> int:
    return min(torch.get_num_threads(), MOST)


def _work(left: Iterator[Job]) -> Exception | None:
    try:
        for job in left:
            job()
    except Exception as error:
        return error
    return None


@cache
def _crew(size: int) -> SimpleQueue[Task]:
    tasks = SimpleQueue[Task]()

    def wait() -> None:
        while True:
            left, ends = tasks.get()
            ends.put(_work(left))

    for number in range(1, size):
        Thread(target=wait, name=f"quire-crew-{number}", daemon=True).start()
    return tasks
