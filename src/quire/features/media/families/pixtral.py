"""Mistral 3, Pixtral and LightOnOCR: images keep their shape; a token ends each row of embeddings in the first two."""

from collections.abc import Mapping
from typing import Any, ClassVar

from quire.features.media.families.base import Arrays, Expansion, MediaFamily, Tokenize
from quire.features.media.families.fields import size_field, token_field
from quire.features.media.families.qwen_vl import vision_settings
from quire.files.reading import shown
from quire.types.errors import InvalidParameter
from quire.types.media import Modality

EMBEDDED, ROW_END, IMAGE_END = "[IMG]", "[IMG_BREAK]", "[IMG_END]"
LONGEST = 1024  # default of the processor for the longer side, in pixels
PIXTRAL: Mapping[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16, "num_channels": 3,
    "patch_size": 16, "hidden_act": "gelu",
}  # fmt: skip
# of a configuration without `vision_config`
MISTRAL3: Mapping[str, Any] = {**PIXTRAL, "patch_size": 14}


class Pixtral(MediaFamily):
    """Pixtral as a LLaVA: patches are not merged."""

    tower = "pixtral:PixtralTower"
    embeds_fields: ClassVar[Mapping[str, tuple[int, ...]]] = {"image_sizes": (1, 2)}
    defaults: ClassVar[Mapping[str, Any]] = PIXTRAL

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.vision = vision_settings(config, PIXTRAL if config.get("vision_config") else self.defaults)
        self.merge = self.merged_patches()
        self.square: int = self.vision["patch_size"] * self.merge  # side of what one embedding stands for, in pixels

    def merged_patches(self) -> int:
        """Return how many patches along each side become one embedding."""
        return 1

    def placeholder(self, modality: Modality) -> str:  # noqa: ARG002
        return EMBEDDED

    def expand(self, modality: Modality, arrays: Arrays, tokenize: Tokenize) -> Expansion:  # noqa: ARG002
        rows, columns = (side // self.square for side in arrays["image_sizes"][0].tolist())
        image, row_end, end = tokenize(EMBEDDED), tokenize(ROW_END), tokenize(IMAGE_END)
        tokens = [*image * columns, *row_end] * (rows - 1) + [*image * columns, *end]
        return Expansion(tokens, embedded=tuple((row * (columns + 1), columns) for row in range(rows)))

    def max_tokens(self, modality: Modality, processor: Mapping[str, Any]) -> int:  # noqa: ARG002
        size = (processor.get("image_processor") or processor).get("size") or {}
        sides = (size.get("height"), size.get("width")) if "longest_edge" not in size else (size["longest_edge"],) * 2
        rows, columns = (-(-int(side or LONGEST) // self.square) for side in sides)
        return rows * columns

    def preprocess_image(self, image: Any, processor: Any, options: Mapping[str, Any], count: int) -> Arrays:
        if options.get("patch_size", self.square) != self.square:
            raise InvalidParameter(
                f"patch_size must be {self.square}, what the model's encoder makes one embedding of; got "
                f"{shown(options['patch_size'])}",
                "mm_processor_kwargs",
            )
        return super().preprocess_image(image, processor, {**options, "patch_size": self.square}, count)


class Mistral3(Pixtral):
    tower = "pixtral:Mistral3Tower"
    defaults = MISTRAL3

    def merged_patches(self) -> int:
        return size_field(self.config, "spatial_merge_size", 2)


class LightOnOcr(Mistral3):
    """Rows have no marks. The processor may leave pixels that fill no square."""

    tower = "pixtral:LightOnOcrTower"
    defaults: ClassVar[Mapping[str, Any]] = {**MISTRAL3, "hidden_act": "silu"}

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.image_token = token_field(config, ("image_token_id",), 151655)

    def placeholder(self, modality: Modality) -> str:  # noqa: ARG002
        return "<|image_pad|>"

    def expand(self, modality: Modality, arrays: Arrays, tokenize: Tokenize) -> Expansion:  # noqa: ARG002
        rows, columns = (side // self.square for side in arrays["image_sizes"][0].tolist())
        return Expansion([self.image_token] * (rows * columns))

    def preprocess_image(self, image: Any, processor: Any, options: Mapping[str, Any], count: int) -> Arrays:
        return MediaFamily.preprocess_image(self, image, processor, options, count)
