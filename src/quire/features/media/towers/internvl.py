"""The encoder of InternVL 3 and its projection: squares of neighbouring patches become one embedding."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.features.media.families.fields import choice_field, feature_layers, text_width
from quire.features.media.families.internvl import InternVL
from quire.features.media.towers.base import Tower
from quire.features.media.towers.llava import Projector
from quire.features.media.towers.parts import PatchEmbedding, VisionMLP, by_shape, project
from quire.features.media.towers.vit import tower_renames
from quire.layers.linear import Linear, MergedLinear
from quire.layers.norm import LayerNorm, Norm, RMSNorm
from quire.layers.parameter import parameter
from quire.types.errors import ModelError
from quire.types.media import Modality

QK_EPSILON, PROJECTOR_EPSILON = 1e-6, 1e-5


def make_norm(vision: Mapping[str, Any]) -> Norm:
    kind = choice_field(vision, "norm_type", ("layer_norm", "rms_norm"), "layer_norm")
    return (LayerNorm if kind == "layer_norm" else RMSNorm)(vision["hidden_size"], vision["layer_norm_eps"])


class Attention(nn.Module):
    def __init__(self, vision: Mapping[str, Any]) -> None:
        super().__init__()
        width, self.heads = vision["hidden_size"], vision["num_attention_heads"]
        if width % self.heads:
            raise ModelError(f"vision_config: {self.heads} heads must divide hidden_size; got {width}")
        names = dict.fromkeys(("q_proj", "k_proj", "v_proj"), width)
        self.qkv = MergedLinear(width, names, bias=bool(vision["attention_bias"]))
        normed = bool(vision["use_qk_norm"])
        self.q_norm, self.k_norm = (RMSNorm(width, QK_EPSILON) if normed else nn.Identity() for _ in range(2))
        self.projection_layer = Linear(width, width, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """x [tiles, tokens, width]."""
        query, key, value = project(self.qkv, x).chunk(3, dim=-1)
        heads = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.q_norm(query), self.k_norm(key), value))
        out = F.scaled_dot_product_attention(*heads)
        return project(self.projection_layer, out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, vision: Mapping[str, Any]) -> None:
        super().__init__()
        width = vision["hidden_size"]
        self.attention, self.mlp = Attention(vision), VisionMLP(width, vision["intermediate_size"], vision["hidden_act"])
        self.layernorm_before, self.layernorm_after = make_norm(vision), make_norm(vision)
        self.lambda_1, self.lambda_2 = parameter(width), parameter(width)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.addcmul(x, self.attention(self.layernorm_before(x)), self.lambda_1)
        return torch.addcmul(x, self.mlp(self.layernorm_after(x)), self.lambda_2)


class Embeddings(nn.Module):
    def __init__(self, family: InternVL) -> None:
        super().__init__()
        vision, width = family.vision, family.vision["hidden_size"]
        self.projection = PatchEmbedding(vision["num_channels"], family.patch_size, width, bias=True)
        self.cls_token = parameter(1, 1, width)
        learned = vision["use_absolute_position_embeddings"]
        self.position_embeddings = parameter(1, family.side**2 + 1, width) if learned else None

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.projection(pixels).flatten(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)
        return x if self.position_embeddings is None else x + self.position_embeddings


class Encoder(nn.Module):
    def __init__(self, family: InternVL, layers: int, *, normed: bool) -> None:
        """layers: how many are run. normed: the last norm is applied."""
        super().__init__()
        self.embeddings = Embeddings(family)
        self.layer = nn.ModuleList(Layer(family.vision) for _ in range(layers))
        self.layernorm = LayerNorm(family.vision["hidden_size"], family.vision["layer_norm_eps"]) if normed else None

    if TYPE_CHECKING:

        def __call__(self, pixels: Tensor) -> Tensor: ...

    def forward(self, pixels: Tensor) -> Tensor:
        """pixels [tiles, channels, height, width] -> [tiles, 1 + patches, width]."""
        x: Tensor = self.embeddings(pixels)
        for layer in self.layer:
            x = layer(x)
        return x if self.layernorm is None else self.layernorm(x)


class NormedProjector(Projector):
    def __init__(self, inputs: int, outputs: int, activation: str) -> None:
        super().__init__(inputs, outputs, activation, bias=True)
        self.layer_norm = LayerNorm(inputs, PROJECTOR_EPSILON)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.layer_norm(x))


class InternVLTower(Tower):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        family = self.family = InternVL(config)
        layers, width = family.vision["num_hidden_layers"], family.vision["hidden_size"]
        states = feature_layers(config, layers, default=-1)
        if len(states) != 1:
            raise ModelError(f"config.json: vision_feature_layer must be one layer with InternVL; got {len(states)}")
        # hidden states by another index are those before the norm
        has_norm = not family.vision["use_mean_pooling"]
        normed = has_norm and config.get("vision_feature_layer", -1) == -1
        self.vision_tower = Encoder(family, states[0], normed=normed)
        activation = str(config.get("projector_hidden_act", "gelu"))
        self.multi_modal_projector = NormedProjector(width * family.merge**2, text_width(config), activation)
        above = "|".join(map(str, range(states[0], layers)))
        self.renames = (
            *tower_renames(),
            (r"\.mask_token$", None),
            (r"^vision_tower\.encoder\.", "vision_tower."),
            (r"\.patch_embeddings\.projection\.", ".projection."),
            *(((r"^vision_tower\.layernorm\.", None),) if not normed else ()),
            *(((rf"^vision_tower\.layer\.({above})\.", None),) if above else ()),
        )

    def encode(self, modality: Modality, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:  # noqa: ARG002
        return [found.flatten(0, 1) for found in by_shape([item["pixel_values"] for item in items], self.features)]

    def features(self, pixels: Tensor) -> Tensor:
        """pixels [tiles, channels, height, width] -> [tiles, embeddings, hidden size]."""
        x, merge = self.vision_tower(pixels)[:, 1:], self.family.merge
        side = self.family.side // merge
        x = x.reshape(len(x), side, merge, side, merge, -1).permute(0, 1, 3, 2, 4, 5)
        out: Tensor = self.multi_modal_projector(x.flatten(3).flatten(1, 2))
        return out
