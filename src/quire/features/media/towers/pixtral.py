"""Pixtral's encoder, and the projections of Pixtral (LLaVA), Mistral 3 and LightOnOCR."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quire.config.hf import explicit_config
from quire.features.media.families.fields import feature_layers, text_width
from quire.features.media.families.pixtral import LightOnOcr, Mistral3, Pixtral
from quire.features.media.towers.base import Tower
from quire.features.media.towers.llava import Projector
from quire.features.media.towers.packed import (
    Block,
    PackedAttention,
    PaddedMLP,
    Rotations,
    inverse_frequencies,
    rotate_by_grid,
    sequences,
)
from quire.features.media.towers.parts import PatchEmbedding, project
from quire.features.media.towers.vit import Renames, tower_renames
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.rope import rope_parameters
from quire.types.errors import ModelError
from quire.types.media import Modality

EPSILON = 1e-5
Sizes = Sequence[tuple[int, int]]  # rows and columns of patches of each image


class Encoder(nn.Module):
    """Packed patches of all images -> hidden states after the layers `states`, side by side; 0 is the first layer's input."""

    def __init__(self, vision: Mapping[str, Any], states: Sequence[int]) -> None:
        super().__init__()
        width, heads = vision["hidden_size"], vision["num_attention_heads"]
        if width % (4 * heads):
            raise ModelError(f"vision_config: the width of {heads} heads must be a multiple of 4; got {width} / {heads}")
        self.states, self.head_dim, self.base = states, width // heads, float(rope_parameters(vision)["rope_theta"])
        self.patch_conv = PatchEmbedding(vision["num_channels"], vision["patch_size"], width, bias=False)
        self.ln_pre = RMSNorm(width, EPSILON)
        self.layers = nn.ModuleList(
            Block(
                (RMSNorm(width, EPSILON), RMSNorm(width, EPSILON)),
                PackedAttention(width, heads, bias=False, separate=True),
                PaddedMLP(width, vision["intermediate_size"], vision["hidden_act"], bias=False),
            )
            for _ in range(max(states))
        )

    if TYPE_CHECKING:

        def __call__(self, images: Sequence[Tensor]) -> tuple[Tensor, Sizes]: ...

    def forward(self, images: Sequence[Tensor]) -> tuple[Tensor, Sizes]:
        """images: each [1, channels, height, width] -> [T, states * width], and the patches of each image."""
        patches = [self.patch_conv(image)[0] for image in images]
        sizes = [(len(each), each.shape[1]) for each in patches]
        x: Tensor = self.ln_pre(torch.cat([each.flatten(0, 1) for each in patches]))
        rotations, parts = self.rotations(sizes, x.device), sequences([rows * columns for rows, columns in sizes])
        kept = {0: x}
        for index, layer in enumerate(self.layers):
            x = layer(x, rotations, parts)
            if index + 1 in self.states:
                kept[index + 1] = x
        return torch.cat([kept[state] for state in self.states], dim=-1), sizes

    def rotations(self, sizes: Sizes, device: torch.device) -> Rotations:
        at = [torch.cartesian_prod(*(torch.arange(side, device=device) for side in size)) for size in sizes]
        rows, columns = torch.cat(at).unbind(1)
        frequencies = inverse_frequencies(self.base, self.head_dim, device)
        return rotate_by_grid(rows, columns, (frequencies[0::2], frequencies[1::2]))


