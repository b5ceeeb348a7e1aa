"""Draft models and heads that run on the device: their interface, the rows that they run, and how they sample.

A draft token that is wrong costs time, nothing else: the target model samples every token itself.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.device.base import Device, Recorder
from quire.features.base import PageMemory
from quire.models.decoder import Decoder
from quire.runner.batch import Built, build_batch
from quire.runner.sampler.pipeline import Sampler
from quire.runner.sampler.stage import Rows
from quire.runner.slots import Slots
from quire.runner.transfer import Download, upload_together
from quire.types.plan import Bools, Ints, Outputs, RowShapes, StepPlan, StepRows, spans

NO_DRAFT = -1
MAX_COMING = 4  # downloads of draft tokens that nobody has asked for: they hold pinned memory


@dataclass(frozen=True)
class RanStep:
    """A step whose tokens have reached the host, and the target model's hidden states, valid until the next launch."""

    plan: StepPlan
    lengths: Ints  # [R] tokens that its rows brought
    states: list[Tensor]  # each [T, H]: inputs of the layers in `taps`, or final states; empty if the drafter reads none
    sampled_from: Tensor | None  # [samples, H]; None if the drafter reads no states

    @property
    def text(self) -> Ints:
        """[R] the number of known tokens, for rows that sampled."""
        return self.plan.end - self.plan.drafts + self.lengths

    @property
    def sampled(self) -> Ints:
        """The rows that sampled a valid token."""
        return np.flatnonzero(self.plan.sample & (self.lengths > 0)).astype(np.int32)


class DeviceDrafter:
    """A drafter with weights, and perhaps a KV cache in the pages of the target model: prefix hits, forks and preemption then
    need no code here.

    It drafts when a step's tokens have reached the host, so it knows the length of each text, and launches all its work at
    once: while the device drafts, the host plans the next step, whose rows read the draft tokens where they were written. The
    draft tokens reach the host in time for that step's result.
    """

    most = 0  # draft tokens per request
    taps: tuple[int, ...] = ()  # layers of the target model whose inputs it reads
    whole = False  # it reads the final hidden states of all tokens
    reads = False  # it reads hidden states at all
    moved: PageMemory | None = None  # pages that must come along when those of the target model move: it cannot compute them

    def load(self, device: Device, dtype: torch.dtype, model: Decoder) -> None:
        """model: the target model, with its weights."""
        raise NotImplementedError

    def recorded_bytes(self, max_seqs: int) -> int:  # noqa: ARG002
        """Return the bytes that its CUDA graphs may take."""
        return 0

    def allocate(self, pages: int, slots: Slots, sampler: Sampler, room: int, recorder: Recorder | None) -> None:  # noqa: ARG002
        """Allocate its cache with the target model's.

        sampler: the target model's.
        room: tokens of a step, at most.
        recorder: None: it records no CUDA graphs.
        """
        self._guessed = Guessed(len(slots.tokens), self.most)
        self._draft_sampler = DraftSampler(sampler, slots)

    def take_in(self, plan: StepPlan) -> None:
        """Note admissions and copied pages, before the step is run."""

    def follow(self, ran: RanStep) -> None:
        """Write at least `ran.plan.guesses` tokens after each text that has grown. The host must not wait."""
        raise NotImplementedError

    def guessed(self, plan: StepPlan) -> Ints:
        """Return the draft tokens [sum of drafts] of the plan's rows; wait for launched work."""
        return self._guessed.of(np.repeat(plan.slot, plan.drafts), spans(np.zeros_like(plan.drafts), plan.drafts))

    def expects(self, slot: int, count: int) -> Ints:
        """Return the draft tokens after a slot's text."""
        return self._guessed.of(np.full(count, slot, np.int32), np.arange(count, dtype=np.int32))

    def idle(self) -> bool:
        """Use a moment without requests. Return False if there is nothing to prepare."""
        return False

    def close(self) -> None:
        """Give memory back."""


class Guessed:
    """The draft tokens of each slot, on the host."""

    def __init__(self, slots: int, most: int) -> None:
        self._known = np.full((slots, most), NO_DRAFT, np.int32)
        self._coming: list[tuple[Ints, Download]] = []

    def note(self, slot: Ints, guesses: Tensor) -> None:
        """guesses [R, n] on the device."""
        self._coming.append((slot, Download([guesses])))
        if len(self._coming) > MAX_COMING:  # only the first rank asks for draft tokens
            self._take(*self._coming.pop(0))

    def of(self, slot: Ints, position: Ints) -> Ints:
        for slots, download in self._coming:
            self._take(slots, download)
        self._coming.clear()
        found: Ints = self._known[slot, position]
        return found

    def _take(self, slots: Ints, download: Download) -> None:
        [guesses] = download.wait()
        self._known[slots] = NO_DRAFT
        self._known[slots, : guesses.shape[1]] = guesses


