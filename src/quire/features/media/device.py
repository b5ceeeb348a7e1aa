"""The device half of images and videos: runs the encoder, and adds embeddings, rotary positions and spans to the batch.

prepare   free and compute embeddings as the plan lists them
extend    embeddings of the step's tokens from the encoder, rotary positions with three axes, spans that attend to all
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quire.attn.batch import Batch, MediaTokens, RotaryTokens, Span
from quire.device.base import Device
from quire.features.base import Allocation, StepPart
from quire.features.media.encoder import Encoded, Encoder, load_tower
from quire.features.media.host import ModelMedia
from quire.features.media.placed import EmbeddedPart, PlacedMedia
from quire.layers.rope import Rope
from quire.models.decoder import Decoder
from quire.ops.arguments import Rotation
from quire.prepare.stage import OtherStage
from quire.runner.slots import Slots
from quire.runner.transfer import upload
from quire.types.plan import Admission, Longs, StepPlan, StepRows

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts
    from quire.config.quantization import Quantization


@dataclass(frozen=True)
class MediaRow:
    """A row of a request with images or videos."""

    index: int
    slot: int
    placed: PlacedMedia
    token: int  # index of its first in the batch
    begin: int  # position of the first
    end: int


class MediaPart(StepPart):
    name = "media"

    def __init__(
        self,
        device: Device,
        dtype: torch.dtype,
        media: ModelMedia,
        facts: "ModelFacts",
        load_format: str,
        seed: int,
        quantization: "Quantization | None",
        one_by_one: bool,
        reserved: int,
    ) -> None:
        """one_by_one: items are not encoded together, so that the bits of one do not depend on the others.
        reserved: bytes of the encoder cache, and of the encoder's activations beyond those of the largest step.
        """
        self._device, self._dtype, self._media, self._facts = device, dtype, media, facts
        self._load_format, self._seed, self._quantization, self._reserved = load_format, seed, quantization, reserved
        self._one_by_one = one_by_one
        self._encoder: Encoder | None = None  # None: on another pipeline stage
        self._rope: Rope | None = None  # None: rotary positions have one axis, or the attention layers are on other stages
        self._axes: Longs = np.empty(0, np.int64)  # [rotary_dim / 2] of each rotary frequency
        self._requests: dict[int, PlacedMedia] = {}  # by slot
        self._errors: dict[int, str] = {}  # by slot
        if media.family.rotary_axes > 1:
            self.graph_keys = (False, True)

    # ---- start -----------------------------------------------------------------------------------------------------------

    def transform(self, model: Decoder) -> None:
        model.deep_levels = self._media.levels - 1

    def load(self, model: Decoder, reserved_bytes: Callable[[], int]) -> None:  # noqa: ARG002
        if self._media.family.rotary_axes > 1:
            [rope] = model.ropes.values()
            self._rope = rope if rope in model.modules() else None
            scheme = rope.scheme
            axes = self._media.family.rotary_axes_of(scheme.parameters.get("mrope_section"), scheme.dim // 2)
            self._axes = np.asarray(axes, np.int64)
        if isinstance(model.embed_tokens, OtherStage):
            return
        device = self._device.torch_device
        tower = load_tower(
            self._media, self._facts, device=device, dtype=self._dtype, load_format=self._load_format, seed=self._seed,
            quantization=self._quantization,
        )  # fmt: skip
        columns = self._media.levels * self._media.hidden_size
        self._encoder = Encoder(tower, device, self._dtype, columns, self._one_by_one)

    def reserved_bytes(self, max_seqs: int, recording: bool) -> int:  # noqa: ARG002
        return 0 if self._encoder is None else self._reserved

    def allocate(self, allocation: Allocation) -> None:  # noqa: ARG002
        self._requests.clear()
        self._errors.clear()
        if self._encoder is not None:
            self._encoder.clear()

    def describe(self) -> dict[str, int]:
        return {} if self._encoder is None else {"encoder_parameters": self._encoder.parameters}

    def close(self) -> None:
        self._encoder = self._rope = None

    # ---- each step -------------------------------------------------------------------------------------------------------

    def admit(self, slot: int, admission: Admission) -> None:
        if items := admission.extras.media:
            family = self._media.family
            self._requests[slot] = PlacedMedia(items, admission.prompt_length, family.rotary_axes, family.bidirectional)

    def retire(self, slot: int) -> None:
        self._requests.pop(slot, None)
        self._errors.pop(slot, None)

    def prepare(self, plan: StepPlan) -> None:
        if self._encoder is None:
            return
        self._encoder.forget(plan.forget)
        if plan.encode:
            errors = self._encoder.keep([self._requests[slot].items[index] for slot, index in plan.encode])
            if errors:  # another request may have the same item, with arrays of an API process that still runs
                placed = self._requests.values()
                errors = self._encoder.keep([item for each in placed for item in each.items if item.digest in errors])
            self._note_errors(plan, errors)

    def _note_errors(self, rows: StepRows, errors: Mapping[str, str]) -> None:
        """Record an error for each request in a step with an item that could not be encoded."""
        for slot in rows.slot.tolist() if errors else ():
            placed = self._requests.get(slot)
            found = next((errors[item.digest] for item in placed.items if item.digest in errors), "") if placed else ""
            if found:
                self._errors[slot] = found

    def failed(self, plan: StepPlan) -> Mapping[int, str]:
        if not self._errors:
            return {}
        return {row: self._errors[slot] for row, slot in enumerate(plan.slot.tolist()) if slot in self._errors}

    def graph_key(self, rows: StepRows) -> Hashable | None:
        shifted = False
        for row in self._rows(rows):
            shift = row.placed.shift(row.begin, row.end)
            if shift is None or row.placed.spans(row.begin, row.end) or any(row.placed.embedded(row.begin, row.end)):
                return None
            shifted |= bool(shift)
        return shifted

    def extend(self, batch: Batch, rows: StepRows, slot: Tensor) -> Batch:  # noqa: ARG002
        found = self._rows(rows)
        if not found:
            return batch
        spans = tuple(
            Span(row.index, start, end, self._media.family.bidirectional == "item")
            for row in found
            for start, end in row.placed.spans(row.begin, row.end)
        )
        media = None if self._encoder is None else self._media_tokens(self._encoder, found, rows)
        return replace(batch, media=media, rotary=self._rotary_tokens(found, batch), spans=spans)

    def _rows(self, rows: StepRows) -> list[MediaRow]:
        """Return the rows of requests with media."""
        if not self._requests or self._requests.keys().isdisjoint(slots := rows.slot.tolist()):
            return []
        found, token = list[MediaRow](), 0
        for index, (slot, end, count) in enumerate(zip(slots, rows.end.tolist(), rows.count.tolist(), strict=True)):
            if (placed := self._requests.get(slot)) is not None:
                found.append(MediaRow(index, slot, placed, token, end - count, end))
            token += count
        return found

    def _media_tokens(self, encoder: Encoder, found: list[MediaRow], rows: StepRows) -> MediaTokens | None:
        """Return the tokens of images and videos in a step. Items that the cache lacks are encoded for this step."""
        parts = [(row, part) for row in found for part in row.placed.embedded(row.begin, row.end)]
        if not parts:
            return None
        items = [row.placed.items[part.item] for row, part in parts]
        encoded = encoder.encode(items)
        self._note_errors(rows, {digest: each for digest, each in encoded.items() if isinstance(each, str)})
        values = [self._values(encoded[item.digest], part) for item, (_, part) in zip(items, parts, strict=True)]
        indices = np.concatenate([row.token + part.position - row.begin + np.arange(part.tokens) for row, part in parts])
        return MediaTokens(indices, upload(indices, self._device.torch_device), torch.cat(values))

    def _values(self, encoded: Encoded, part: EmbeddedPart) -> Tensor:
        """Return a part of an item's embeddings; zeros for an item that could not be encoded."""
        if isinstance(encoded, Tensor):
            return encoded[part.first : part.first + part.tokens]
        columns = self._media.levels * self._media.hidden_size
        return torch.zeros(part.tokens, columns, dtype=self._dtype, device=self._device.torch_device)

    # ---- rotary positions ------------------------------------------------------------------------------------------------

    def _rotary_tokens(self, found: list[MediaRow], batch: Batch) -> RotaryTokens | None:
        shifted = [row for row in found if row.placed.has_shifts]
        if self._rope is None or not shifted:
            return None
        device, tokens = batch.positions.device, len(batch.positions)
        shifts: Longs = np.zeros((3, tokens), np.int64)
        for row in shifted:
            shifts[:, row.token : row.token + row.end - row.begin] = row.placed.shifts(row.begin, row.end)
        if not shifts.any():
            return None
        if (shifts == shifts[0]).all():
            return RotaryTokens(batch.positions + upload(shifts[0], device))
        axes, table = upload(self._axes, device), self._rope.table
        rows = (batch.positions + upload(shifts, device))[axes]  # [rotary_dim / 2, T]
        cos, sin = (each.T.gather(1, rows).T.contiguous() for each in (table.cos, table.sin))
        return RotaryTokens(torch.arange(tokens, device=device), Rotation(cos, sin, table.interleaved))

    # ---- CUDA graphs -----------------------------------------------------------------------------------------------------

    def allocate_inputs(self, slots: Slots, max_rows: int) -> None:
        self._slots = slots
        self._offsets = torch.zeros(max_rows, dtype=torch.int32, device=slots.device)

    def write_inputs(self, rows: StepRows | None, count: int) -> None:
        """Write what is added to the positions of each row."""
        offsets = np.zeros(count, np.int32)
        for row in [] if rows is None else self._rows(rows):
            offsets[row.index] = row.placed.shift(row.begin, row.end) or 0
        self._slots.updates.write(self._offsets, 0, offsets)

    def extend_recorded(self, batch: Batch, count: int) -> Batch:
        offsets = self._offsets[:count]
        if not batch.rows:  # rows of several tokens
            tokens = torch.arange(len(batch.positions), dtype=torch.int32, device=offsets.device)
            offsets = offsets[torch.searchsorted(batch.row_starts[1:], tokens, right=True)]
        return replace(batch, rotary=RotaryTokens(batch.positions + offsets))
