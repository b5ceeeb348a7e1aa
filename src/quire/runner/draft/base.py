"""The seams: whoever can guess how a text goes on is a drafter. What it guesses costs time if it is wrong, and nothing else."""

from typing import Protocol

import torch
from torch import Tensor

from quire.attn.batch import Batch
from quire.device.base import Device
from quire.models.decoder import Decoder
from quire.runner.slots import Slots
from quire.types.plan import Ints, StepPlan


class Drafter(Protocol):
    most: int  # tokens that it guesses ahead

    def propose(self, slot: Tensor, length: Tensor, tokens: Tensor, hidden: Tensor, at: Tensor) -> Tensor:
        """slot and length [R] int64, tokens [S, L] int32, hidden [R, H], at [R] int64 -> [R, most] the tokens that may come
        next.

        The text of slot[r] are the first length[r] of its tokens; hidden[r] is the state from which the last one was drawn,
        that of the step's token at[r]. The host is not to be made to wait.
        """


class DeviceDrafter(Drafter):
    """One with weights, and perhaps with a cache of its own under the pages of the model's: it runs what the model runs, so
    prefix hits, forks, preemption and rejected drafts need no thought."""

    taps: tuple[int, ...] = ()  # layers of the model whose inputs it reads
    whole = False  # it reads the model's final states of all tokens

    def load(self, device: Device, dtype: torch.dtype, model: Decoder) -> None:
        """`model`: the one it drafts for, whose weights are there."""
        raise NotImplementedError

    def allocate(self, pages: int, slots: Slots) -> None:
        """With the model's cache."""

    def copy(self, source: Ints, target: Ints) -> None:
        """Pages are duplicated."""

    def close(self) -> None:
        """Gives memory back."""

    def see(self, plan: StepPlan, batch: Batch, states: list[Tensor]) -> None:
        """What the model has run, before anything is drawn; states [T, H] of all tokens: of each tap, or the final ones."""

    def settle(self) -> None:
        """Nothing is drawn in this step."""