class PixtralTower(Tower):
    family: type[Pixtral] = Pixtral

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.read = self.family(config)
        vision, outputs = self.read.vision, text_width(config)
        layers = vision["num_hidden_layers"]
        states = feature_layers(config, layers, default=self.default_layer)
        self.vision_tower = Encoder(vision, states)
        self.multi_modal_projector = self.make_projector(vision["hidden_size"], len(states), outputs)
        above = "|".join(map(str, range(max(states), layers)))
        self.renames = (
            *self.prefixes,
            (r"^vision_tower\.transformer\.", "vision_tower."),
            *(((rf"^vision_tower\.layers\.({above})\.", None),) if above else ()),
            (r"\.attention_norm\.", ".norm1."),
            (r"\.ffn_norm\.", ".norm2."),
            (r"\.feed_forward\.", ".mlp."),
            (r"\.attention\.o_proj\.", ".attn.proj."),
            (r"\.attention\.", ".attn."),
        )

    prefixes: Renames = tower_renames()
    default_layer = -2
    default_bias = True

    def make_projector(self, width: int, states: int, outputs: int) -> nn.Module:
        bias = bool(self.read.config.get("multimodal_projector_bias", self.default_bias))
        return Projector(width * states, outputs, str(self.read.config.get("projector_hidden_act", "gelu")), bias=bias)

    def encode(self, modality: Modality, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:  # noqa: ARG002
        x, sizes = self.vision_tower([item["pixel_values"] for item in items])
        merge = self.read.merge
        return list(torch.split(self.embed(x, sizes), [(rows // merge) * (columns // merge) for rows, columns in sizes]))

    def embed(self, x: Tensor, sizes: Sizes) -> Tensor:  # noqa: ARG002
        """Return the embeddings [n, hidden size] of all images."""
        out: Tensor = self.multi_modal_projector(x)
        return out


class PatchMerger(nn.Module):
    def __init__(self, width: int, merge: int) -> None:
        super().__init__()
        self.merge, self.merging_layer = merge, Linear(width * merge**2, width)

    def forward(self, x: Tensor, sizes: Sizes) -> Tensor:
        """x [T, width] -> [T / merge ** 2, width]. Patches at the right and lower edge that fill no square are left out."""
        merge, merged = self.merge, list[Tensor]()
        for image, (rows, columns) in zip(torch.split(x, [rows * columns for rows, columns in sizes]), sizes, strict=True):
            tall, wide = rows // merge, columns // merge
            whole = image.view(rows, columns, -1)[: tall * merge, : wide * merge]
            squares = whole.reshape(tall, merge, wide, merge, -1).permute(0, 2, 4, 1, 3)
            merged.append(squares.flatten(2).flatten(0, 1))
        return project(self.merging_layer, torch.cat(merged))


class MergingProjector(Projector):
    def __init__(self, width: int, merge: int, outputs: int, eps: float, activation: str, *, bias: bool) -> None:
        super().__init__(width, outputs, activation, bias=bias)
        self.norm, self.patch_merger = RMSNorm(width, eps), PatchMerger(width, merge)

    def merge(self, x: Tensor, sizes: Sizes) -> Tensor:
        out: Tensor = self(self.patch_merger(self.norm(x), sizes))
        return out


class Mistral3Tower(PixtralTower):
    family = Mistral3
    default_layer = -1
    default_bias = False

    def make_projector(self, width: int, states: int, outputs: int) -> nn.Module:
        config = self.read.config
        if states != 1:
            raise ModelError(f"config.json: vision_feature_layer must be one layer with Mistral 3; got {states}")
        eps = float(explicit_config(config, {}).get("rms_norm_eps") or 1e-5)
        bias = bool(config.get("multimodal_projector_bias", self.default_bias))
        return MergingProjector(
            width, self.read.merge, outputs, eps, str(config.get("projector_hidden_act", "gelu")), bias=bias
        )

    def embed(self, x: Tensor, sizes: Sizes) -> Tensor:
        assert isinstance(self.multi_modal_projector, MergingProjector)
        return self.multi_modal_projector.merge(x, sizes)


class LightOnOcrTower(Mistral3Tower):
    family = LightOnOcr
    prefixes = (
        (r"^(?!(model\.)?vision_(encoder|projection)\.)", None),
        (r"^(model\.)?vision_encoder\.", "vision_tower."),
        (r"^(model\.)?vision_projection\.", "multi_modal_projector."),
    )
