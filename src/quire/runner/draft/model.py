"""A smaller model of the same vocabulary guesses. It runs whatever the large one runs, in the same batches, so its keys and
values are always in the same pages. Then it goes on, a token at a time.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.attn.batch import Batch
from quire.config.quantization import choose_quantization
from quire.device.base import Device, Setting
from quire.load.load import load_weights
from quire.models.decoder import Decoder
from quire.models.registry import build_model
from quire.runner.draft.ahead import Ahead
from quire.runner.draft.base import DeviceDrafter
from quire.runner.kv import KVBuffers
from quire.runner.slots import Slots
from quire.types.cache import CacheLayout
from quire.types.plan import Ints, StepPlan

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts


class DraftModel(DeviceDrafter):
    def __init__(self, facts: "ModelFacts", layout: CacheLayout, group: int, most: int, load_format: str, seed: int) -> None:
        """`layout` of its layers, all of one group; `group` is the large model's whose tables it shares."""
        self.most = most
        self._facts, self._layout, self._group, self._load_format, self._seed = facts, layout, group, load_format, seed
        self._model: Decoder | None = None
        self._kv: KVBuffers | None = None
        self._slots: Slots | None = None

    def load(self, device: Device, dtype: torch.dtype, model: Decoder) -> None:  # noqa: ARG002
        own = build_model(self._facts)
        facts = self._facts
        quantization = choose_quantization(None, facts.quantization, facts.files.format == "gguf")
        load_weights(
            own, facts, device=device.torch_device, dtype=dtype, load_format=self._load_format, seed=self._seed,
            quantization=quantization,
        )  # fmt: skip
        prepared = device.prepare(own, Setting(facts, dtype, self._layout, self._load_format))
        own.body, self._kv_layout = prepared.body, prepared.kv_layout
        self._model, self._device, self._dtype = own, device, dtype

    def allocate(self, pages: int, slots: Slots) -> None:
        assert self._model is not None
        self._slots = slots
        self._kv = KVBuffers(self._layout, self._facts.layers, pages, self._dtype, self._device.allocate, self._kv_layout)
        for layer, view, group in self._kv.views():
            self._model.attentions[layer].bind(view, group, dtype=self._dtype)

    def copy(self, source: Ints, target: Ints) -> None:
        if self._kv is not None:
            self._kv.copy(source, target)

    def close(self) -> None:
        self._model = self._kv = self._slots = None

    def see(self, plan: StepPlan, batch: Batch, states: list[Tensor]) -> None:  # noqa: ARG002
        """It runs the same."""
        assert self._model is not None
        kept = batch.kept
        if kept is not None:
            kept = replace(kept, batch=self._own(kept.batch))
        self._model(replace(self._own(batch), kept=kept))

    def _own(self, batch: Batch) -> Batch:
        return replace(batch, groups=(batch.groups[self._group],), plans={}, adapters=None)

    def propose(self, slot: Tensor, length: Tensor, tokens: Tensor, hidden: Tensor, at: Tensor) -> Tensor:  # noqa: ARG002
        assert self._model is not None and self._slots is not None
        model, ahead, guesses = self._model, Ahead(self._slots, self._group, slot), list[Tensor]()
        ids = tokens[slot, length - 1].long()
        for i in range(self.most):
            ids = model.logits(model(ahead.batch(ids, length - 1 + i))).argmax(-1)
            guesses.append(ids)
        return torch.stack(guesses, 1)
