"""CLIP and SigLIP image encoders."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from quire.features.media.families.fields import VisionConfig
from quire.features.media.towers.parts import Part, PatchEmbedding, VisionLayer
from quire.layers.norm import LayerNorm
from quire.layers.parameter import parameter

# what a tower does not read of its encoder: position ids are counted, pooled outputs are for other tasks
UNREAD = (r"\.position_ids$", None), (r"^vision_tower\.head\.", None)
PREFIXES = (r"^model\.", ""), (r"^vision_tower\.vision_model\.", "vision_tower.")
Renames = tuple[tuple[str, str | None], ...]


def tower_renames(others: Sequence[str] = ("multi_modal_projector",)) -> Renames:
    """Return renames for checkpoints with `vision_tower` and these other parts, old (`vision_tower.vision_model...`) and new
    (`model.vision_tower...`).
    """
    parts = "|".join(("vision_tower", *others))
    return ((rf"^(?!(model\.)?({parts})(\.|$))", None), *PREFIXES, *UNREAD)


class Positions(nn.Module):
    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.weight = parameter(count, width)


class Embeddings(Part):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        clip = bool(config.class_tokens)
        self.patch_embedding = PatchEmbedding(config.channels, config.patch_size, config.width, bias=not clip)
        self.class_embedding = parameter(config.width) if clip else None
        self.position_embedding = Positions(config.side**2 + config.class_tokens, config.width)

    def forward(self, pixels: Tensor, order: Tensor | None = None) -> Tensor:
        x = self.patch_embedding(pixels).flatten(1, 2)
        if self.class_embedding is not None:
            x = torch.cat([self.class_embedding.expand(len(x), 1, -1), x], dim=1)
        table = self.position_embedding.weight
        return x + (table if order is None else table[order])


class Encoder(nn.Module):
    def __init__(self, config: VisionConfig, layers: int) -> None:
        super().__init__()
        sizes = config.width, config.inner, config.heads, config.activation, config.eps
        self.layers = nn.ModuleList(VisionLayer(*sizes) for _ in range(layers))


class VisionEncoder(Part):
    """states: hidden states to return side by side, 0 is the first layer's input; None: the last, normalized.

    Layers beyond the highest state are not built; `renames` drop their weights.
    """

    def __init__(self, config: VisionConfig, states: Sequence[int] | None = None) -> None:
        super().__init__()
        self.states = states
        built = config.layers if states is None else max(states)
        self.embeddings = Embeddings(config)
        self.pre_layrnorm = LayerNorm(config.width, config.eps) if config.class_tokens else None
        self.encoder = Encoder(config, built)
        self.post_layernorm = LayerNorm(config.width, config.eps) if states is None else None
        above = "|".join(map(str, range(built, config.layers)))
        self.renames: Renames = ((rf"^vision_tower\.encoder\.layers\.({above})\.", None),) if above else ()
        if states is not None:
            self.renames += ((r"^vision_tower\.post_layernorm\.", None),)

    def forward(self, pixels: Tensor, order: Tensor | None = None) -> Tensor:
        """pixels [images, channels, height, width] -> [images, tokens, states * width].

        order: index of each patch's position embedding; None: they are in order.
        """
        x = self.embeddings(pixels, order)
        if self.pre_layrnorm is not None:
            x = self.pre_layrnorm(x)
        kept = [x]
        for layer in self.encoder.layers:
            x = layer(x)
            kept.append(x)
        if self.states is None:
            return x if self.post_layernorm is None else self.post_layernorm(x)
        return torch.cat([kept[state] for state in self.states], dim=-1)
