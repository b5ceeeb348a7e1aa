"""The seam: whoever can guess how a text goes on is a drafter. What it guesses costs time if it is wrong, and nothing else."""

from typing import Protocol

from torch import Tensor


class Drafter(Protocol):
    most: int  # tokens that it guesses ahead

    def propose(self, slot: Tensor, length: Tensor, tokens: Tensor, hidden: Tensor) -> Tensor:
        """slot and length [R] int64, tokens [S, L] int32, hidden [R, H] -> [R, most] the tokens that may come next.

        The text of slot[r] are the first length[r] of its tokens; hidden[r] is the state from which the last one was drawn.
        The host is not to be made to wait.
        """
