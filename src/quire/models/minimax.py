"""MiniMax: lightning attention and softmax attention in turn, experts, and residual connections from the normalized input."""

from typing import TYPE_CHECKING

from torch import Tensor, nn

from quire.attn.batch import Batch
from quire.layers.moe import MoE
from quire.layers.norm import Norm, RMSNorm
from quire.layers.recurrent import LightningAttention
from quire.models.hybrid import HybridDecoder
from quire.models.llama import Mixtral, local_experts

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts

Factors = tuple[float, float]  # of the residual stream, and of the output of attention or feed-forward


class PostNormedBlock(nn.Module):
    """A block whose residual stream is the normalized input; `factors` of attention and of the feed-forward."""

    def __init__(
        self, norm: Norm, mixer: nn.Module, feed_norm: Norm, feed_forward: nn.Module, factors: tuple[Factors, Factors]
    ) -> None:
        super().__init__()
        self.norm, self.mixer, self.feed_norm, self.feed_forward, self.factors = norm, mixer, feed_norm, feed_forward, factors

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        (past, given), (feed_past, feed_given) = self.factors
        x, _ = self.norm.add(x, residual)
        x, _ = self.feed_norm.add(self.mixer(x, batch) * given, x * past)
        return self.feed_forward(x, batch.tokens) * feed_given, x * feed_past


class MiniMax(HybridDecoder):
    renames = (
        *Mixtral.renames,
        (r"\.mlp\.", ".feed_forward."),
        (r"\.self_attn\.", ".mixer."),
        (r"\.input_layernorm\.", ".norm."),
        (r"\.post_attention_layernorm\.", ".feed_norm."),
        (r"\.(slope_rate|query_decay|key_decay|diagonal_decay)$", None),
    )

    def make_norm(self, facts: "ModelFacts", size: int | None = None) -> Norm:
        return RMSNorm(size or facts.hidden_size, facts.hf.get("rms_norm_eps", 1e-5))

    def make_block(self, facts: "ModelFacts", index: int) -> nn.Module:
        attends = facts.kinds[index] == "attention"
        mixer = self.make_attention(facts, index) if attends else self.make_mixer(facts, index)
        kind = "full_attn" if attends else "linear_attn"
        names = (f"{kind}_alpha_factor", f"{kind}_beta_factor"), ("mlp_alpha_factor", "mlp_beta_factor")
        mixed, fed = ((float(facts.hf.get(past, 1)), float(facts.hf.get(given, 1))) for past, given in names)
        return PostNormedBlock(self.make_norm(facts), mixer, self.make_norm(facts), self.make_mlp(facts, index), (mixed, fed))

    def make_mixer(self, facts: "ModelFacts", index: int) -> nn.Module:
        heads, size = facts.hf["num_attention_heads"], facts.states[0].state[1]
        depth = index / (len(facts.kinds) - 1 + 1e-5)
        return LightningAttention(facts.hidden_size, heads, size, depth)

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        return local_experts(MoE, facts, renormalize=True)
