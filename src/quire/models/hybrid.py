"""Decoders with recurrent layers.

`facts.layers` has the attention layers, `facts.states` the recurrent ones, and `facts.kinds` the kind of every layer.
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from quire.attn.batch import Batch
from quire.config.layer_patterns import mamba2_sizes
from quire.layers.attention import SelfAttention, take_final
from quire.layers.mamba import Mamba2, Mamba2Shape
from quire.layers.norm import Norm
from quire.layers.recurrent import GatedNorm
from quire.models.decoder import Decoder

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts


def make_mamba2(facts: "ModelFacts", eps: float, **options: Any) -> Mamba2:
    """Return a Mamba 2 mixer with a grouped norm after its gate."""
    shape = Mamba2Shape(*mamba2_sizes(facts.hf))
    return Mamba2(facts.hidden_size, shape, GatedNorm(shape.division, eps), **options)


class MixerBlock(nn.Module):
    """Norm, mixer, norm, feed-forward; the mixer is attention or recurrent."""

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
    """Norm and mixer. `feeds`: the mixer is a feed-forward layer."""

    def __init__(self, norm: Norm, mixer: nn.Module, feeds: bool = False) -> None:
        super().__init__()
        self.norm, self.mixer, self.feeds = norm, mixer, feeds

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        x, residual = self.norm.add(x, residual)
        return self.mixer(x, batch.tokens) if self.feeds else self.mixer(x, batch), residual


class HybridDecoder(Decoder):
    """A decoder whose recurrent layers come from `make_mixer`."""

    def count_blocks(self, facts: "ModelFacts") -> int:
        return len(facts.kinds)

    def run_blocks(self, x: Tensor, batch: Batch) -> Tensor:
        """Run all tokens through all layers: a recurrent layer's final tokens depend on the ones before."""
        residual = None
        for block in self.layers:
            x, residual = block(x, residual, batch)
        return self.norm.add(take_final(x, batch), None if residual is None else take_final(residual, batch))[0]

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
        """Return the attention of layer `index`; `differences` override arguments of SelfAttention."""
        among = sum(kind in ("attention", "both") for kind in facts.kinds[:index])
        options = {"heads": facts.hf["num_attention_heads"], **differences}
        if "rope" not in options:
            options["rope"] = self.rope(facts, among)
        return kind(facts.hidden_size, cache=facts.layers[among], **options)
