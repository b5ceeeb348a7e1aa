"""Speculation in the runner: rows with drafts, and the drafter that runs after each step."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec import structs
from torch import Tensor, nn

from quire.device.base import Device
from quire.features.base import Allocation, FinishedStep, StepFollower, StepPart
from quire.features.speculation.device.drafter import DeviceDrafter, RanStep
from quire.models.decoder import Decoder
from quire.runner.buckets import MAX_GRAPH_ROWS
from quire.runner.slots import Slots
from quire.runner.transfer import upload
from quire.types.errors import ConfigError
from quire.types.plan import Ints, Longs, Outputs, RowShapes, StepPlan, StepRows


class SpeculationPart(StepPart):
    name = "speculation"

    def __init__(
        self, device: Device, dtype: torch.dtype, drafter: DeviceDrafter | None, max_tokens: int, hidden_size: int
    ) -> None:
        """drafter: None: plans bring their draft tokens. max_tokens: of a step. hidden_size: of the target model."""
        self._device, self._dtype, self.drafter = device, dtype, drafter
        self._max_tokens, self._hidden_size = max_tokens, hidden_size
        self._taps: Taps | None = None
        self._kept: KeptStates | None = None  # of replayed steps
        if drafter is not None:
            self.reads_layers, self.reads_all_tokens, self.single_tokens = bool(drafter.taps), drafter.whole, drafter.reads

    def load(self, model: Decoder, reserved_bytes: Callable[[], int]) -> None:  # noqa: ARG002
        if self.drafter is not None:
            self.drafter.load(self._device, self._dtype, model)
            self._taps = Taps(model, self.drafter.taps) if self.drafter.taps else None

    def reserved_bytes(self, max_seqs: int, recording: bool) -> int:
        return self.drafter.recorded_bytes(max_seqs) if self.drafter is not None and recording else 0

    def allocate(self, allocation: Allocation) -> None:
        self._kept = None
        if self.drafter is not None:
            recorder = allocation.recorder() if allocation.recorder is not None and allocation.pages else None
            self.drafter.allocate(allocation.pages, allocation.slots, allocation.sampler, self._max_tokens, recorder)
            if self.drafter.moved is not None:
                allocation.others.append(self.drafter.moved)

    def prepare(self, plan: StepPlan) -> None:
        if self.drafter is not None:
            self.drafter.take_in(plan)

    def complete(self, plan: StepPlan) -> StepPlan:
        if self.drafter is None or not plan.shapes.drafted:
            return plan
        return structs.replace(plan, draft_token=self.drafter.guessed(plan))

    def arrange(self, plan: StepPlan, run: Callable[[StepRows], None]) -> tuple[StepRows, Longs] | None:  # noqa: ARG002
        return unroll(plan) if plan.shapes.drafted > 0 and self._device.records else None

    def graph_key(self, rows: StepRows) -> Hashable | None:
        return None if self.single_tokens and rows.tokens > len(rows.slot) else False

    def allocate_inputs(self, slots: Slots, max_rows: int) -> None:  # noqa: ARG002
        if self.drafter is not None and self.drafter.reads:
            count = len(self.drafter.taps) or 1
            self._kept = KeptStates(self._taps, count, MAX_GRAPH_ROWS, self._hidden_size, self._dtype, slots.device)

    def keep_states(self, hidden: Tensor, tokens: int) -> None:
        if self._kept is not None:
            self._kept.keep(hidden, tokens)

    def finish(self, step: FinishedStep) -> StepFollower | None:
        if self.drafter is None:
            return None
        if step.hidden is None:
            return self._finish_replayed(self.drafter, step.rows)
        states = self._taps.take() if self._taps is not None else [step.hidden] if self.drafter.whole else []
        return DraftFollower(self.drafter, states, step.sampled_from)

    def _finish_replayed(self, drafter: DeviceDrafter, rows: StepRows) -> StepFollower:
        """If states are read, the rows have one token each."""
        if self._kept is None:
            return DraftFollower(drafter, [], None)
        states = self._kept.read(len(rows.slot))
        sampling = None if rows.shapes.all_sample else upload(rows.outputs.sample_after.astype(np.int64), states[0].device)
        return DraftFollower(drafter, states, states[0] if sampling is None else states[0][sampling])

    def idle(self) -> bool:
        return self.drafter is not None and self.drafter.idle()

    def close(self) -> None:
        if self.drafter is not None:
            self.drafter.close()
        self.drafter = self._taps = self._kept = None


@dataclass(frozen=True)
class DraftFollower:
    """What a step in flight leaves to the drafter, for when its tokens have reached the host."""

    drafter: DeviceDrafter
    states: list[Tensor]
    sampled_from: Tensor | None

    @torch.inference_mode()
    def follow(self, plan: StepPlan, lengths: Ints) -> None:
        self.drafter.follow(RanStep(plan, lengths, self.states, self.sampled_from))

    def drafts_of(self, plan: StepPlan) -> Ints:
        return self.drafter.guessed(plan)

    def expects(self, slot: int, count: int) -> Ints:
        return self.drafter.expects(slot, count)


# ---- states of the target model ---------------------------------------------------------------------------------------------


class Taps:
    """Reads the inputs of some layers of the target model by hooks. The device must run its layers one by one."""

    def __init__(self, model: Decoder, layers: tuple[int, ...]) -> None:
        blocks = getattr(model, "layers", None)
        if layers and not isinstance(blocks, nn.ModuleList):
            raise ConfigError(
                "speculative_config: drafters that read layer inputs are not supported with models run by transformers"
            )
        self._layers, self._states = layers, dict[int, Tensor]()
        for layer in set(layers):
            model.layers[layer].register_forward_pre_hook(lambda _, given, layer=layer: self._note(layer, given))

    def take(self) -> list[Tensor]:
        """Return the inputs [T, H] of the latest run, in the order of `layers`."""
        states = [self._states[layer] for layer in self._layers]
        self._states.clear()
        return states

    def _note(self, layer: int, given: tuple[Any, ...]) -> None:
        x, residual = given[0], given[1]
        self._states[layer] = x.clone() if residual is None else x + residual  # layers may overwrite them


class KeptStates:
    """The buffers to which CUDA graphs of decode steps copy the states that a drafter reads."""

    def __init__(self, taps: Taps | None, count: int, rows: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        """taps: None: the final states are kept. count: of buffers."""
        self._taps = taps
        self._buffers = [torch.zeros(rows, size, dtype=dtype, device=device) for _ in range(count)]

    def keep(self, hidden: Tensor, tokens: int) -> None:
        """Copy the states. This is recorded; steps with longer rows leave nothing."""
        states = [hidden] if self._taps is None else self._taps.take()
        for buffer, state in zip(self._buffers, states, strict=True):
            if tokens == len(hidden) <= len(buffer):
                buffer[:tokens].copy_(state)

    def read(self, rows: int) -> list[Tensor]:
        return [buffer[:rows] for buffer in self._buffers]


# ---- rows with drafts as rows of one token ----------------------------------------------------------------------------------


class Unrolled(NamedTuple):
    shapes: RowShapes
    owner: Longs  # [rows] the given row of each
    before: Ints  # [rows] tokens between its end and the end of that row


def unroll(rows: StepRows) -> tuple[StepRows, Longs]:
    """Return rows of one token in place of rows with drafts, and [rows] the given row of each.

    row        slot 3, [ newest  draft 1  draft 2 ] up to position 9
    unrolled   slot 3 up to 7      slot 3 up to 8      slot 3 up to 9

    All keys of a layer are written before any are read, so the result is the same. CUDA graphs of decode steps run such rows,
    and rows of one slot read its pages together.
    """
    shapes, owner, before = unroll_shapes(rows.shapes)
    return StepRows(unroll_slots(rows.slot.tobytes(), rows.shapes), rows.end[owner] - before, shapes), owner


@lru_cache(16)  # the same array object for equal rows: graphs compare by identity
def unroll_slots(slot: bytes, shapes: RowShapes) -> Ints:
    slots: Ints = np.frombuffer(slot, np.int32)[unroll_shapes(shapes).owner]
    return slots


@lru_cache(16)  # on the critical path, and most steps equal the one before
def unroll_shapes(shapes: RowShapes) -> Unrolled:
    pieces = 1 + shapes.drafts  # the known tokens, and each draft
    owner = np.arange(len(pieces)).repeat(pieces)
    ends = pieces.cumsum(dtype=np.int32)
    offset = np.arange(len(owner), dtype=np.int32) - (ends - pieces)[owner]
    count = np.where(offset == 0, (shapes.count - shapes.drafts)[owner], 1).astype(np.int32)
    after = Outputs.last(count, shapes.sample[owner].astype(np.int32)).sample_after
    outputs = Outputs(after, shapes.outputs.prompt_logprobs, shapes.outputs.pool)
    return Unrolled(RowShapes(count, np.zeros_like(count), outputs), owner, shapes.drafts[owner] - offset)
