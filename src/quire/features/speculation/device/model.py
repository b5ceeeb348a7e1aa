"""A draft model with the target model's vocabulary. Its keys and values are in pages with the same page numbers.

It runs prompts with the target model. Before it drafts it runs the tokens that it has not seen, then one token at a time. While
no drafts are wanted it runs nothing.

    text       [ prompt ................ | a  b  c ]
    seen       [ ........................ )              where it stands, of each slot
    passes     [ a  b  c ] -> d1      [ d1 ] -> d2      [ d2 ] -> d3

Accepted drafts are not run again, but for the last one and those that had no page yet.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch

from quire.attn.batch import PLAIN
from quire.config.quantization import choose_quantization
from quire.device.base import Device, Recorder, Setting
from quire.features.speculation.device.drafter import DeviceDrafter, Passes, RanStep, rows
from quire.load.load import load_weights
from quire.models.decoder import Decoder
from quire.models.registry import build_model
from quire.runner.core import KVBuffers
from quire.runner.graphs import Graphs, PendingSample, allowance, fixed_plans
from quire.runner.sampler.pipeline import Sampler
from quire.runner.slots import Prefixes, Slots
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
        """layout: of its layers, all of one group.
        group: the target model's, whose tables it shares.
        keeps: quantized layouts that the device runs as they are; None: weights are dequantized.
        """
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
        if facts.vocab_size < model.lm_head.total:  # the target's embedding may be padded further
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
            self._graphs = Graphs(self._model, self._passes.slots, self._draft_sampler, planners, recorder, vocabulary, room)
            with torch.inference_mode():
                self._graphs.record_guesses()
        self._seen = np.zeros(len(slots.tokens), np.int32)  # [S] tokens of the text
        self._further = np.zeros(len(slots.tokens), np.int32)  # [S] and of its own drafts after it
        self._filled = FilledPages(pages, self._layout.page_size, slots.prefixes, self._group, len(slots.tokens))

    def take_in(self, plan: StepPlan) -> None:
        if self._kv is not None:
            self._kv.copy(plan.copy_from, plan.copy_to)
        fresh = plan.entry_group == self._group  # what it wrote in a table's earlier pages is lost
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

    def follow(self, ran: RanStep) -> None:
        plan, slot, next_drafts = ran.plan, ran.plan.slot, min(ran.plan.next_drafts, self.most)
        right = np.minimum(np.maximum(ran.lengths - 1, 0), self._further[slot])
        self._seen[slot] += np.where(plan.drafts > 0, right, 0)
        self._further[slot] = 0
        if not next_drafts:
            return
        assert self._passes is not None
        wants, text = np.zeros(len(slot), np.bool_), ran.text
        wants[ran.sampled] = plan.guesses[ran.sampled] > 0
        wants &= self._passes.fits(text)
        prompt = plan.count - plan.drafts > 1
        self._catch_up(slot, np.where(wants, text, plan.end - plan.drafts), wants | prompt | ~plan.sample, wants)
        self._filled.note(slot, self._seen[slot])
        if wants.any():
            self._go_on(slot[wants], text[wants], plan.guesses[wants], next_drafts)

    def _catch_up(self, slot: Ints, end: Ints, chosen: Bools, wants: Bools) -> None:
        """Run the texts of the chosen rows up to `end`, at most `room` tokens at a time."""
        left = np.where(chosen, np.maximum(end - self._seen[slot], 0), 0)
        while left.any():
            now = np.minimum(left, np.maximum(self._room - (np.cumsum(left) - left), 0))
            left -= now
            run = np.flatnonzero(now)
            self._seen[slot[run]] += now[run]
            self._run(rows(slot[run], now[run], self._seen[slot[run]], (wants & (left == 0))[run]))

    def _go_on(self, slot: Ints, text: Ints, counts: Ints, next_drafts: int) -> None:
        assert self._passes is not None
        for i in range(1, next_drafts):
            fits = self._passes.fits(text + i) & (counts > i)
            if fits.any():
                self._run(rows(slot[fits], 1, (text + i)[fits]))
                self._further[slot[fits]] += 1
        self._guessed.note(slot, self._passes.read(slot, text, next_drafts))

    def _run(self, plan: StepRows) -> None:
        """Run rows and write the tokens that they sample to their slots."""
        assert self._model is not None and self._passes is not None
        replayed = None if self._graphs is None else self._graphs.run(plan, self._draft_sampler.plain(plan.slot))
        if isinstance(replayed, PendingSample):
            if len(plan.outputs.sample_after):
                self._draft_sampler.guess(replayed.logits, replayed.rows)
        elif replayed is None:
            built = self._passes.build(plan)
            hidden = self._model(built.batch)
            if len(plan.outputs.sample_after):
                self._draft_sampler.guess(self._model.logits(hidden[built.batch.logit_index], PLAIN), built.rows)


class FilledPages:
    """How many tokens of every page the draft model has run. While it drafts nothing it runs nothing, so a prefix hit of the
    target model need not be one for it: it begins where its own part of the pages ends."""

    def __init__(self, pages: int, page_size: int, tables: Prefixes, group: int, slots: int) -> None:
        """tables: the host's copy of the page tables. group: the one whose tables are used."""
        self._filled = np.zeros(pages + 1, np.int32)  # [pages, and the null page] tokens
        self._page_size, self._tables, self._group = page_size, tables, group
        self._noted = np.zeros(slots, np.int32)  # [S] tokens

    def take_in(self, plan: StepPlan) -> None:
        """Mark pages that are new to their slots as empty, except prefix hits and copies."""
        start = np.zeros_like(self._noted)
        for admission in plan.admitted:
            start[admission.slot] = admission.start
        own = plan.entry_group == self._group
        fresh = own & (plan.entry_index * self._page_size >= start[plan.entry_slot])
        self._filled[plan.entry_page[fresh]] = 0
        np.minimum.at(self._noted, plan.entry_slot[fresh], plan.entry_index[fresh] * self._page_size)
        self._filled[plan.fetch_page[plan.fetch_page > 0]] = 0  # its own part does not come back from host memory
        self._filled[plan.copy_to] = self._filled[plan.copy_from]
        for admission in plan.admitted:
            self._noted[admission.slot] = self._find(admission.slot, admission.start)

    def read(self, slot: int) -> int:
        """Return how many tokens of a new request have been run."""
        return int(self._noted[slot])

    def note(self, slot: Ints, seen: Ints) -> None:
        """Note that the first `seen` tokens of these slots are in their pages."""
        size, tables = self._page_size, self._tables.pages[self._group]
        for each, begin, end in zip(slot.tolist(), self._noted[slot].tolist(), seen.tolist(), strict=True):
            if end > begin:
                index = np.arange(begin // size, -(-end // size))
                self._filled[tables[each, index]] = np.minimum(end - index * size, size)
        self._noted[slot] = seen

    def _find(self, slot: int, start: int) -> int:
        size = self._page_size
        filled = self._filled[self._tables.pages[self._group, slot, : -(-start // size)]]
        short = np.flatnonzero(filled < size)
        return start if not len(short) else min(start, int(short[0]) * size + int(filled[short[0]]))
