"""A smaller model with the same tokens guesses. Its keys and values are in the same pages. Prompts it runs with the large
one; what it has not seen when it guesses again it runs then, and goes on, a token at a time. While nobody asks it does nothing.

    text       [ prompt ................ | a  b  c ]
    seen       [ ........................ )              where it stands, of each slot
    passes     [ a  b  c ] -> d1      [ d1 ] -> d2      [ d2 ] -> d3

Drafts that were right need not be run again: it has seen all but the last of them, and those for which there was no page yet.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch

from quire.attn.batch import PLAIN
from quire.config.quantization import choose_quantization
from quire.device.base import Device, Recorder, Setting
from quire.load.load import load_weights
from quire.models.decoder import Decoder
from quire.models.registry import build_model
from quire.runner.draft.base import DeviceDrafter, Ran
from quire.runner.draft.filled import FilledPages
from quire.runner.draft.passes import Passes, rows
from quire.runner.graphs import Graphs, Undrawn, allowance, fixed_plans
from quire.runner.kv import KVBuffers
from quire.runner.sampler.pipeline import Sampler
from quire.runner.slots import Slots
from quire.types.cache import CacheLayout
from quire.types.plan import Bools, Ints, StepPlan, StepRows

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts


class DraftModel(DeviceDrafter):
    def __init__(
        self,
        facts: "ModelFacts",
        layout: CacheLayout,
        group: int,
        most: int,
        load_format: str,
        seed: int,
        keeps: frozenset[str] | None = None,
    ) -> None:
        """`layout` of its layers, all of one group; `group` is the large model's whose tables it shares. `keeps`: weights of
        few bits stay so, where the device has these forms (None: they become floats)."""
        self.most, self._keeps = most, keeps
        self._facts, self._layout, self._group, self._load_format, self._seed = facts, layout, group, load_format, seed
        self._model: Decoder | None = None
        self._kv: KVBuffers | None = None
        self._passes: Passes | None = None
        self._graphs: Graphs | None = None

    def load(self, device: Device, dtype: torch.dtype, model: Decoder) -> None:
        own = build_model(self._facts)
        facts = self._facts
        quantization = choose_quantization(None, facts.quantization, facts.files.format == "gguf")
        load_weights(
            own, facts, device=device.torch_device, dtype=dtype, load_format=self._load_format, seed=self._seed,
            quantization=quantization, keep_quantized=self._keeps is not None, keeps=self._keeps or frozenset(),
        )  # fmt: skip
        prepared = device.prepare(own, Setting(facts, dtype, self._layout, self._load_format))
        own.body, self._kv_layout = prepared.body, prepared.kv_layout
        last = facts.vocab_size - 1
        if facts.vocab_size < model.lm_head.total:  # which is padded more; what it may be told beyond, nobody says
            own.embed_tokens.register_forward_pre_hook(lambda _, given: (given[0].clamp(max=last), *given[1:]))
        self._model, self._device, self._dtype = own, device, dtype

    def allocate(self, pages: int, slots: Slots, sampler: Sampler, room: int, recorder: Recorder | None) -> None:
        assert self._model is not None
        super().allocate(pages, slots, sampler, room, recorder)
        self._kv = KVBuffers(self._layout, self._facts.layers, pages, self._dtype, self._device.allocate, self._kv_layout)
        for layer, view, group in self._kv.views():
            self._model.attentions[layer].bind(view, group, dtype=self._dtype)
        self._passes, self._room = Passes(slots, self._group), room
        planners = None if recorder is None else fixed_plans(self._model, 1)
        self._graphs = None
        if recorder is not None and planners is not None:
            vocabulary = self._facts.vocab_size
            self._graphs = Graphs(self._model, self._passes.slots, self._draws, planners, recorder, vocabulary, room)
            with torch.inference_mode():
                self._graphs.record_guesses()
        self._seen = np.zeros(len(slots.tokens), np.int32)  # [S] of the text
        self._further = np.zeros(len(slots.tokens), np.int32)  # [S] and of what it guessed behind it
        self._filled = FilledPages(pages, self._layout.page_size, slots.prefixes, self._group, len(slots.tokens))

    def take_in(self, plan: StepPlan) -> None:
        if self._kv is not None:
            self._kv.copy(plan.copy_from, plan.copy_to)
        fresh = plan.entry_group == self._group  # what it wrote where these pages are now is lost
        slot, first = plan.entry_slot[fresh], plan.entry_index[fresh] * self._layout.page_size
        np.minimum.at(self._further, slot, np.maximum(first - self._seen[slot], 0))
        np.minimum.at(self._seen, slot, first)
        self._filled.take_in(plan)
        for admission in plan.admitted:
            self._seen[admission.slot], self._further[admission.slot] = self._filled.read(admission.slot), 0

    def close(self) -> None:
        self._model = self._kv = self._passes = self._graphs = None

    def recorded_bytes(self, max_seqs: int) -> int:
        return allowance(max_seqs, self._facts.vocab_size)

    @torch.inference_mode()
    def idle(self) -> bool:
        return self._graphs is not None and self._graphs.record_next()

    def follow(self, ran: Ran) -> None:
        plan, slot, ahead = ran.plan, ran.plan.slot, min(ran.plan.ahead, self.most)
        right = np.minimum(np.maximum(ran.lengths - 1, 0), self._further[slot])
        self._seen[slot] += np.where(plan.drafts > 0, right, 0)
        self._further[slot] = 0
        if not ahead:
            return
        assert self._passes is not None
        wants, text = np.zeros(len(slot), np.bool_), ran.text
        wants[ran.drew] = plan.guesses[ran.drew] > 0
        wants &= self._passes.fits(text)
        prompt = plan.count - plan.drafts > 1
        self._catch_up(slot, np.where(wants, text, plan.end - plan.drafts), wants | prompt | ~plan.sample, wants)
        self._filled.note(slot, self._seen[slot])
        if wants.any():
            self._go_on(slot[wants], text[wants], plan.guesses[wants], ahead)

    def _catch_up(self, slot: Ints, end: Ints, chosen: Bools, wants: Bools) -> None:
        """Runs the texts of the chosen rows up to `end`, in steps of as many tokens as there is room for."""
        left = np.where(chosen, np.maximum(end - self._seen[slot], 0), 0)
        while left.any():
            now = np.minimum(left, np.maximum(self._room - (np.cumsum(left) - left), 0))
            left -= now
            run = np.flatnonzero(now)
            self._seen[slot[run]] += now[run]
            self._run(rows(slot[run], now[run], self._seen[slot[run]], (wants & (left == 0))[run]))

    def _go_on(self, slot: Ints, text: Ints, counts: Ints, ahead: int) -> None:
        assert self._passes is not None
        for i in range(1, ahead):
            fits = self._passes.fits(text + i) & (counts > i)
            if fits.any():
                self._run(rows(slot[fits], 1, (text + i)[fits]))
                self._further[slot[fits]] += 1
        self._guessed.note(slot, self._passes.read(slot, text, ahead))

    def _run(self, plan: StepRows) -> None:
        """What the rows draw is written behind them."""
        assert self._model is not None and self._passes is not None
        replayed = None if self._graphs is None else self._graphs.run(plan, self._draws.plain(plan.slot))
        if isinstance(replayed, Undrawn):
            if len(plan.outputs.draw):
                self._draws.guess(replayed.logits, replayed.rows)
        elif replayed is None:
            built = self._passes.build(plan)
            hidden = self._model(built.batch)
            if len(plan.outputs.draw):
                self._draws.guess(self._model.logits(hidden[built.batch.logit_index], PLAIN), built.rows)
