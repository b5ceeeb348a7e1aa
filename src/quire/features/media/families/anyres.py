"""LLaVA-NeXT, its video model and LLaVA-OneVision: a tile with the whole image, and tiles of a larger copy without padding."""

from collections.abc import Mapping, Sequence
from math import ceil, sqrt
from typing import Any, ClassVar

import numpy as np

from quire.features.media.families.base import Arrays, Expansion, Tokenize, Video
from quire.features.media.families.fields import (
    SIGLIP_LARGE,
    check_image_size,
    choice_field,
    image_settings,
    size_field,
    token_field,
)
from quire.features.media.families.llava import Llava
from quire.files.reading import shown
from quire.types.errors import InvalidParameter, ModelError
from quire.types.media import Modality

Size = tuple[int, int]  # height, width
ANYRES = "anyres_max_"
SHRINKING_RATIO = 1.1  # above it, a copy with more patches than allowed is interpolated
DEFAULT_FRAMES = 32  # of a video
FRAME_SETTINGS = (
    "do_resize", "size", "resample", "do_center_crop", "crop_size", "do_rescale", "rescale_factor", "do_normalize",
    "image_mean", "image_std",
)  # fmt: skip


def grid_sizes(config: Mapping[str, Any], default: Sequence[Size], tile: int) -> list[Size]:
    """Return `image_grid_pinpoints`: sizes of the larger copy in pixels, multiples of a tile."""
    found = config.get("image_grid_pinpoints") or default
    if not isinstance(found, Sequence) or not all(
        isinstance(size, Sequence) and len(size) == 2 and all(type(side) is int and side >= tile for side in size)
        for size in found
    ):
        raise ModelError(
            f"config.json: image_grid_pinpoints must be pairs of a height and a width of at least {tile}; got {shown(found)}"
        )
    return [(height, width) for height, width in found]


def best_size(size: Size, choices: Sequence[Size]) -> Size:
    """Return the choice that keeps most pixels of an image of this size, and of those the one with least padding."""

    def worth(choice: Size) -> Size:
        scale = min(choice[1] / size[1], choice[0] / size[0])
        kept = min(int(size[1] * scale) * int(size[0] * scale), size[0] * size[1])
        return kept, kept - choice[0] * choice[1]

    return max(choices, key=worth)


def unpadded(size: Size, rows: int, columns: int) -> tuple[slice, slice]:
    """Return which of the rows and columns of patches show an image of this size that is centred on them."""
    height, width = size
    if width / height > columns / rows:
        padding = (rows - int(round(height * (columns / width), 7))) // 2
        return slice(padding, rows - padding), slice(0, columns)
    padding = (columns - int(round(width * (rows / height), 7))) // 2
    return slice(0, rows), slice(padding, columns - padding)


class LlavaNext(Llava):
    tower = "anyres:LlavaNextTower"
    embeds_fields: ClassVar[Mapping[str, tuple[int, ...]]] = {"image_sizes": (2,)}
    grid: Sequence[Size] = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.side = self.vision.side
        if self.count != self.side**2:
            raise ModelError(
                "config.json: vision_feature_select_strategy must be 'default' for CLIP and 'full' for SigLIP, so that tiles "
                f"are squares of patches; got {self.count} embeddings of {self.side} x {self.side} patches"
            )
        self.choices = grid_sizes(config, self.grid, self.vision.image_size)

    def tiles(self, size: Size) -> Size:
        """Return the rows and columns of tiles for an image of this size."""
        height, width = best_size(size, self.choices)
        return height // self.vision.image_size, width // self.vision.image_size

    def shape(self, size: Size) -> Size:
        """Return the rows and columns of patches of the larger copy."""
        tall, wide = self.tiles(size)
        rows, columns = unpadded(size, tall * self.side, wide * self.side)
        return self.shrunk(rows.stop - rows.start, columns.stop - columns.start)

    def shrunk(self, rows: int, columns: int) -> Size:
        return rows, columns

    def expand(self, modality: Modality, arrays: Arrays, tokenize: Tokenize) -> Expansion:  # noqa: ARG002
        height, width = map(int, arrays["image_sizes"])
        rows, columns = self.shape((height, width))
        return Expansion([self.image_token] * (self.count + rows * (columns + 1)))

    def max_tokens(self, modality: Modality, processor: Mapping[str, Any]) -> int:  # noqa: ARG002
        return self.count + max(rows * (columns + 1) for rows, columns in map(self.shape, self.choices))

    def preprocess_image(self, image: Any, processor: Any, options: Mapping[str, Any], count: int) -> Arrays:
        if "image_grid_pinpoints" in options:
            raise InvalidParameter(
                "mm_processor_kwargs must not have image_grid_pinpoints: the model has its own. Remove it.",
                "mm_processor_kwargs",
            )
        images = [image] if count == 1 or not self.depends_on_count else [[image, image.resize((1, 1))]]
        arrays = processor(images=images, return_tensors="np", image_grid_pinpoints=[*map(list, self.choices)], **options)
        pixels = np.asarray(arrays["pixel_values"][0])
        check_image_size(pixels.shape, self.vision.image_size)
        return {"pixel_values": pixels, "image_sizes": np.asarray(arrays["image_sizes"][0], dtype=np.int64)}


