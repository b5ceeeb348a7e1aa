"""Draft heads: EAGLE, EAGLE-2, EAGLE-3 and MTP (layers of their own), and Medusa. They draft from the target's hidden states.

    position      0          1          2      ...    p
    state         h0         h1         h2            hp           of the target model, at each of the step's tokens
    token         t1         t2         t3            tp+1         the next one: known, or sampled by this step
    head       (h0, t1)   (h1, t2)   (h2, t3)  ... (hp, tp+1)  ─►  tp+2

A head runs when the step has sampled, over the step's tokens that were accepted. What it caches at a position depends on the
next token: after a prefix hit whose next token differed, the last cached key belongs to the other text, and drafts may be
slightly worse. It then continues one token at a time, with its own output in place of the target model's state.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.attn.batch import PLAIN, Batch
from quire.config.draft_heads import DraftHead
from quire.config.quantization import choose_quantization
from quire.config.speculative import EAGLE, EAGLE3, MTP
from quire.device.base import Device, Recorder
from quire.features.speculation.device.drafter import DeviceDrafter, Passes, RanStep, read_guesses, rows
from quire.files.reading import reading
from quire.layers.attention import Attention
from quire.layers.embedding import Embedding, Head
from quire.layers.linear import Linear
from quire.layers.norm import NoNorm
from quire.layers.parameter import Role, parameter
from quire.load.assign import Renames
from quire.load.load import load_weights
from quire.models.blocks import Block
from quire.models.decoder import Decoder
from quire.models.llama import Llama, Qwen2, Qwen3
from quire.models.registry import build_model
from quire.runner.core import KVBuffers
from quire.runner.sampler.pipeline import Sampler
from quire.runner.slots import Slots
from quire.runner.transfer import upload
from quire.types.cache import CacheLayout
from quire.types.plan import Ints, StepPlan, spans


class HeadLayers(nn.Module):
    """The layers of a head. What its checkpoint lacks (embedding, LM head) is the target model's."""

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
        """Return the input [T, H] of the first pass, from the target model's states [T, H]."""
        return states[0]

    def forward(self, embedded: Tensor, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return [T, H] for the logits, and [T, H] in place of the target model's state for the next pass."""
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
        """layout: of its layers, all of one group. group: the target model's, whose tables it shares."""
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
        if layers.d2t is not None:  # clamped: a corrupt file must not index out of the vocabulary
            own = torch.arange(layers.draft_vocabulary, device=device.torch_device)
            self._ids = (own + layers.d2t).clamp(0, model.lm_head.total - 1)

    def allocate(self, pages: int, slots: Slots, sampler: Sampler, room: int, recorder: Recorder | None) -> None:
        assert self._layers is not None
        super().allocate(pages, slots, sampler, room, recorder)
        self._passes = Passes(slots, self._group)
        self._kv = self.moved = KVBuffers(self._layout, self._head.facts.layers, pages, self._dtype, self._device.allocate)
        attentions = self._layers.attentions
        for layer, view, group in self._kv.views():
            attentions[layer].bind(view, group, dtype=self._dtype)

    def take_in(self, plan: StepPlan) -> None:
        if self._kv is not None:
            self._kv.copy(plan.copy_from, plan.copy_to)

    def close(self) -> None:
        self._layers = self._kv = self.moved = self._passes = None

    def follow(self, ran: RanStep) -> None:
        plan, sampled, next_drafts = ran.plan, ran.sampled, min(ran.plan.next_drafts, self.most)
        known = plan.count - plan.drafts
        count = np.where(plan.sample, known + np.maximum(ran.lengths, 1) - 1, plan.count)  # accepted tokens
        out, state = self._take_states(ran, count)
        if not next_drafts or not len(sampled):
            return
        if len(sampled) < len(out):
            last = upload((np.cumsum(count) - 1)[sampled].astype(np.int64), out.device)
            out, state = out[last], state[last]
        self._go_on(plan.slot[sampled], ran.text[sampled], out, state, next_drafts)

    def _take_states(self, ran: RanStep, count: Ints) -> tuple[Tensor, Tensor]:
        """Run each token's state with the next token, for the first count[r] tokens of each row."""
        assert self._passes is not None and self._layers is not None
        plan, slots, states = ran.plan, self._passes.slots, ran.states
        if (count < plan.count).any():
            index = upload(spans(np.cumsum(plan.count) - plan.count, count).astype(np.int64), slots.device)
            states = [state[index] for state in states]
        batch = self._passes.build(rows(plan.slot, count, plan.end - plan.count + count, False), whole=True).batch
        slot = upload(np.repeat(plan.slot, count).astype(np.int64), slots.device)
        return self._forward(slots.tokens[slot, batch.positions + 1].long(), self._layers.combine(states), batch)

    def _go_on(self, slot: Ints, text: Ints, out: Tensor, state: Tensor, next_drafts: int) -> None:
        """Sample `next_drafts` tokens after each text. out, state: [R, H], from which the first token comes."""
        assert self._passes is not None
        passes = self._passes
        ids = self._guess(out, slot, text)
        for i in range(1, next_drafts):
            end = np.minimum(text - 1 + i, passes.slots.length)  # no draft beyond is used
            out, state = self._forward(ids, state, passes.build(rows(slot, 1, end, False), whole=True).batch)
            ids = self._guess(out, slot, text + i)
        self._guessed.note(slot, passes.read(slot, text, next_drafts))

    def _forward(self, ids: Tensor, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        layers = self._layers
        assert layers is not None
        embedded = (self._model.embed_tokens if layers.embed_tokens is None else layers.embed_tokens)(ids, PLAIN)
        out, state = layers(embedded, hidden, replace(batch, ids=ids))
        return out, state

    def _guess(self, out: Tensor, slot: Ints, end: Ints) -> Tensor:
        """Return the tokens [R] int64 of `slot` [R] at positions `end` [R], sampled from out [R, H] and written to slots."""
        layers = self._layers
        assert layers is not None
        logits = (self._model.lm_head if layers.lm_head is None else layers.lm_head)(out, PLAIN)
        return self._draft_sampler.guess(logits, self._draft_sampler.rows(slot, end), self._ids).long()


# ---- EAGLE ------------------------------------------------------------------------------------------------------------------


def layer_maker(head: DraftHead) -> Decoder:
    """Return a model with the head's kind of layers, recognized by its tensor names."""
    if head.has("q_norm.weight"):
        return Qwen3(head.facts)
    return Qwen2(head.facts) if head.has("q_proj.bias") and not head.has("o_proj.bias") else Llama(head.facts)


class EagleLayers(HeadLayers):
    """EAGLE and EAGLE-2: Llama layers over the next token's embedding and the target model's last state.

    The first layer has no norm before it and the last none after it; the target model's LM head makes the logits.
    """

    renames = ((r"^model\.", ""), (r"^(t2d|rotary_emb|layers\.\d+\.self_attn\.rotary_emb)", None))

    def __init__(self, head: DraftHead) -> None:
        facts = head.facts
        super().__init__(head, facts.hidden_size)
        maker, size = layer_maker(head), facts.hidden_size
        self.fc = Linear(2 * size, size, bias=head.has("fc.bias"))
        first = NoNorm() if not head.has("layers.0.input_layernorm.weight") else maker.make_norm(facts)
        self.layers = nn.ModuleList(
            Block(
                maker.make_norm(facts) if index else first,
                maker.make_attention(facts, index),
                maker.make_norm(facts),
                maker.make_mlp(facts, index),
            )
            for index in range(len(facts.layers))
        )

    def forward(self, embedded: Tensor, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        x, residual = self.fc(torch.cat((embedded, hidden), -1), batch.tokens), None
        for block in self.layers:
            x, residual = block(x, residual, batch)
        out = x if residual is None else x + residual
        return out, out


# ---- EAGLE-3 ----------------------------------------------------------------------------------------------------------------


class FirstLayer(nn.Module):
    def __init__(self, head: DraftHead, maker: Decoder) -> None:
        super().__init__()
        facts = head.facts
        self.input_layernorm, self.hidden_norm = maker.make_norm(facts), maker.make_norm(facts)
        attention = maker.make_attention(replace(facts, hidden_size=2 * facts.hidden_size), 0)
        out = attention.o_proj
        attention.o_proj = Linear(out.all_inputs, facts.hidden_size, bias=out.biased, role=Role.ROW, cuts=out.cuts)
        self.self_attn = attention
        self.post_attention_layernorm, self.mlp = maker.make_norm(facts), maker.make_mlp(facts, 0)
        self.norm_before_residual = bool(facts.hf.get("norm_before_residual"))

    def forward(self, embedded: Tensor, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        normed = self.hidden_norm(hidden)
        x = self.self_attn(torch.cat((self.input_layernorm(embedded), normed), -1), batch)
        x, residual = self.post_attention_layernorm.add(x, normed if self.norm_before_residual else hidden)
        return self.mlp(x, self.self_attn.tokens_after(batch)), residual


class Eagle3Layers(HeadLayers):
    """EAGLE-3: the inputs of several target layers become one state, and the first layer attends over it and the next token's
    embedding. It may have a smaller vocabulary of its own."""

    renames = (
        (r"^model\.", ""),
        (r"^(t2d|mask_hidden|rotary_emb|(midlayer|layers\.\d+)\.self_attn\.rotary_emb)", None),
        (r"^midlayer\.", "layers.0."),
    )

    def __init__(self, head: DraftHead) -> None:
        facts, hf = head.facts, head.facts.hf
        super().__init__(head, facts.hidden_size)
        maker, count = layer_maker(head), len(head.taps)
        states = int(hf.get("target_hidden_size") or facts.hidden_size)
        self.fc = Linear(count * states, facts.hidden_size, bias=head.has("fc.bias"))
        self.input_norm = maker.make_norm(facts, count * states) if head.has("input_norm.weight") else None
        each = range(count) if head.has("fc_norm.0.weight") else ()
        norms: list[Any] = [maker.make_norm(facts, states) for _ in each]
        self.fc_norm = nn.ModuleList(norms)
        more = [maker.make_block(facts, index) for index in range(1, len(facts.layers))]
        self.layers = nn.ModuleList([FirstLayer(head, maker), *more])
        self.norm = maker.make_norm(facts)
        self.norm_output = bool(hf.get("norm_output"))

    def combine(self, states: list[Tensor]) -> Tensor:
        if self.fc_norm:
            states = [norm(state) for norm, state in zip(self.fc_norm, states, strict=True)]
        x = torch.cat(states, -1)
        return self.fc(x if self.input_norm is None else self.input_norm(x), PLAIN)

    def forward(self, embedded: Tensor, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        x, residual = self.layers[0](embedded, hidden, batch)
        for block in self.layers[1:]:
            x, residual = block(x, residual, batch)
        normed, total = self.norm.add(x, residual)
        return normed, normed if self.norm_output else total


# ---- MTP --------------------------------------------------------------------------------------------------------------------


class MTPLayers(HeadLayers):
    """MTP: the checkpoint's own extra layer drafts from the final state and the next token's embedding.

    model.layers.N   enorm, hnorm, eh_proj, then a layer as the model's, then shared_head.norm, shared_head.head
    """

    def __init__(self, head: DraftHead) -> None:
        facts = head.facts
        super().__init__(head, facts.hidden_size)
        count = int(facts.hf["num_hidden_layers"])
        alone = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "mlp_layer_types": None, "num_nextn_predict_layers": 0}
        model = build_model(replace(facts, hf={**facts.hf, **alone}), "quire")
        size, here = facts.hidden_size, rf"^model\.layers\.{count}\."
        self.renames = (
            (rf"^(?!model\.layers\.{count}\.)|rotary_emb\.inv_freq$", None),
            (rf"{here}shared_head\.norm\.", "norm."),
            (rf"{here}shared_head\.head\.", "lm_head."),
            (rf"{here}(enorm|hnorm|eh_proj|embed_tokens)\.", r"\1."),
            (here, "layers.0."),
            *((pattern, to) for pattern, to in model.renames if to is not None),
        )
        self.enorm, self.hnorm = model.make_norm(facts), model.make_norm(facts)
        self.eh_proj = Linear(2 * size, size)
        self.layers = nn.ModuleList(model.layers[:1])
        self.norm = model.make_norm(facts)

    def forward(self, embedded: Tensor, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        embedded = embedded.masked_fill((batch.positions == 0)[:, None], 0.0)  # as such layers were trained
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1), batch.tokens)
        x, residual = self.layers[0](x, None, batch)
        out: Tensor = self.norm.add(x, residual)[0]
        return out, out


LAYERS: Mapping[str, Callable[[DraftHead], HeadLayers]] = {EAGLE: EagleLayers, EAGLE3: Eagle3Layers, MTP: MTPLayers}


# ---- Medusa: head i drafts the token i + 1 positions ahead, all from the state from which the last token was sampled


class MedusaHead(nn.Module):
    def __init__(self, size: int, layers: int, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Linear(size, size, bias=bias) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x, PLAIN))
        return x


class MedusaHeads(nn.Module):
    """Heads have an LM head each, or share one, or use the target model's."""

    def __init__(self, head: DraftHead, count: int) -> None:
        super().__init__()
        facts, hf = head.facts, head.facts.hf
        layers = int(hf.get("medusa_num_layers") or hf.get("num_hidden_layers") or 1)
        self.renames: Renames = (
            (r"^medusa_heads?\.", ""),
            (r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2."),
            (rf"^(\d+)\.{layers}\.weight$", r"lm_heads.\1.weight"),
            (rf"^(blocks|lm_heads)\.(?!({'|'.join(map(str, range(count)))})\.)", None),  # heads that are not used
        )
        vocabulary = int(hf.get("truncated_vocab_size") or facts.vocab_size)
        self.blocks = nn.ModuleList(MedusaHead(facts.hidden_size, layers, head.has(".bias")) for _ in range(count))
        own = head.has(f".{layers}.weight") or any("lm_heads." in name for name in head.names)
        shared = not own and head.has("lm_head.weight")
        self.lm_heads = nn.ModuleList(Head(vocabulary, facts.hidden_size) for _ in range(count if own else 0))
        self.lm_head = Head(vocabulary, facts.hidden_size) if shared else None
        self.token_map = parameter(vocabulary, dtype=torch.int64) if head.has("token_map") else None


class Medusa(DeviceDrafter):
    def __init__(self, head: DraftHead, most: int, load_format: str, seed: int) -> None:
        self.most, self.reads = most, True
        self._head, self._load_format, self._seed = head, load_format, seed
        self._heads: MedusaHeads | None = None

    def load(self, device: Device, dtype: torch.dtype, model: Decoder) -> None:
        with reading(self._head.facts.files.path, "its configuration makes no Medusa heads"), torch.device("meta"):
            heads = MedusaHeads(self._head, self.most).eval()
        load_weights(
            heads, self._head.facts, device=device.torch_device, dtype=dtype, load_format=self._load_format, seed=self._seed
        )
        self._heads, self._model = heads, model
        self._ids = None if heads.token_map is None else heads.token_map.clamp(0, model.lm_head.total - 1)

    def allocate(self, pages: int, slots: Slots, sampler: Sampler, room: int, recorder: Recorder | None) -> None:
        super().allocate(pages, slots, sampler, room, recorder)
        self._slots: Slots | None = slots

    def close(self) -> None:
        self._heads = self._slots = None

    def follow(self, ran: RanStep) -> None:
        plan, sampled, next_drafts = ran.plan, ran.sampled, min(ran.plan.next_drafts, self.most)
        if not next_drafts or not len(sampled):
            return
        assert self._slots is not None and ran.sampled_from is not None
        last = np.searchsorted(plan.sample_row, sampled) + ran.lengths[sampled] - 1
        slot, text = plan.slot[sampled], ran.text[sampled]
        self._propose(ran.sampled_from[upload(last.astype(np.int64), ran.sampled_from.device)], slot, text, next_drafts)
        self._guessed.note(slot, read_guesses(self._slots, slot, text, next_drafts))

    def _propose(self, hidden: Tensor, slot: Ints, text: Ints, next_drafts: int) -> None:
        """Write `next_drafts` tokens after each text [R], sampled from hidden [R, H]."""
        heads = self._heads
        assert heads is not None
        for i, block in enumerate(heads.blocks[:next_drafts]):
            lm_head = heads.lm_heads[i] if heads.lm_heads else heads.lm_head or self._model.lm_head
            self._draft_sampler.guess(lm_head(block(hidden), PLAIN), self._draft_sampler.rows(slot, text + i), self._ids)
