"""Heads with layers of their own: they guess from the model's states.

    position      0          1          2      ...    p
    state         h0         h1         h2            hp           the model's, at each of the step's tokens
    token         t1         t2         t3            tp+1         the next one: known, or drawn by this step
    head       (h0, t1)   (h1, t2)   (h2, t3)  ... (hp, tp+1)  ─►  tp+2

So a head runs when the step has drawn. What it has at a position depends on the token behind it: where a prefix is found whose
next token was another, the last key is that of the other text, and guesses may be a little worse. Then it goes on, a token at a
time, with what it gave itself instead of the model's state.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from quire.attn.batch import Batch
from quire.config.draft_heads import DraftHead
from quire.config.quantization import choose_quantization
from quire.device.base import Device
from quire.files.reading import reading
from quire.layers.attention import Attention
from quire.layers.embedding import Embedding, Head
from quire.layers.parameter import parameter
from quire.load.assign import Renames
from quire.load.load import load_weights
from quire.models.decoder import Decoder
from quire.runner.draft.ahead import Ahead
from quire.runner.draft.base import DeviceDrafter
from quire.runner.kv import KVBuffers
from quire.runner.slots import Slots
from quire.runner.transfer import upload
from quire.types.cache import CacheLayout
from quire.types.plan import Ints, StepPlan


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
        self.most, self.taps, self.whole = most, head.taps, not head.taps
        self._head, self._make, self._layout, self._group = head, make, layout, group
        self._load_format, self._seed = load_format, seed
        self._layers: HeadLayers | None = None
        self._kv: KVBuffers | None = None
        self._slots: Slots | None = None
        self._seen: tuple[Ints, Batch, list[Tensor]] | None = None

    def load(self, device: Device, dtype: torch.dtype, model: Decoder) -> None:
        facts = self._head.facts
        with reading(facts.files.path, f"its configuration makes no head of {self._head.method}"), torch.device("meta"):
            layers = self._make(self._head).eval()
        load_weights(
            layers, facts, device=device.torch_device, dtype=dtype, load_format=self._load_format, seed=self._seed,
            quantization=choose_quantization(None, facts.quantization, False),
        )  # fmt: skip
        self._layers, self._model, self._device, self._dtype = layers, model, device, dtype
        self._vocabulary = model.lm_head.total

    def allocate(self, pages: int, slots: Slots) -> None:
        assert self._layers is not None
        self._slots, self._seen = slots, None
        self._kv = KVBuffers(self._layout, self._head.facts.layers, pages, self._dtype, self._device.allocate)
        attentions = self._layers.attentions
        for layer, view, group in self._kv.views():
            attentions[layer].bind(view, group, dtype=self._dtype)

    def copy(self, source: Ints, target: Ints) -> None:
        if self._kv is not None:
            self._kv.copy(source, target)

    def close(self) -> None:
        self._layers = self._kv = self._slots = self._seen = None

    def see(self, plan: StepPlan, batch: Batch, states: list[Tensor]) -> None:
        own = replace(batch, groups=(batch.groups[self._group],), plans={}, kept=None, adapters=None)
        self._seen = np.repeat(plan.slot, plan.count), own, states

    def settle(self) -> None:
        self._run()

    def propose(self, slot: Tensor, length: Tensor, tokens: Tensor, hidden: Tensor, at: Tensor) -> Tensor:  # noqa: ARG002
        assert self._slots is not None
        ahead, (out, state) = Ahead(self._slots, self._group, slot), self._run()
        ids, state = self._guess(out[at]), state[at]
        guesses = [ids]
        for i in range(1, self.most):
            out, state = self._forward(ids, state, ahead.batch(ids, length - 2 + i))
            ids = self._guess(out)
            guesses.append(ids)
        return torch.stack(guesses, 1)

    def _run(self) -> tuple[Tensor, Tensor]:
        """What the model has run, each token's state with the token behind it."""
        assert self._seen is not None and self._slots is not None and self._layers is not None
        (slot, batch, states), self._seen = self._seen, None
        ids = self._slots.tokens[upload(slot.astype(np.int64), batch.ids.device), batch.positions + 1].long()
        return self._forward(ids, self._layers.combine(states), batch)

    def _forward(self, ids: Tensor, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        layers = self._layers
        assert layers is not None
        embedded = (self._model.embed_tokens if layers.embed_tokens is None else layers.embed_tokens)(ids)
        out, state = layers(embedded, hidden, replace(batch, ids=ids))
        return out, state

    def _guess(self, out: Tensor) -> Tensor:
        """[R, H] -> [R] int64, of the model's vocabulary whatever the files say."""
        layers = self._layers
        assert layers is not None
        ids = (self._model.lm_head if layers.lm_head is None else layers.lm_head)(out).argmax(-1)
        if layers.d2t is not None:
            ids = ids + layers.d2t[ids]
        guess: Tensor = ids.clamp(0, self._vocabulary - 1)
        return guess
