"""Words reach their arrays: at once on a CPU, by one launch on a GPU."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from quire.device.cuda.updates import MAX_RUN_WORDS, RUNS, WORDS, CUDAUpdates, StagingBuffer
from quire.device.updates import DeviceUpdates

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def ints(*values):
    return np.array(values, np.int32)


class Read:
    """The event of a device that is done at once."""

    def record(self, stream):
        pass

    def query(self):
        return True


def arrays():
    return [torch.full((4, 50), 9, dtype=torch.int32) for _ in range(2)]


def test_what_is_written_is_there():
    first, second = arrays()
    updates = DeviceUpdates()
    updates.write(first, 55, ints(1, 2, 3), 6)
    updates.scatter(second, ints(0, 199, 51), ints(7, 8, 6))
    updates.deliver()
    assert first[1].tolist() == [9] * 5 + [1, 2, 3, 0, 0, 0] + [9] * 39 and (first[[0, 2, 3]] == 9).all()
    assert (int(second[0, 0]), int(second[3, 49]), int(second[1, 1])) == (7, 8, 6) and int((second == 9).sum()) == 197


@pytest.mark.skipif(torch.cuda.is_available(), reason="addresses of the host")
def test_a_buffer_does_the_same():
    first, second = arrays()
    buffer = StagingBuffer(torch.zeros(8 * RUNS + WORDS, dtype=torch.int32), Read())
    for _ in range(2):  # a buffer is used again
        buffer.add(first.data_ptr() + 4 * 55, ints(1, 2, 3), 6)
        buffer.add_each(second.data_ptr() + 4 * np.array([0, 199, 51]), ints(7, 8, 6))
        buffer.send(None)
    assert first[1].tolist() == [9] * 5 + [1, 2, 3, 0, 0, 0] + [9] * 39 and (first[[0, 2, 3]] == 9).all()
    assert (int(second[0, 0]), int(second[3, 49]), int(second[1, 1])) == (7, 8, 6) and int((second == 9).sum()) == 197


@pytest.mark.gpu
def test_updates_of_a_device():
    """Long arrays, many words, several deliveries behind a busy device, and buffers that are full."""
    generator = np.random.default_rng(0)
    target = torch.zeros(40, 3 * MAX_RUN_WORDS, dtype=torch.int32, device=DEVICE)
    expected = np.zeros(target.shape, np.int32)
    updates, busy = CUDAUpdates(DEVICE), torch.zeros(1 << 28, dtype=torch.uint8, device=DEVICE)
    for _ in range(6):
        for _ in range(10):
            busy.add_(1)
        for row in generator.permutation(39).tolist():
            words = generator.integers(-(2**31), 2**31, generator.integers(0, 3 * MAX_RUN_WORDS - 9), np.int32)
            length = len(words) + int(generator.integers(0, 9))
            updates.write(target, row * 3 * MAX_RUN_WORDS + 1, words, length)
            expected[row, 1 : len(words) + 1] = words
            expected[row, len(words) + 1 : length + 1] = 0
        index = generator.choice(3 * MAX_RUN_WORDS, 2 * RUNS + 5, replace=False)
        words = generator.integers(0, 2**31, len(index), np.int32)
        updates.scatter(target, 39 * 3 * MAX_RUN_WORDS + index, words)
        expected[39, index] = words
        updates.deliver()
    updates.deliver()  # there is nothing
    assert (target.cpu().numpy() == expected).all()
