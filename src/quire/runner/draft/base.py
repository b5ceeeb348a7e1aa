"""The seams: whoever can guess how a text goes on is a drafter. What it guesses costs time if it is wrong, and nothing else."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from quire.device.base import Device, Recorder
from quire.models.decoder import Decoder
from quire.runner.draft.sampler import DraftSampler
from quire.runner.sampler.pipeline import Sampler
from quire.runner.slots import Slots
from quire.runner.transfer import Download
from quire.types.plan import Ints, StepPlan, spans

NO_DRAFT = -1


class Drafter(Protocol):
    """Guesses as soon as the step has drawn, wherever that leaves the slots: steps may be planned ahead of it."""

    most: int  # tokens that it guesses ahead

    def propose(self, slot: Tensor, length: Tensor, tokens: Tensor, hidden: Tensor, at: Tensor) -> Tensor:
        """slot and length [R] int64, tokens [S, L] int32, hidden [R, H], at [R] int64 -> [R, most] the tokens that may come
        next.

        The text of slot[r] are the first length[r] of its tokens; hidden[r] is the state from which the last one was drawn,
        that of the step's token at[r]. The host is not to be made to wait.
        """


@dataclass(frozen=True)
class Ran:
    """A step that has landed, and what the model's states were: these are good until the next one is launched."""

    plan: StepPlan
    lengths: Ints  # [R] tokens that its rows brought
    states: list[Tensor]  # [T, H] of all its tokens: of each tap, or the final ones; none where nobody reads them
    drawn_from: Tensor | None  # [draws, H]; the same

    @property
    def text(self) -> Ints:
        """[R] the tokens that are known now, of rows that drew."""
        return self.plan.end - self.plan.drafts + self.lengths

    @property
    def drew(self) -> Ints:
        """The rows that did, and brought something."""
        return np.flatnonzero(self.plan.sample & (self.lengths > 0)).astype(np.int32)


class DeviceDrafter:
    """One with weights, and perhaps with a cache of its own under the pages of the model's: prefix hits, forks and preemption
    need no thought.

    It guesses when a step's tokens have reached the host, so that it knows how long each text is, and launches all its work at
    once: while the device guesses, the host plans the next step, whose rows read the guesses where they were written. What they
    were is told to the host in time for that step's result.
    """

    most = 0  # tokens that it guesses ahead
    taps: tuple[int, ...] = ()  # layers of the model whose inputs it reads
    whole = False  # it reads the model's final states of all tokens
    reads = False  # it reads some states

    def load(self, device: Device, dtype: torch.dtype, model: Decoder) -> None:
        """`model`: the one it drafts for, whose weights are there."""
        raise NotImplementedError

    def recorded_bytes(self, max_seqs: int) -> int:  # noqa: ARG002
        """That graphs of its own may take."""
        return 0

    def allocate(self, pages: int, slots: Slots, sampler: Sampler, room: int, recorder: Recorder | None) -> None:  # noqa: ARG002
        """With the model's cache. `sampler`: the target's. `room`: tokens of a step, at most. `recorder`: where it may record
        graphs."""
        self._guessed = Guessed(len(slots.tokens), self.most)
        self._draws = DraftSampler(sampler, slots)

    def take_in(self, plan: StepPlan) -> None:
        """Who came, and which pages are duplicated, before the step is run."""

    def follow(self, ran: Ran) -> None:
        """Writes up to `ran.plan.guesses` tokens behind each text that has grown, or more. The host is not made to wait."""
        raise NotImplementedError

    def guessed(self, plan: StepPlan) -> Ints:
        """[sum of drafts] those of the plan's rows. What has been launched before is waited for."""
        return self._guessed.of(np.repeat(plan.slot, plan.drafts), spans(np.zeros_like(plan.drafts), plan.drafts))

    def expects(self, slot: int, count: int) -> Ints:
        """What it guessed behind a slot's text."""
        return self._guessed.of(np.full(count, slot, np.int32), np.arange(count, dtype=np.int32))

    def idle(self) -> bool:
        """Uses a moment without work. False = there is nothing to prepare."""
        return False

    def close(self) -> None:
        """Gives memory back."""


class Guessed:
    """What was guessed of each slot, as soon as the host hears of it."""

    def __init__(self, slots: int, most: int) -> None:
        self._known = np.full((slots, most), NO_DRAFT, np.int32)
        self._coming: list[tuple[Ints, Download]] = []

    def note(self, slot: Ints, guesses: Tensor) -> None:
        """guesses [R, n] on the device."""
        self._coming.append((slot, Download([guesses])))

    def of(self, slot: Ints, place: Ints) -> Ints:
        for slots, download in self._coming:
            [guesses] = download.wait()
            self._known[slots] = NO_DRAFT
            self._known[slots, : guesses.shape[1]] = guesses
        self._coming.clear()
        found: Ints = self._known[slot, place]
        return found


@dataclass(frozen=True)
class Guessing:
    """What a step in flight leaves to a drafter, for when it has landed."""

    drafter: DeviceDrafter
    states: list[Tensor]
    drawn_from: Tensor | None

    @torch.inference_mode()
    def follow(self, plan: StepPlan, lengths: Ints) -> None:
        self.drafter.follow(Ran(plan, lengths, self.states, self.drawn_from))