class LlavaVideo(LlavaNext):
    """A model that also reads videos, with fewer embeddings for a frame than for an image."""

    modalities = ("image", "video")
    default_video_token: ClassVar[int]
    newlines: ClassVar[int] = 0  # embeddings that follow the last frame

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.video_token = token_field(config, ("video_token_index", "video_token_id"), self.default_video_token)

    def placeholder(self, modality: Modality) -> str:
        return f"<{modality}>"

    def pooled(self) -> int:
        """Return the embeddings along each side of a frame."""
        raise NotImplementedError

    def expand(self, modality: Modality, arrays: Arrays, tokenize: Tokenize) -> Expansion:
        if modality == "video":
            return Expansion([self.video_token] * self.video_count(len(arrays["pixel_values"])))
        return super().expand(modality, arrays, tokenize)

    def video_count(self, frames: int) -> int:
        return frames * self.pooled() ** 2 + self.newlines

    def max_tokens(self, modality: Modality, processor: Mapping[str, Any]) -> int:
        if modality == "image":
            return super().max_tokens(modality, processor)
        frames = image_settings(processor).get("num_frames") or DEFAULT_FRAMES
        return self.video_count(size_field({"num_frames": frames}, "num_frames", where="video_preprocessor_config.json"))

    def preprocess_video(self, video: Video, processor: Any, options: Mapping[str, Any]) -> Arrays:
        from PIL import Image
        from transformers import CLIPImageProcessorPil

        settings = {name: getattr(processor, name, None) for name in FRAME_SETTINGS}
        settings |= {name: value for name, value in options.items() if name in FRAME_SETTINGS}
        frames = [Image.fromarray(frame) for frame in video.frames]
        found = CLIPImageProcessorPil(**settings)(images=frames, return_tensors="np")
        check_image_size(found["pixel_values"].shape, self.vision.image_size)
        return {"pixel_values": found["pixel_values"]}


class LlavaNextVideo(LlavaVideo):
    tower = "anyres:LlavaNextVideoTower"
    default_token, default_video_token = 32001, 32000

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.stride = size_field(config, "spatial_pool_stride", 2)
        self.mode = choice_field(config, "spatial_pool_mode", ("average", "max"), "average")

    def pooled(self) -> int:
        return self.side // self.stride


class LlavaOnevision(LlavaVideo):
    """Only an image that is alone in its prompt has a larger copy."""

    vision_defaults = SIGLIP_LARGE
    default_token, default_layer, default_strategy = 151646, -1, "full"
    default_video_token, newlines = 151647, 1
    tower = "anyres:LlavaOnevisionTower"
    depends_on_count = True
    grid = tuple((384 * rows, 384 * columns) for rows in range(1, 7) for columns in range(1, 7))

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.most = most_patches(config) * self.side**2

    def shrunk(self, rows: int, columns: int) -> Size:
        ratio = sqrt(rows * columns / self.most)
        return (int(rows // ratio), int(columns // ratio)) if ratio > SHRINKING_RATIO else (rows, columns)

    def pooled(self) -> int:
        return ceil(self.side / 2)

    def expand(self, modality: Modality, arrays: Arrays, tokenize: Tokenize) -> Expansion:
        if modality == "image" and len(arrays["pixel_values"]) == 1:
            return Expansion([self.image_token] * (self.count + 1))
        return super().expand(modality, arrays, tokenize)

    def max_tokens(self, modality: Modality, processor: Mapping[str, Any]) -> int:
        if modality == "video":
            return super().max_tokens(modality, processor)
        most = self.most * SHRINKING_RATIO**2
        patches = ((height // self.vision.image_size * self.side, width // self.vision.image_size * self.side)
                   for height, width in self.choices)  # fmt: skip
        return self.count + max(int(min(rows * columns, most)) + rows for rows, columns in patches)


def most_patches(config: Mapping[str, Any]) -> int:
    """Return how many tiles of patches the larger copy may have by `vision_aspect_ratio`, such as anyres_max_9."""
    value = config.get("vision_aspect_ratio", f"{ANYRES}9")
    count = value.removeprefix(ANYRES) if isinstance(value, str) else ""
    if not count.isdecimal() or int(count) < 1:
        raise ModelError(f"config.json: vision_aspect_ratio must be {ANYRES} and a number; got {shown(value)}")
    return int(count)
