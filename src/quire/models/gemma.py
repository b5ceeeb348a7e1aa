"""Gemma: scaled embeddings, norms whose weight is an offset from one, a feed-forward with a GELU gate.

Gemma 2 also normalizes the outputs of attention and feed-forward and caps its logits. Gemma 3 normalizes queries and keys;
layers with a window have another RoPE base than those without.
"""

import logging
from typing import TYPE_CHECKING, Any

from torch import nn

from quire.layers.attention import SelfAttention
from quire.layers.embedding import Embedding, Head
from quire.layers.mlp import GatedMLP
from quire.layers.norm import Norm, RMSNorm
from quire.models.blocks import SandwichBlock
from quire.models.decoder import Decoder
from quire.types.errors import ModelError

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts

logger = logging.getLogger(__name__)


class Gemma(Decoder):
    tied = True

    def __init__(self, facts: "ModelFacts") -> None:
        if facts.architecture == "PaliGemmaForConditionalGeneration":
            logger.warning(
                "prompts without images are causal; this model was trained with images and bidirectional attention in prompts"
            )
        # "vision": bidirectional within images only
        elif facts.hf.get("use_bidirectional_attention") not in (None, False, "vision"):
            raise ModelError("use_bidirectional_attention is not supported; only causal models are served")
        super().__init__(facts)

    def make_embedding(self, facts: "ModelFacts") -> Embedding:
        return Embedding(facts.vocab_size, facts.hidden_size, scale=facts.hidden_size**0.5)

    def make_norm(self, facts: "ModelFacts", size: int | None = None) -> Norm:
        return RMSNorm(size or facts.hidden_size, facts.hf.get("rms_norm_eps", 1e-6), offset=1.0)

    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        return self.attention(facts, index, **self.differences(facts, index))

    def differences(self, facts: "ModelFacts", index: int) -> dict[str, Any]:  # noqa: ARG002
        bias = bool(facts.hf.get("attention_bias"))
        return {"bias": bias, "out_bias": bias}

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        activation = facts.hf.get("hidden_activation") or "gelu_pytorch_tanh"  # an old hidden_act of "gelu" also means this one
        return GatedMLP(facts.hidden_size, facts.hf["intermediate_size"], activation)


class Gemma2(Gemma):
    def make_block(self, facts: "ModelFacts", index: int) -> nn.Module:
        first, second, third, fourth = (self.make_norm(facts) for _ in range(4))
        return SandwichBlock((first, second, third, fourth), self.make_attention(facts, index), self.make_mlp(facts, index))

    def differences(self, facts: "ModelFacts", index: int) -> dict[str, Any]:
        scale, soft_cap = facts.hf["query_pre_attn_scalar"] ** -0.5, facts.hf.get("attn_logit_softcapping")
        return super().differences(facts, index) | {"scale": scale, "soft_cap": soft_cap}

    def make_head(self, facts: "ModelFacts") -> Head:
        tied = self.embed_tokens if facts.hf.get("tie_word_embeddings", self.tied) else None
        return Head(facts.vocab_size, facts.hidden_size, tied=tied, soft_cap=facts.hf.get("final_logit_softcapping"))


class VaultGemma(Gemma2):
    """Gemma 2 in Llama's block."""

    renames = (*Gemma2.renames, (r"\.pre_feedforward_layernorm\.", ".post_attention_layernorm."))

    def make_block(self, facts: "ModelFacts", index: int) -> nn.Module:
        return Decoder.make_block(self, facts, index)


class Gemma3(Gemma2):
    def differences(self, facts: "ModelFacts", index: int) -> dict[str, Any]:
        cache = facts.layers[index]
        return super().differences(facts, index) | {
            "rope": self.rope(facts, index, "full_attention" if cache.window is None else "sliding_attention"),
            "q_norm": self.make_norm(facts, cache.head_dim),
            "k_norm": self.make_norm(facts, cache.head_dim),
            "soft_cap": None,
        }
