"""InternVL 3: an image becomes equal tiles and, if there are several, a small copy of all of it; a frame is one tile."""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from quire.features.media.families.base import Arrays, Expansion, MediaFamily, Tokenize, Video
from quire.features.media.families.fields import check_image_size, choice_field, image_settings, size_field
from quire.features.media.families.qwen_vl import vision_settings
from quire.files.reading import shown
from quire.types.errors import ModelError
from quire.types.media import Modality

START, EMBEDDED, END = "<img>", "<IMG_CONTEXT>", "</img>"
DEFAULT_TILES, DEFAULT_FRAMES = 12, 32
VISION: Mapping[str, Any] = {
    "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096, "num_channels": 3,
    "attention_bias": False, "use_qk_norm": False, "hidden_act": "gelu", "norm_type": "layer_norm", "layer_norm_eps": 1e-6,
    "image_size": (448, 448), "patch_size": (14, 14), "use_absolute_position_embeddings": True, "use_mean_pooling": True,
}  # fmt: skip
FRAME_OPTIONS = ("do_rescale", "do_normalize", "image_mean", "image_std", "size", "resample")


class InternVL(MediaFamily):
    modalities = ("image", "video")
    tower = "internvl:InternVLTower"
    embeds_fields: ClassVar[Mapping[str, tuple[int, ...]]] = {}

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.vision = vision_settings(config, VISION)
        self.image_size = size_field(self.vision, "image_size", where="vision_config")
        self.patch_size = size_field(self.vision, "patch_size", where="vision_config")
        self.side = self.image_size // self.patch_size  # patches along each side of a tile
        ratio = config.get("downsample_ratio", 0.5)
        if not isinstance(ratio, int | float) or not 0 < ratio <= 1 or self.side % int(1 / ratio):
            raise ModelError(
                f"config.json: downsample_ratio must be 1 / n, with n a divisor of {self.side} patches; got {shown(ratio)}"
            )
        choice_field(config, "vision_feature_select_strategy", ("default",), "default")
        self.merge = int(1 / ratio)
        self.count = (self.side // self.merge) ** 2  # embeddings of a tile

    def placeholder(self, modality: Modality) -> str:
        return EMBEDDED if modality == "image" else "<video>"

    def expand(self, modality: Modality, arrays: Arrays, tokenize: Tokenize) -> Expansion:
        tiles, (start, image, end) = len(arrays["pixel_values"]), map(tokenize, (START, EMBEDDED, END))
        if modality == "image":
            count = tiles * self.count
            return Expansion([*start, *image * count, *end], embedded=((len(start), count),))
        tokens, embedded = list[int](), list[tuple[int, int]]()
        for frame in range(tiles):
            tokens += [*(tokenize(f"\nFrame{frame + 1}: ") if frame else ()), *start]
            embedded.append((len(tokens), self.count))
            tokens += [*image * self.count, *end]
        return Expansion(tokens, before="Frame1: ", embedded=tuple(embedded))

    def max_tokens(self, modality: Modality, processor: Mapping[str, Any]) -> int:
        settings = image_settings(processor)
        if modality == "video":
            return (settings.get("num_frames") or DEFAULT_FRAMES) * self.count
        tiles = settings.get("max_patches") or DEFAULT_TILES
        return (tiles + 1 if tiles > 1 else 1) * self.count

    def arrays_of_embeds(self, count: int, fields: Arrays) -> Arrays:  # noqa: ARG002
        return {"pixel_values": np.empty(max(1, count // self.count))}  # tiles

    def preprocess_image(self, image: Any, processor: Any, options: Mapping[str, Any], count: int) -> Arrays:
        arrays = super().preprocess_image(image, processor, {"crop_to_patches": True, **options}, count)
        check_image_size(arrays["pixel_values"].shape, self.image_size)
        return {"pixel_values": arrays["pixel_values"]}

    def preprocess_video(self, video: Video, processor: Any, options: Mapping[str, Any]) -> Arrays:
        from PIL import Image

        known = {name: options[name] for name in FRAME_OPTIONS if options.get(name) is not None}
        frames = [Image.fromarray(frame) for frame in video.frames]  # arrays with a side of three would be misread
        arrays = processor(images=frames, return_tensors="np", crop_to_patches=False, **known)
        check_image_size(arrays["pixel_values"].shape, self.image_size)
        return {"pixel_values": arrays["pixel_values"]}
