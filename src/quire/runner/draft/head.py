"""Heads with layers of their own: they guess from the model's states.

    position      0          1          2      ...    p
    state         h0         h1         h2            hp           the model's, at each of the step's tokens
    token         t1         t2         t3            tp+1         the next one: known, or drawn by this step
    head       (h0, t1)   (h1, t2)   (h2, t3)  ... (hp, tp+1)  ─►  tp+2

So a head runs when the step has drawn, over those of its tokens that turned out to be the text. What it has at a position
depends on the token behind it: where a prefix is found whose next token was another, the last key is that of the other text,
and guesses may be a little worse. Then it goes on, a token at a time, with what it gave itself instead of the model's state.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from quire.attn.batch import PLAIN, Batch
from quire.config.draft_heads import DraftHead
from quire.config.quantization import choose_quantization
from quire.device.base import Device, Recorder
from quire.files.reading import reading
from quire.layers.attention import Attention
from quire.layers.embedding import Embedding, Head
from quire.layers.parameter import parameter
from quire.load.assign import Renames
from quire.load.load import load_weights
from quire.models.decoder import Decoder
from quire.runner.draft.base import DeviceDrafter, Ran
from quire.runner.draft.passes import Passes, rows
from quire.runner.kv import KVBuffers
from quire.runner.sampler.pipeline import Sampler
from quire.runner.slots import Slots
from quire.runner.transfer import upload
from quire.types.cache import CacheLayout
from quire.types.plan import Ints, StepPlan, spans


class HeadLayers(nn.Module):
    """The mathematics of a head; a file for each kind has the class. What a checkpoint does not have is the model's."""

    renames: Renames = ()

    def __init__(self, head: DraftHead, hidden_size: int) -> None:
        super().__init__()
        facts = head.facts
        self.embed_tokens = Embedding(facts.vocab_size, hidden_size) if head.has("embed_tokens.weight") else None
        self.draft_vocabulary = int(facts.hf.get("draft_vocab_size") or facts.vocab_size)
        self.lm_head = Head(self.draft_vocabulary, hidden_size) if head.has("lm_head.weight", "head.weight") else None
        self.d2t = parameter(self.draft_vocabulary, dtype=torch.int64) if head.has("d2t") else None

    @property
    def attentions(self) -> list[Attention]:
        return [module for module in self.modules() if isinstance(module, Attention)]

    def combine(self, states: list[Tensor]) -> Tensor:
        """The model's states [T, H] -> what the first pass takes for them."""
        return states[0]

    def forward(self, embedded: Tensor, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """-> [T, H] for the logits, and [T, H] in place of the model's state where it goes on."""
        raise NotImplementedError


class HeadDrafter(DeviceDrafter):
    def __init__(
        self,
        head: DraftHead,
        make: Callable[[DraftHead], HeadLayers],
        layout: CacheLayout,
        group: int,
        most: int,
        load_format: str,
        seed: int,
    ) -> None:
        """`layout` of its layers, all of one group; `group` is the model's whose tables it shares."""
        self.most, self.taps, self.whole, self.reads = most, head.taps, not head.taps, True
        self._head, self._make, self._layout, self._group = head, make, layout, group
        self._load_format, self._seed = load_format, seed
        self._layers: HeadLayers | None = None
        self._kv: KVBuffers | None = None
        self._passes: Passes | None = None

    def load(self, device: Device, dtype: torch.dtype, model: Decoder) -> None:
        facts = self._head.facts
        with reading(facts.files.path, f"its configuration makes no head of {self._head.method}"), torch.device("meta"):
            layers = self._make(self._head).eval()
        load_weights(
            layers, facts, device=device.torch_device, dtype=dtype, load_format=self._load_format, seed=self._seed,
            quantization=choose_quantization(None, facts.quantization, False),
        )  # fmt: skip
        self._layers, self._model, self._device, self._dtype = layers, model, device, dtype
        self._ids: Tensor | None = None  # [draft vocabulary] int64, the model's token ids
        if layers.d2t is not None:  # whatever the files say, they are ids of the model
            own = torch.arange(layers.draft_vocabulary, device=device.torch_device)
            self._ids = (own + layers.d2t).clamp(0, model.lm_head.total - 1)

    def allocate(self, pages: int, slots: Slots, sampler: Sampler, room: int, recorder: Recorder | None) -> None:
        assert self._layers is not None
        super().allocate(pages, slots, sampler, room, recorder)
        self._passes = Passes(slots, self._group)
        self._kv = KVBuffers(self._layout, self._head.facts.layers, pages, self._dtype, self._device.allocate)
        attentions = self._layers.attentions
        for layer, view, group in self._kv.views():
            attentions[layer].bind(view, group, dtype=self._dtype)

    def take_in(self, plan: StepPlan) -> None:
        if self._kv is not None:
            self._kv.copy(plan.copy_from, plan.copy_to)

    def close(self) -> None:
        self._layers = self._kv = self._passes = None

    def follow(self, ran: Ran) -> None:
        plan, drew, ahead = ran.plan, ran.drew, min(ran.plan.ahead, self.most)
        known = plan.count - plan.drafts
        count = np.where(plan.sample, known + np.maximum(ran.lengths, 1) - 1, plan.count)  # that are text now
        out, state = self._take_states(ran, count)
        if not ahead or not len(drew):
            return
        if len(drew) < len(out):
            last = upload((np.cumsum(count) - 1)[drew].astype(np.int64), out.device)
            out, state = out[last], state[last]
        self._go_on(plan.slot[drew], ran.text[drew], out, state, ahead)

    def _take_states(self, ran: Ran, count: Ints) -> tuple[Tensor, Tensor]:
        """Each token's state with the token behind it, of the first count[r] of each row."""
        assert self._passes is not None and self._layers is not None
        plan, slots, states = ran.plan, self._passes.slots, ran.states
        if (count < plan.count).any():
            index = upload(spans(np.cumsum(plan.count) - plan.count, count).astype(np.int64), slots.device)
            states = [state[index] for state in states]
        batch = self._passes.build(rows(plan.slot, count, plan.end - plan.count + count, False), whole=True).batch
        slot = upload(np.repeat(plan.slot, count).astype(np.int64), slots.device)
        return self._forward(slots.tokens[slot, batch.positions + 1].long(), self._layers.combine(states), batch)

    def _go_on(self, slot: Ints, text: Ints, out: Tensor, state: Tensor, ahead: int) -> None:
        """Draw `ahead` tokens after each text. out, state: [R, H], from which the first is drawn and the next pass goes on."""
        assert self._passes is not None
        passes = self._passes
        ids = self._guess(out, slot, text)
        for i in range(1, ahead):
            end = np.minimum(text - 1 + i, passes.slots.length)  # beyond, no guess is asked for
            out, state = self._forward(ids, state, passes.build(rows(slot, 1, end, False), whole=True).batch)
            ids = self._guess(out, slot, text + i)
        self._guessed.note(slot, passes.read(slot, text, ahead))

    def _forward(self, ids: Tensor, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        layers = self._layers
        assert layers is not None
        embedded = (self._model.embed_tokens if layers.embed_tokens is None else layers.embed_tokens)(ids, PLAIN)
        out, state = layers(embedded, hidden, replace(batch, ids=ids))
        return out, state

    def _guess(self, out: Tensor, slot: Ints, end: Ints) -> Tensor:
        """Draw the tokens of `slot` [R] at positions `end` [R] from out [R, H]; they are written to the slots. -> [R] int64."""
        layers = self._layers
        assert layers is not None
        logits = (self._model.lm_head if layers.lm_head is None else layers.lm_head)(out, PLAIN)
        return self._draws.guess(logits, self._draws.rows(slot, end), self._ids).long()
