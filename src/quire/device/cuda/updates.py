"""Write all array changes of a step to the GPU with one copy and one kernel launch.

buffer  [ runs: address, offset of its words, number of words, number of words to write | ... ]   pinned, read by the kernel
        [ words ............................................................................ ]
"""

from collections import deque

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.device.updates import DeviceUpdates, Integers
from quire.types.plan import Ints

RUNS = 1024  # per buffer
WORDS = 1 << 16
MAX_RUN_WORDS = 4096  # words


class CUDAUpdates(DeviceUpdates):
    def __init__(self, device: torch.device) -> None:
        self._buffer: StagingBuffer | None = None  # the buffer being filled
        self._sent: deque[StagingBuffer] = deque()
        self._stream = torch.cuda.current_stream(device)

    def write(self, target: Tensor, start: int, words: Integers, length: int | None = None) -> None:
        length = len(words) if length is None else length
        address = target.data_ptr() + 4 * start
        if length <= MAX_RUN_WORDS:
            self._take().add(address, words, length)
            return
        for first in range(0, length, MAX_RUN_WORDS):
            self._take().add(address + 4 * first, words[first : first + MAX_RUN_WORDS], min(MAX_RUN_WORDS, length - first))

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
        """Return a buffer with room for `runs` runs of one word each, or for one run of MAX_RUN_WORDS."""
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
    """Pinned memory, and the event of its last read by the GPU."""

    def __init__(self, memory: Tensor, event: torch.cuda.Event) -> None:
        self._runs_there, self._words_there = memory[: 8 * RUNS].view(torch.int64), memory[8 * RUNS :]
        self._runs = self._runs_there.numpy().reshape(RUNS, 4)
        self._run_words = self._runs.reshape(-1).data  # faster for single elements
        self._words = self._words_there.numpy()
        self._event = event
        self._run = self._word = 0  # used entries

    def has_room(self, runs: int) -> bool:
        return self._run + runs <= RUNS and self._word + MAX_RUN_WORDS <= WORDS

    def add(self, address: int, words: Integers, length: int) -> None:
        at = 4 * self._run
        self._run_words[at], self._run_words[at + 1] = address, self._word
        self._run_words[at + 2], self._run_words[at + 3] = len(words), length
        self._words[self._word : self._word + len(words)] = words
        self._run += 1
        self._word += len(words)

    def add_each(self, addresses: npt.NDArray[np.int64], words: Ints) -> None:
        """Add a run of one word for each address."""
        runs = self._runs[self._run : self._run + len(words)]
        runs[:, 0] = addresses
        runs[:, 1] = np.arange(self._word, self._word + len(words))
        runs[:, 2:] = 1
        self._words[self._word : self._word + len(words)] = words
        self._run += len(words)
        self._word += len(words)

    def send(self, stream: torch.cuda.Stream | None) -> None:
        from quire.ops.kernels.rows import deliver

        deliver(self._runs_there, self._words_there, self._run, MAX_RUN_WORDS)
        self._event.record(stream)
        self._run = self._word = 0

    def arrived(self) -> bool:
        """Return whether the device has read the buffer, so that it can be written again."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]
