"""Medusa heads: head i drafts the token i + 1 positions ahead, all from the state from which the last token was drawn."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.attn.batch import PLAIN
from quire.config.draft_heads import DraftHead
from quire.device.base import Device, Recorder
from quire.features.speculation.device.drafter import DeviceDrafter, RanStep, read_guesses
from quire.files.reading import reading
from quire.layers.embedding import Head
from quire.layers.linear import Linear
from quire.layers.parameter import parameter
from quire.load.assign import Renames
from quire.load.load import load_weights
from quire.models.decoder import Decoder
from quire.runner.sampler.pipeline import Sampler
from quire.runner.slots import Slots
from quire.runner.transfer import upload
from quire.types.plan import Ints


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
        plan, drew, ahead = ran.plan, ran.drew, min(ran.plan.ahead, self.most)
        if not ahead or not len(drew):
            return
        assert self._slots is not None and ran.drawn_from is not None
        last = np.searchsorted(plan.draw_row, drew) + ran.lengths[drew] - 1
        slot, text = plan.slot[drew], ran.text[drew]
        self._propose(ran.drawn_from[upload(last.astype(np.int64), ran.drawn_from.device)], slot, text, ahead)
        self._guessed.note(slot, read_guesses(self._slots, slot, text, ahead))

    def _propose(self, hidden: Tensor, slot: Ints, text: Ints, ahead: int) -> None:
        """Write `ahead` tokens after each text [R], drawn from hidden [R, H]."""
        heads = self._heads
        assert heads is not None
        for i, block in enumerate(heads.blocks[:ahead]):
            lm_head = heads.lm_heads[i] if heads.lm_heads else heads.lm_head or self._model.lm_head
            self._draws.guess(lm_head(block(hidden), PLAIN), self._draws.rows(slot, text + i), self._ids)
