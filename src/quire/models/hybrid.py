"""Decoders some of whose layers are recurrent: what they have beside `Decoder`'s.

`facts.layers` has the attention layers, `facts.states` the recurrent ones, `facts.kinds` says which of a model's is which.
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from quire.attn.batch import Batch
from quire.config.recurrent import mamba2_sizes
from quire.layers.attention import SelfAttention, keep
from quire.layers.mamba import Mamba2, Mamba2Shape
from quire.layers.norm import Norm
from quire.layers.recurrent import GatedNorm
from quire.models.decoder import Decoder

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts


def make_mamba2(facts: "ModelFacts", eps: float, **options: Any) -> Mamba2:
    """With a norm behind its gate, by groups."""
    shape = Mamba2Shape(*mamba2_sizes(facts.hf))
    return Mamba2(facts.hidden_size, shape, GatedNorm(shape.inner, eps, groups=shape.groups), **options)


class MixerBlock(nn.Module):
    """norm, mixer, norm, feed-forward, by names of a family's own: the mixer is attention or recurrent."""

    def __init__(self, norm: Norm, mixer: nn.Module, feed_norm: Norm, feed_forward: nn.Module, scale: float = 1.0) -> None:
        super().__init__()
        self.norm, self.mixer, self.feed_norm, self.feed_forward, self.scale = norm, mixer, feed_norm, feed_forward, scale

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        x, residual = self.norm.add(x, residual)
        x, residual = self.feed_norm.add(self._scaled(self.mixer(x, batch)), residual)
        return self._scaled(self.feed_forward(x, batch.tokens)), residual

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.scale == 1.0 else x * self.scale


class OneMixerBlock(nn.Module):
    """norm, mixer; `feeds`: what mixes is a feed-forward part, which looks at every token by itself."""

    def __init__(self, norm: Norm, mixer: nn.Module, feeds: bool = False) -> None:
        super().__init__()
        self.norm, self.mixer, self.feeds = norm, mixer, feeds

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        x, residual = self.norm.add(x, residual)
        return self.mixer(x, batch.tokens) if self.feeds else self.mixer(x, batch), residual


class HybridDecoder(Decoder):
    """A family says in `make_mixer` what its recurrent layers are."""

    def count_blocks(self, facts: "ModelFacts") -> int:
        return len(facts.kinds)

    def run_blocks(self, x: Tensor, batch: Batch) -> Tensor:
        """All tokens go through all layers: what a recurrent one makes of the last depends on those before."""
        residual = None
        for block in self.layers:
            x, residual = block(x, residual, batch)
        return self.norm.add(keep(x, batch), None if residual is None else keep(residual, batch))[0]

    def make_block(self, facts: "ModelFacts", index: int) -> nn.Module:
        mixer = self.make_attention(facts, index) if facts.kinds[index] == "attention" else self.make_mixer(facts, index)
        return MixerBlock(self.make_norm(facts), mixer, self.make_norm(facts), self.make_mlp(facts, index))

    def make_attention(self, facts: "ModelFacts", index: int) -> SelfAttention:
        return self.attend(facts, index)

    def make_mixer(self, facts: "ModelFacts", index: int) -> nn.Module:
        raise NotImplementedError

    def attend(
        self, facts: "ModelFacts", index: int, kind: type[SelfAttention] = SelfAttention, **differences: Any
    ) -> SelfAttention:
        """Layer `index`'s attention."""
        among = sum(kind in ("attention", "both") for kind in facts.kinds[:index])
        options = {"heads": facts.hf["num_attention_heads"], **differences}
        if "rope" not in options:
            options["rope"] = self.rope(facts, among)
        return kind(facts.hidden_size, cache=facts.layers[among], **options)
