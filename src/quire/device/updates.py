"""Words on their way to arrays on the device: whatever a step changes there. What the words mean is not known here."""

import numpy as np
import numpy.typing as npt
from torch import Tensor

from quire.types.plan import Ints

Integers = npt.NDArray[np.integer]


class DeviceUpdates:
    """Arrays are written as 32-bit words from an index on, as if they had one dimension. What is written between two deliveries
    does not overlap.

    This is how a device does it whose memory is the host's: everything is written at once.
    """

    def write(self, target: Tensor, start: int, words: Integers, length: int | None = None) -> None:
        """`words`, and zeros behind them up to `length`."""
        length = len(words) if length is None else length
        row = target.view(-1).numpy()[start : start + length]
        row[: len(words)] = words
        row[len(words) :] = 0

    def scatter(self, target: Tensor, index: Integers, words: Ints) -> None:
        """target[index[i]] = words[i]."""
        target.view(-1).numpy()[index] = words

    def deliver(self) -> None:
        """Everything written since the last time reaches the device before whatever is launched next."""
