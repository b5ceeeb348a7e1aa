"""EAGLE and EAGLE-2 heads: Llama layers over the next token's embedding and the model's last state. There is no norm before the
first layer, and none behind the last; logits are made by the model's own head."""

import torch
from torch import Tensor, nn

from quire.attn.batch import Batch
from quire.config.draft_heads import DraftHead
from quire.layers.linear import Linear
from quire.layers.norm import NoNorm
from quire.models.decoder import Block, Decoder
from quire.models.llama import Llama, Qwen2, Qwen3
from quire.runner.draft.head import HeadLayers


def layer_maker(head: DraftHead) -> Decoder:
    """Whose layers the head's are: what the tensors are called tells."""
    if head.has("q_norm.weight"):
        return Qwen3(head.facts)
    return Qwen2(head.facts) if head.has("q_proj.bias") and not head.has("o_proj.bias") else Llama(head.facts)


class EagleLayers(HeadLayers):
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
