"""LLaVA 1.5, VipLLaVA and DeepSeek-VL: CLIP or SigLIP, and two linear layers."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from quire.features.media.families.fields import text_width
from quire.features.media.families.llava import DeepseekVL, Llava, VipLlava
from quire.features.media.towers.base import Tower
from quire.features.media.towers.parts import Part, by_shape, project, vision_activation
from quire.features.media.towers.vit import UNREAD, VisionEncoder, tower_renames
from quire.layers.linear import Linear
from quire.layers.norm import LayerNorm
from quire.types.media import Modality


class Projector(Part):
    def __init__(self, inputs: int, outputs: int, activation: str, *, bias: bool) -> None:
        super().__init__()
        self.linear_1, self.linear_2 = Linear(inputs, outputs, bias=bias), Linear(outputs, outputs, bias=bias)
        self.activation = vision_activation(activation)

    def forward(self, x: Tensor) -> Tensor:
        return project(self.linear_2, self.activation(project(self.linear_1, x)))


class LlavaTower(Tower):
    family: ClassVar[type[Llava]] = Llava

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        family = self.family(config)
        self.dropped = family.dropped
        self.vision_tower = VisionEncoder(family.vision, family.states)
        self.multi_modal_projector = Projector(
            family.vision.width * len(family.states),
            text_width(config),
            str(config.get("projector_hidden_act", "gelu")),
            bias=bool(config.get("multimodal_projector_bias", True)),
        )
        self.renames = (*tower_renames(), *self.vision_tower.renames)

    def features(self, pixels: Tensor) -> Tensor:
        """pixels [images, channels, height, width] -> [images, tokens, hidden size]."""
        return self.multi_modal_projector(self.selected(pixels))

    def selected(self, pixels: Tensor) -> Tensor:
        """Return the encoder's outputs that are projected [images, tokens, states * width]."""
        return self.vision_tower(pixels)[:, self.dropped :]

    def encode(self, modality: Modality, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:  # noqa: ARG002
        return [found.flatten(0, 1) for found in by_shape([item["pixel_values"] for item in items], self.features)]


class NormedProjector(Projector):
    def __init__(self, inputs: int, outputs: int, activation: str, eps: float) -> None:
        super().__init__(inputs, outputs, activation, bias=True)
        self.projector_layernorm = LayerNorm(inputs, eps)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.projector_layernorm(x))


class VipLlavaTower(LlavaTower):
    family = VipLlava

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        linear, activation = self.multi_modal_projector.linear_1, str(config.get("projector_hidden_act", "gelu"))
        eps = config.get("projector_layernorm_eps", 1e-5)
        self.multi_modal_projector = NormedProjector(linear.inputs, text_width(config), activation, eps)


class DeepseekVLTower(Tower):
    renames = (
        (r"^(?!(model\.)?(vision_model|aligner)\.)", None),
        (r"^model\.", ""),
        (r"^vision_model\.(vision_model\.)?", "vision_tower."),
        (r"^aligner\.linear(\d)\.", r"aligner.linear_\1."),
        *UNREAD,
    )

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        vision = DeepseekVL(config).vision
        self.vision_tower = VisionEncoder(vision)
        self.aligner = Projector(vision.width, text_width(config), "gelu", bias=True)

    def features(self, pixels: Tensor) -> Tensor:
        """pixels [images, channels, height, width] -> [images, tokens, hidden size]."""
        return self.aligner(self.vision_tower(pixels))

    def encode(self, modality: Modality, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:  # noqa: ARG002
        return [found.flatten(0, 1) for found in by_shape([item["pixel_values"] for item in items], self.features)]
