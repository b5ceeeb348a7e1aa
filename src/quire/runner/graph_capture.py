"""Record one step as a CUDA graph, over inputs at fixed addresses.

fill      numbers, slots ─► ids, positions, key lengths, tables, write positions
model     ─► logits [rows, V]
draw      ─► ids and faults [2, rows], tokens to their slots
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from quire.attn.batch import Batch
from quire.device.base import Recorder, Recording
from quire.dist.stages import Stage
from quire.features.base import StepPart
from quire.models.decoder import Decoder
from quire.ops.rows import fill_rows
from quire.runner.buckets import MOST_TOKENS, Bucket
from quire.runner.graph_inputs import Inputs
from quire.runner.slots import Slots

logger = logging.getLogger(__name__)


class Draws(Protocol):
    """The part of a sampler that draws without edits."""

    def draw(self, logits: Tensor, drawer: Tensor, end: Tensor, tokens: Tensor) -> Tensor: ...

    @property
    def latest(self) -> Tensor: ...


class StepRecorder:
    def __init__(
        self,
        model: Decoder,
        slots: Slots,
        sampler: Draws,
        inputs: Inputs,
        recorder: Recorder,
        parts: Sequence[StepPart] = (),
    ) -> None:
        self._model, self._slots, self._sampler, self._inputs, self._recorder = model, slots, sampler, inputs, recorder
        self._parts = parts

    def record(self, bucket: Bucket) -> tuple[Recording | None, Tensor]:
        """Record the step, and replay it for its result [rows, V]. Kernels that never ran may refuse to be recorded, so it is
        tried again after an eager run. None: recording failed again."""
        logits = None
        try:
            recorded = self._capture(bucket)
        except RuntimeError:
            logits = self._forward(bucket)
            try:
                recorded = self._capture(bucket)
            except RuntimeError as error:  # most likely out of memory
                logger.warning("no more CUDA graphs are recorded: the one for %s failed", bucket, exc_info=error)
                return None, logits
        logger.debug("recorded a CUDA graph for %s", bucket)
        return recorded, recorded.replay() if logits is None else logits

    def _capture(self, bucket: Bucket) -> Recording:
        return self._recorder.capture(partial(self._forward, bucket))

    def _forward(self, bucket: Bucket) -> Tensor:
        """Return logits [rows, V]; drawn tokens are in the slots and in the sampler's result.

        Every time with a batch of its own: what layers keep with a batch and its tensors (sines of positions, say) is of the
        run that made it, and would be missing in a recording that only read it."""
        batch = self._fill(bucket)
        batch = self._inputs.keep_final(bucket, batch) if bucket.tokens else batch
        hidden = self._model(batch)
        for part in self._parts:
            part.keep_states(hidden, len(batch.ids))
        logits = self._model.logits(hidden, batch.final.tokens)
        _, end, _, drawer = self._inputs.row_numbers(bucket)
        self._sampler.draw(logits, drawer, end, self._slots.tokens)
        return logits

    def _fill(self, bucket: Bucket) -> Batch:
        slots, inputs = self._slots, self._inputs
        batch = inputs.batch(bucket)
        slot, end, _, _ = inputs.row_numbers(bucket)
        filled = inputs.rows(bucket)
        fill_rows(slot, end, batch.row_starts, slots.tokens, slots.tables, slots.page_size, filled)
        return inputs.extend(bucket, batch)


@dataclass(frozen=True)
class Passage:
    """The hidden states of a recorded pipeline stage: its input and its output."""

    entry: Tensor | None  # [T, H]; None: this stage embeds
    exit: Tensor  # [T, H]
    last: bool  # the output has only the rows' last tokens

    @classmethod
    def of(cls, stage: Stage, columns: int, dtype: torch.dtype, device: torch.device) -> "Passage":
        places = [torch.zeros(MOST_TOKENS, columns, dtype=dtype, device=device) for _ in range(1 if stage.first else 2)]
        return cls(None if stage.first else places[1], places[0], stage.last)


class StageRecorder(StepRecorder):
    """fill      numbers, slots ─► positions, key lengths, tables, write positions
    layers    entry, or embedded ids ─► exit"""

    def __init__(self, passage: Passage, *args: Any) -> None:
        super().__init__(*args)
        self._passage = passage
        self._nothing = torch.zeros(1, device=passage.exit.device)  # what a recording returns

    def _forward(self, bucket: Bucket) -> Tensor:
        passage, batch = self._passage, self._fill(bucket)
        if passage.last and bucket.tokens:
            batch = self._inputs.keep_final(bucket, batch)
        x = self._model.embed(batch) if passage.entry is None else passage.entry[: bucket.width]
        hidden = self._model.body(x, batch)
        passage.exit[: len(hidden)].copy_(hidden)
        return self._nothing
