"""Recording one step as a CUDA graph, over inputs that stay where they are.

fill      numbers, slots ─► ids, positions, key lengths, tables, places to write
model     ─► logits [rows, V]
draw      ─► ids and faults [2, rows], tokens to their slots
"""

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.attn.batch import Batch
from quire.models.decoder import Decoder
from quire.ops.rows import fill_rows
from quire.runner.buckets import Bucket
from quire.runner.graph_inputs import Inputs
from quire.runner.sampler.pipeline import Sampler
from quire.runner.slots import Slots

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recorded:
    graph: torch.cuda.CUDAGraph
    logits: Tensor  # [rows, V] float32


class Recorder:
    def __init__(self, model: Decoder, slots: Slots, sampler: Sampler, inputs: Inputs) -> None:
        self._model, self._slots, self._sampler, self._inputs = model, slots, sampler, inputs

    def record(self, bucket: Bucket) -> tuple[Recorded | None, Tensor]:
        """Records the step, which runs nothing, and replays it for its result [rows, V]. What was never run may refuse to be
        recorded, so that it is tried again after a run; None = it failed then, too."""
        batch, logits = self._inputs.batch(bucket), None
        try:
            recorded = self._capture(bucket, batch)
        except RuntimeError:
            logits = self._forward(bucket, batch)
            try:
                recorded = self._capture(bucket, batch)
            except RuntimeError as error:  # most likely there is no memory left
                logger.warning("no more CUDA graphs are recorded: the one for %s failed", bucket, exc_info=error)
                return None, logits
        logger.debug("recorded a CUDA graph for %s", bucket)
        if logits is None:
            recorded.graph.replay()
            logits = recorded.logits
        return recorded, logits

    def _capture(self, bucket: Bucket, batch: Batch) -> Recorded:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._inputs.stream):
            graph.capture_begin(pool=self._inputs.pool, capture_error_mode="thread_local")
            try:
                place = Place(self._forward(bucket, batch))
            finally:
                graph.capture_end()
        return Recorded(graph, torch.as_tensor(place, device=self._slots.device))

    def _forward(self, bucket: Bucket, batch: Batch) -> Tensor:
        """-> logits [rows, V]; what was drawn is in the slots and in the sampler's result."""
        slots, inputs = self._slots, self._inputs
        slot, end, _, drawer = inputs.row_numbers(bucket)
        filled = inputs.rows(bucket)
        fill_rows(slot, end, batch.row_starts, slots.position, slots.tokens, slots.tables, slots.page_size, filled)
        logits = self._model.logits(self._model(inputs.keep_final(bucket, batch) if bucket.tokens else batch))
        self._sampler.draw(logits, drawer, end, slots.tokens)
        return logits


class Place:
    """Where a recorded step leaves a tensor. It belongs to the pool that all graphs share, and is not held: the next graph may
    be recorded over the same memory, because what one step leaves there is used before the next step runs."""

    def __init__(self, tensor: Tensor) -> None:
        assert tensor.dtype == torch.float32 and tensor.is_contiguous()
        shape, data = tuple(tensor.shape), (tensor.data_ptr(), False)
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "<f4", "data": data, "version": 2}
