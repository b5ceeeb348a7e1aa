"""Which graph a step would take, and the numbers it would be given. Recording and replaying need a GPU (test_graphs_gpu)."""

import numpy as np
import pytest
from runner_support import ints

from quire.attn.triton import SPLIT, FixedSplits
from quire.runner.buckets import MOST_ROOM, MOST_ROWS, Bucket, room_bucket, row_bucket, substitute, worth_having
from quire.runner.graphs import allowance, fixed_plans, pack


@pytest.mark.parametrize(
    ("rows", "max_seqs", "size"),
    [(1, 512, 1), (3, 512, 4), (17, 512, 32), (65, 512, 96), (257, 512, 320), (512, 512, 512), (513, 1024, None), (5, 6, 6)],
)
def test_the_least_bucket_that_takes_the_rows(rows, max_seqs, size):
    assert row_bucket(rows, max_seqs) == size


def test_buckets_are_few():
    assert len({row_bucket(rows, MOST_ROWS) for rows in range(1, MOST_ROWS + 1)}) <= 20
    assert len({room_bucket(need) for need in range(1, MOST_ROOM + 1)}) <= 8
    assert room_bucket(65) == 128 and room_bucket(MOST_ROOM) == MOST_ROOM and room_bucket(MOST_ROOM + 1) is None


def test_a_somewhat_larger_graph_can_be_borrowed():
    own = Bucket(8, 128)
    assert substitute(own, 60, [Bucket(4, 128), Bucket(32, 128), Bucket(16, 512), Bucket(8, 64)]) is None
    assert substitute(own, 60, [Bucket(16, 256), Bucket(16, 128), Bucket(8, 256)]) == Bucket(8, 256)
    assert substitute(own, 60, [Bucket(16, 128)]) == Bucket(16, 128)
    assert substitute(own, 120, [Bucket(16, 128), Bucket(16, 256)]) == Bucket(16, 256)  # its unused rows need room as well


@pytest.mark.parametrize("max_seqs", [1, 6, 256, 512])
def test_what_is_recorded_in_idle_time_serves_usual_traffic(max_seqs):
    buckets = worth_having(max_seqs)
    assert buckets[0].rows == 1 and len(buckets) == len(set(buckets)) <= 45
    for rows in range(1, max_seqs + 1):
        own = Bucket(row_bucket(rows, max_seqs), room_bucket(4 * row_bucket(rows, max_seqs)))
        assert own in buckets


def test_the_allowance_grows_with_the_logits():
    assert allowance(2, 1000) - allowance(1, 1000) == 12000
    assert allowance(10**6, 1000) == allowance(MOST_ROWS, 1000)


def test_numbers_of_a_step():
    """Two rows in a bucket of four, a group that sees all and one with a window."""
    fixed, bucket = FixedSplits(), Bucket(4, 8)
    numbers = np.full(32 + 2 * fixed.size(4, 8), 99, np.int32)
    given = (np.array(x, np.int64) for x in ([7, 2], [3 * SPLIT, 5], [9, 4], [7, -1]))
    pack(*given, bucket, [(fixed, None), (fixed, SPLIT)], numbers)
    rows = numbers[:32].view(np.int64).reshape(4, 4).tolist()
    assert rows == [[7, 2, -1, -1], [3 * SPLIT, 5, 1, 1], [9, 4, 0, 0], [7, -1, -1, -1]]
    full, window = numbers[32:].reshape(2, 12, 3)
    nothing = [-1, -1, -1]
    alone = [[1, 0, -1], [2, 0, -1], [3, 0, -1]]  # the padding attends to itself
    assert full.tolist() == [[0, 0, 0], [0, 1, 1], [0, 2, 2], *alone, nothing, nothing, [0, 0, 3], nothing, nothing, nothing]
    assert window.tolist() == [[0, 2, -1], *alone, *[nothing] * 8]
    assert fixed.size(4, 8) == 36
    assert fixed.need(ints(3 * SPLIT, 5), None) == 4 and fixed.need(ints(3 * SPLIT, 5), SPLIT) == 2


class Layer:
    def __init__(self, group, fixed, window):
        self.group = group
        self.backend = type("Backend", (), {"fixed": staticmethod(lambda: fixed)})
        self.spec = type("Spec", (), {"window": window})


@pytest.mark.parametrize("recordable", [True, False])
def test_a_model_may_refuse(recordable):
    fixed = FixedSplits()
    model = type("Model", (), {"attentions": [Layer(1, fixed, 4), Layer(0, fixed, None)], "recordable": recordable})
    assert fixed_plans(model, 2) == ([(fixed, None), (fixed, 4)] if recordable else None)


def test_a_backend_may_refuse():
    model = type("Model", (), {"attentions": [Layer(0, FixedSplits(), None), Layer(0, None, None)], "recordable": True})
    assert fixed_plans(model, 1) is None


def test_numbers_of_no_rows_at_all():
    """What idle time records a graph with."""
    fixed, bucket = FixedSplits(), Bucket(3, 64)
    numbers = np.full(32 + fixed.size(3, 64), 99, np.int32)
    pack(ints(), ints(), ints(), ints(), bucket, [(fixed, None)], numbers)
    assert numbers[:32].view(np.int64).reshape(4, 4)[:, :3].tolist() == [[-1] * 3, [1] * 3, [0] * 3, [-1] * 3]
    assert numbers[32:].reshape(67, 3)[:4].tolist() == [[0, 0, -1], [1, 0, -1], [2, 0, -1], [-1, -1, -1]]
