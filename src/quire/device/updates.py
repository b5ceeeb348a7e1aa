"""Write the array elements that a step changes to the device. The meaning of the values is not known here."""

import numpy as np
import numpy.typing as npt
from torch import Tensor

from quire.types.plan import Ints

Integers = npt.NDArray[np.integer]


class DeviceUpdates:
    """Write 32-bit elements of arrays, which are addressed as if they had one dimension.

    Writes between two calls of `deliver` must not overlap. This base class is for devices whose memory is the host's: it
    writes at once.
    """

    def write(self, target: Tensor, start: int, words: Integers, length: int | None = None) -> None:
        """Write `words` from index `start` on, and zeros after them up to `length`."""
        length = len(words) if length is None else length
        row = target.view(-1).numpy()[start : start + length]
        row[: len(words)] = words
        row[len(words) :] = 0

    def scatter(self, target: Tensor, index: Integers, words: Ints) -> None:
        """Set target[index[i]] = words[i]."""
        target.view(-1).numpy()[index] = words

    def deliver(self) -> None:
        """Send all writes since the last call, before any work that is launched later."""
