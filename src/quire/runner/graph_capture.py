"""Recording one step, over inputs that stay where they are.

fill      numbers, slots ─► ids, positions, key lengths, tables, places to write
model     ─► logits [rows, V]
draw      ─► ids and faults [2, rows], tokens to their slots
"""

import logging
from functools import partial
from typing import Protocol

from torch import Tensor

from quire.device.base import Recorder, Recording
from quire.models.decoder import Decoder
from quire.ops.rows import fill_rows
from quire.runner.buckets import Bucket
from quire.runner.draft.taps import KeptStates
from quire.runner.graph_inputs import Inputs
from quire.runner.slots import Slots

logger = logging.getLogger(__name__)


class Draws(Protocol):
    """A sampler, as far as rows ask for nothing but a draw."""

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
        states: KeptStates | None = None,
    ) -> None:
        """`states`: somebody reads those of rows of one token."""
        self._model, self._slots, self._sampler, self._inputs, self._recorder = model, slots, sampler, inputs, recorder
        self._states = states

    def record(self, bucket: Bucket) -> tuple[Recording | None, Tensor]:
        """Records the step, which runs nothing, and replays it for its result [rows, V]. What was never run may refuse to be
        recorded, so that it is tried again after a run; None = it failed then, too."""
        logits = None
        try:
            recorded = self._capture(bucket)
        except RuntimeError:
            logits = self._forward(bucket)
            try:
                recorded = self._capture(bucket)
            except RuntimeError as error:  # most likely there is no memory left
                logger.warning("no more CUDA graphs are recorded: the one for %s failed", bucket, exc_info=error)
                return None, logits
        logger.debug("recorded a CUDA graph for %s", bucket)
        return recorded, recorded.replay() if logits is None else logits

    def _capture(self, bucket: Bucket) -> Recording:
        return self._recorder.capture(partial(self._forward, bucket))

    def _forward(self, bucket: Bucket) -> Tensor:
        """-> logits [rows, V]; what was drawn is in the slots and in the sampler's result.

        Every time with a batch of its own: what layers keep with a batch and its tensors (sines of positions, say) is of the
        run that made it, and would be missing in a recording that only read it."""
        slots, inputs = self._slots, self._inputs
        batch = inputs.batch(bucket)
        slot, end, _, drawer = inputs.row_numbers(bucket)
        filled = inputs.rows(bucket)
        fill_rows(slot, end, batch.row_starts, slots.position, slots.tokens, slots.tables, slots.page_size, filled)
        batch = inputs.adapt(bucket, batch)
        batch = inputs.keep_final(bucket, batch) if bucket.tokens else batch
        hidden = self._model(batch)
        if self._states is not None:
            self._states.keep(hidden, len(batch.ids))
        logits = self._model.logits(hidden, batch.final.adapters)
        self._sampler.draw(logits, drawer, end, slots.tokens)
        return logits
