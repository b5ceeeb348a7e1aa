"""MTP layers: a checkpoint's own layer behind the last drafts, from the model's final state and the next token's embedding.

model.layers.N   enorm, hnorm, eh_proj   then a layer as the model's are   then shared_head.norm, shared_head.head
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from quire.attn.batch import Batch
from quire.config.draft_heads import DraftHead
from quire.layers.linear import Linear
from quire.models.registry import build_model
from quire.runner.draft.head import HeadLayers


class MTPLayers(HeadLayers):
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
