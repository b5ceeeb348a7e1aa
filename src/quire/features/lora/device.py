"""The device half of LoRA: adapters in device memory, and the adapter slot of each request in the batch."""

from collections.abc import Callable, Hashable
from dataclasses import replace

import numpy as np
import torch

from quire.attn.batch import Batch, LoRATokens
from quire.device.base import Device
from quire.features.base import Allocation, StepPart
from quire.features.lora.host import reserved_bytes
from quire.models.decoder import Decoder
from quire.ops.adapters import sort_rows, tile
from quire.prepare.adapt import Adapters, adapt, find_sites
from quire.runner.adapters import Shelf, WholeModel
from quire.runner.graph_inputs import start_size
from quire.runner.slots import Slots
from quire.runner.warmup import warm_up_adapters
from quire.types.errors import EngineError
from quire.types.plan import Admission, Ints, Longs, StepRows


class LoRAPart(StepPart):
    name = "lora"
    graph_keys = (False, True)

    def __init__(self, device: Device, dtype: torch.dtype, max_loras: int, max_rank: int, added_tokens: int) -> None:
        """added_tokens: vocabulary entries that adapters may add to the model's own."""
        self._device, self._dtype, self._max_loras, self._max_rank = device, dtype, max_loras, max_rank
        self._added_tokens = added_tokens
        self._whole: WholeModel | None = None
        self._adapters: Adapters | None = None
        self._model: Decoder | None = None
        self._cache: Shelf | None = None
        self._places: Longs = np.zeros(0, np.int64)  # [S] the adapter slot of each request; 0: none
        self._adapted: set[int] = set()  # slots with an adapter

    @property
    def cache(self) -> Shelf:
        assert self._cache is not None
        return self._cache

    def note_whole_model(self, model: Decoder) -> None:
        """Of a pipeline stage, before its layers are cut out: every stage checks an adapter's file against the whole model."""
        parameters = {name for name, _ in model.named_parameters()}
        self._whole = WholeModel(find_sites(model, self._added_tokens), model.renames, parameters)

    def transform(self, model: Decoder) -> None:
        device = self._device.torch_device
        tabled = (self._max_loras, self._max_rank) if device.type == "cuda" else None  # for kernels
        self._adapters = adapt(model, device=device, dtype=self._dtype, tabled=tabled, more=self._added_tokens)

    def load(self, model: Decoder, reserved_bytes: Callable[[], int]) -> None:  # noqa: ARG002
        assert self._adapters is not None
        budget = None
        if self._device.torch_device.type != "cpu":
            budget = self._max_loras * self._adapters.bytes_of(self._max_rank)
        self._model = model
        self._cache = Shelf(
            self._adapters, model, self._max_loras, self._max_rank, budget, self._added_tokens, self._whole
        )  # fmt: skip

    def reserved_bytes(self, max_seqs: int, recording: bool) -> int:  # noqa: ARG002
        adapters = self._adapters
        return 0 if adapters is None else reserved_bytes(self._max_loras, adapters.bytes_of(self._max_rank), adapters.tabled)

    def warm_up(self, max_tokens: int) -> None:
        if self._model is not None and self.cache.has_kernels_for(()):
            warm_up_adapters(self._model, self._device.torch_device, max_tokens)
            self.cache.warm_up()

    def allocate(self, allocation: Allocation) -> None:
        self._places = np.zeros(len(allocation.slots.tokens), np.int64)
        self._adapted.clear()

    def admit(self, slot: int, admission: Admission) -> None:
        if admission.extras.adapter:
            self._places[slot] = admission.extras.adapter
            self._adapted.add(slot)

    def retire(self, slot: int) -> None:
        self._places[slot] = 0
        self._adapted.discard(slot)

    def extend(self, batch: Batch, rows: StepRows, slot: torch.Tensor) -> Batch:  # noqa: ARG002
        if not self._uses(rows.slot):
            return batch
        places, by_kernels = self._find(rows.slot)
        each, device = np.repeat(places, rows.count), batch.ids.device
        lora = LoRATokens(each, device, tile(each, device) if by_kernels else None)
        return replace(batch, tokens=replace(batch.tokens, lora=lora))

    def graph_key(self, rows: StepRows) -> Hashable | None:
        if not self._uses(rows.slot):
            return False
        return True if self._find(rows.slot)[1] else None

    def _uses(self, slots: Ints) -> bool:
        return bool(self._adapted) and not self._adapted.isdisjoint(slots.tolist())

    def _find(self, slots: Ints) -> tuple[Longs, bool]:
        """Return the adapter slots [R], and whether the kernels support these adapters."""
        places = self._places[slots]
        asked = {*places.tolist()} - {0}
        for place in asked:
            if place not in self.cache.filled:
                raise EngineError(f"a row asks for the adapter in slot {place}, which is empty")
        return places, self.cache.has_kernels_for(asked)

    # ---- CUDA graphs -----------------------------------------------------------------------------------------------------

    def allocate_inputs(self, slots: Slots, max_rows: int) -> None:
        self._slots = slots
        self._inputs = torch.zeros(2 * start_size(max_rows), dtype=torch.int32, device=slots.device)

    def write_inputs(self, rows: StepRows | None, count: int) -> None:
        """Rows with the same adapter form a group: write each row's group, then each group's adapter slot."""
        all_rows = np.zeros(count, np.int64)
        if rows is not None:
            all_rows[: len(rows.slot)] = self._places[rows.slot]
        distinct, groups = np.unique(all_rows, return_inverse=True)
        packed = np.zeros(2 * start_size(count), np.int32)
        packed[:count] = groups
        packed[start_size(count) :][: len(distinct)] = distinct
        self._slots.updates.write(self._inputs, 0, packed)

    def extend_recorded(self, batch: Batch, count: int) -> Batch:
        room = start_size(count)
        groups, places = self._inputs[:count], self._inputs[room : room + count]
        most = min(self._max_loras + 1, count)
        tiles = sort_rows(groups, batch.row_starts, places, len(batch.ids), most)
        lora = LoRATokens(np.empty(0, np.int64), batch.ids.device, tiles)
        return replace(batch, tokens=replace(batch.tokens, lora=lora))

    def close(self) -> None:
        self._cache = self._model = self._adapters = self._whole = None
