"""Whatever a step changes on a GPU travels together, and is written by one launch.

buffer  [ runs: address, place, words there are, words written | ... ]   pinned memory, which the device reads by itself
        [ words ................................................... ]
"""

from collections import deque

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.device.updates import DeviceUpdates, Integers
from quire.types.plan import Ints

RUNS = 1024  # in a buffer
WORDS = 1 << 16
MOST = 4096  # words of a run


class CUDAUpdates(DeviceUpdates):
    def __init__(self, device: torch.device) -> None:
        self._buffer: StagingBuffer | None = None  # the one that is written to
        self._sent: deque[StagingBuffer] = deque()
        self._stream = torch.cuda.current_stream(device)

    def write(self, target: Tensor, start: int, words: Integers, length: int | None = None) -> None:
        length = len(words) if length is None else length
        address = target.data_ptr() + 4 * start
        if length <= MOST:
            self._take().add(address, words, length)
            return
        for first in range(0, length, MOST):
            self._take().add(address + 4 * first, words[first : first + MOST], min(MOST, length - first))

    def scatter(self, target: Tensor, index: Integers, words: Ints) -> None:
        addresses = target.data_ptr() + 4 * index.astype(np.int64, copy=False)
        for first in range(0, len(words), RUNS):
            self._take(min(RUNS, len(words) - first)).add_each(addresses[first : first + RUNS], words[first : first + RUNS])

    def deliver(self) -> None:
        buffer = self._buffer
        if buffer is not None:
            buffer.send(self._stream)
            self._buffer = None
            self._sent.append(buffer)

    def _take(self, runs: int = 1) -> "StagingBuffer":
        """A buffer with room for so many runs, of one word each or one of MOST."""
        if self._buffer is not None and not self._buffer.has_room(runs):
            self.deliver()
        if self._buffer is None:
            free = len(self._sent) > 0 and self._sent[0].arrived()
            self._buffer = self._sent.popleft() if free else _new_buffer()
        return self._buffer


def _new_buffer() -> "StagingBuffer":
    memory = torch.empty(8 * RUNS + WORDS, dtype=torch.int32, pin_memory=True)
    return StagingBuffer(memory, torch.cuda.Event())  # type: ignore[no-untyped-call]


class StagingBuffer:
    """Some pinned memory, and the event of its latest reading."""

    def __init__(self, memory: Tensor, event: torch.cuda.Event) -> None:
        self._runs_there, self._words_there = memory[: 8 * RUNS].view(torch.int64), memory[8 * RUNS :]
        self._runs = self._runs_there.numpy().reshape(RUNS, 4)
        self._run_words = self._runs.reshape(-1).data  # single numbers are set more quickly there
        self._words = self._words_there.numpy()
        self._event = event
        self._run = self._word = 0  # how many there are

    def has_room(self, runs: int) -> bool:
        return self._run + runs <= RUNS and self._word + MOST <= WORDS

    def add(self, address: int, words: Integers, length: int) -> None:
        at = 4 * self._run
        self._run_words[at], self._run_words[at + 1] = address, self._word
        self._run_words[at + 2], self._run_words[at + 3] = len(words), length
        self._words[self._word : self._word + len(words)] = words
        self._run += 1
        self._word += len(words)

    def add_each(self, addresses: npt.NDArray[np.int64], words: Ints) -> None:
        """A run for every word."""
        runs = self._runs[self._run : self._run + len(words)]
        runs[:, 0] = addresses
        runs[:, 1] = np.arange(self._word, self._word + len(words))
        runs[:, 2:] = 1
        self._words[self._word : self._word + len(words)] = words
        self._run += len(words)
        self._word += len(words)

    def send(self, stream: torch.cuda.Stream | None) -> None:
        from quire.ops.kernels.rows import deliver

        deliver(self._runs_there, self._words_there, self._run, MOST)
        self._event.record(stream)
        self._run = self._word = 0

    def arrived(self) -> bool:
        """Whether the device has read what was sent, so that the memory may be written again."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]