class DraftSampler:
    """Sample draft tokens as the target model will sample them: with the request's parameters and the same random numbers.

    Random numbers are a function of seed, position and token id. A drafter that adds the same Gumbel noise to its own logits
    samples the target's token whenever the two distributions are close enough, at any temperature. Grammar masks are not
    applied: the host computes them for the tokens that the target samples.

    `sample_fused` and `latest` are what recorded steps of a draft model call in place of a sampler's."""

    def __init__(self, sampler: Sampler, slots: Slots) -> None:
        self._sampler, self._slots = sampler.for_drafts(), slots

    @property
    def latest(self) -> Tensor:
        return self._sampler.latest

    def plain(self, slot: Ints) -> bool:
        """Return whether `sample_fused` is all that these slots need: no penalties, no logit bias."""
        return self._sampler.plain(slot)

    def sample_fused(self, logits: Tensor, sampling_slot: Tensor, end: Tensor, tokens: Tensor) -> Tensor:
        return self._sampler.sample_fused(self._fit(logits), sampling_slot, end, tokens)

    def rows(self, slot: Ints, end: Ints) -> Rows:
        """Return the rows that sample the tokens of `slot` [N] at positions `end` [N]."""
        slots, ends = slot.astype(np.int64), end.astype(np.int64)
        prompts = self._slots.prompt_length[slots]
        uploaded = upload_together([slots, ends, prompts], self._slots.device)
        return Rows(slots, ends, prompts, uploaded[0], uploaded[1], uploaded[2], self._slots.tokens)

    def guess(self, logits: Tensor, rows: Rows, ids: Tensor | None = None) -> Tensor:
        """Sample one draft token per row and write it to the row's slot.

        logits: [N, W] float32; may be overwritten.
        ids: [W] int64, the target's token id of each column; None: columns are the target's first W tokens.
        Return the token ids [N] int32.
        """
        return self._sampler.guess(self._fit(logits, ids), rows)

    def _fit(self, logits: Tensor, ids: Tensor | None = None) -> Tensor:
        """Return [N, V]: the logits of the target's vocabulary, -inf for tokens that the drafter does not have."""
        vocabulary = self._sampler.vocabulary
        if ids is not None:
            return logits.new_full((len(logits), vocabulary), -torch.inf).index_copy_(1, ids, logits)
        missing = vocabulary - logits.shape[1]
        return F.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[:, :vocabulary]


class Passes:
    """Rows for drafters with a cache, over the pages of one of the target model's groups.

    What they write after the last known token is overwritten when that token has come. Where a table has no page yet, drafts
    are worse, and nothing else changes.
    """

    def __init__(self, slots: Slots, group: int) -> None:
        self.slots = slots.only(group)

    def fits(self, end: Ints) -> Bools:
        """Return which rows may end at these positions."""
        fits: Bools = end <= self.slots.length
        return fits

    def build(self, plan: StepRows, whole: bool = False) -> Built:
        return build_batch(plan, self.slots, whole=whole)

    def read(self, slot: Ints, position: Ints, count: int) -> Tensor:
        """Return [R, count] the tokens from `position` [R] on."""
        return read_guesses(self.slots, slot, position, count)


def read_guesses(slots: Slots, slot: Ints, position: Ints, count: int) -> Tensor:
    """Return [R, count] the tokens of `slot` [R] from `position` [R] on."""
    slot_there, first = upload_together([slot, position], slots.device)
    return slots.tokens[slot_there[:, None], first[:, None] + torch.arange(count, device=slots.device)]


def rows(slot: Ints, count: Ints | int, end: Ints, sample: Bools | bool = True) -> StepRows:
    """Return rows without drafts."""
    counts = np.broadcast_to(np.asarray(count, np.int32), slot.shape)
    samples = np.broadcast_to(np.asarray(sample), slot.shape).astype(np.int32)
    shapes = RowShapes(counts, np.zeros_like(counts), Outputs.last(counts, samples))
    return StepRows(slot.astype(np.int32), end.astype(np.int32), shapes)
