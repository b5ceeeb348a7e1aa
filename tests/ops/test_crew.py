"""Jobs that run side by side."""

from functools import partial
from threading import Barrier, get_ident

import pytest
import torch

from quire.ops.crew import run_together


@pytest.fixture(autouse=True)
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_each_job_runs_once():
    for count in (0, 1, 2, 3, 50):
        done = []
        run_together([partial(done.append, number) for number in range(count)])
        assert sorted(done) == list(range(count))


def test_jobs_run_at_the_same_time():
    meeting, threads = Barrier(3), set()

    def meet():
        threads.add(get_ident())
        meeting.wait(timeout=10)

    run_together([meet] * 3)
    assert len(threads) == 3


def test_an_error_is_raised_when_all_have_ended():
    done = []

    def fail():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run_together([fail, *[lambda: done.append(1)] * 5])
    assert len(done) == 5
    run_together([lambda: done.append(1)] * 4)
    assert len(done) == 9
