"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: images of any size, videos, and rotary positions with three axes."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from quire.features.media.families.base import Arrays, Expansion, MediaFamily, Tokenize, Video
from quire.features.media.families.patches import VIDEO_DEFAULTS, fit, frame_patches, most_patches, pixel_limits
from quire.files.reading import shown
from quire.types.errors import InvalidParameter, ModelError
from quire.types.media import Modality

START, END = "<|vision_start|>", "<|vision_end|>"
PADS: Mapping[Modality, str] = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
GRIDS: Mapping[Modality, str] = {"image": "image_grid_thw", "video": "video_grid_thw"}
SETTINGS = (*VIDEO_DEFAULTS, "size", "min_pixels", "max_pixels", "max_video_tokens")
MAX_PATCHES = 1 << 15  # that are encoded together, unless one frame has more
MAX_FRAMES = 768  # of a video, unless its settings have `max_frames`


def vision_settings(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return `vision_config` over the defaults of its class."""
    found = config.get("vision_config") or {}
    if not isinstance(found, Mapping):
        raise ModelError(f"config.json: vision_config must be an object; got {shown(found)}")
    settings = {**defaults, **{name: value for name, value in found.items() if value is not None}}
    for name, default in defaults.items():
        value = settings[name]
        if type(default) is int and (type(value) is not int or value < 1):
            raise ModelError(f"vision_config: {name} must be an integer of at least 1; got {shown(value)}")
    return settings


def check_sections(sections: Any) -> Sequence[int]:
    """Return `mrope_section`, checked: how many rotary frequencies belong to each axis."""
    whole = isinstance(sections, list | tuple) and all(type(size) is int and size >= 0 for size in sections)
    if not whole or len(sections) != 3:
        raise ModelError(f"rope_parameters: mrope_section must be three integers of at least 0; got {shown(sections)}")
    found: Sequence[int] = sections
    return found


class Qwen2VL(MediaFamily):
    modalities = ("image", "video")
    tower = "qwen_vl:Qwen2VLTower"
    rotary_axes = 3
    together = MAX_PATCHES // 4
    embeds_fields: ClassVar[Mapping[str, tuple[int, ...]]] = {"image_grid_thw": (1, 3)}
    defaults: ClassVar[Mapping[str, Any]] = {
        "depth": 32, "embed_dim": 1280, "hidden_size": 3584, "hidden_act": "quick_gelu", "mlp_ratio": 4, "num_heads": 16,
        "in_channels": 3, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
    }  # fmt: skip
    image_pixels: ClassVar[tuple[int, int]] = (56 * 56, 28 * 28 * 1280)  # least and most, by default
    video_pixels: ClassVar[tuple[int, int]] = (28 * 28 * 128, 28 * 28 * 768)
    max_video_tokens: ClassVar[int] = 128000  # of `cap_pixels_per_frame`
    sections: ClassVar[Sequence[int]] = (16, 24, 24)  # rotary frequencies of each axis

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.vision = vision_settings(config, self.defaults)
        self.merge: int = self.vision["spatial_merge_size"]
        self.pair: int = self.vision["temporal_patch_size"]  # frames of a patch

    def placeholder(self, modality: Modality) -> str:
        return f"{START}{PADS[modality]}{END}"

    def expand(self, modality: Modality, arrays: Arrays, tokenize: Tokenize) -> Expansion:
        grid = self.merged_grid(modality, arrays)
        count = grid[0] * grid[1] * grid[2]
        start, end = tokenize(START), tokenize(END)
        tokens = [*start, *tokenize(PADS[modality]) * count, *end]
        return Expansion(tokens, embedded=((len(start), count),), grid=grid, interval=self.interval(arrays))

    def merged_grid(self, modality: Modality, arrays: Arrays) -> tuple[int, int, int]:
        """Return (frames, rows, columns) of an item's embeddings."""
        frames, rows, columns = arrays[GRIDS[modality]][0].tolist()
        return frames, rows // self.merge, columns // self.merge

    def interval(self, arrays: Arrays) -> float:  # noqa: ARG002
        """Return the rotary positions between two frames."""
        return 1.0

    def rotary_axes_of(self, sections: Sequence[int] | None, count: int) -> Sequence[int]:
        sizes = check_sections(sections or self.sections)
        if sum(sizes) != count:
            raise ModelError(
                f"rope_parameters: mrope_section must have the sum {count}, the rotary frequencies; got {shown(sizes)}"
            )
        return [axis for axis, size in enumerate(sizes) for _ in range(size)]

    def max_tokens(self, modality: Modality, processor: Mapping[str, Any]) -> int:
        area = (self.vision["patch_size"] * self.merge) ** 2
        processor = processor.get(f"{modality}_processor") or processor
        least, most = pixel_limits(processor, self.image_pixels if modality == "image" else self.video_pixels)
        if modality == "image":
            return most_patches(most // area, least // area)
        return self.most_video_patches(most // area, least // area, processor.get("max_frames") or MAX_FRAMES)

    def most_video_patches(self, most: int, least: int, frames: int) -> int:
        """most, least: of the limits of a video's pixels, in embeddings."""
        return most_patches(most, least) * -(-frames // self.pair)

    def preprocess_video(self, video: Video, processor: Any, options: Mapping[str, Any]) -> Arrays:
        settings = self.video_settings(processor, options)
        if not len(video.frames):
            raise InvalidParameter("a video must have at least one frame; got 0")
        size = (video.frames.shape[1], video.frames.shape[2])
        if settings["do_resize"]:
            size = self.video_size(len(video.frames), size, settings)
        factor = settings["patch_size"] * settings["merge_size"]
        if size[0] % factor or size[1] % factor:
            raise InvalidParameter(
                f"without do_resize, frames must have sides that are multiples of {factor}; got {size[1]} x {size[0]}"
            )
        return {**frame_patches(video.frames, size, settings), **self.video_times(video, settings)}

    def video_settings(self, processor: Any, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of the video processor. What the checkpoint does not have for videos is as for images."""
        settings: dict[str, Any] = {**VIDEO_DEFAULTS, "size": None, "max_video_tokens": self.max_video_tokens}
        for name in SETTINGS:
            for value in (self.image_setting(processor, name), options.get(name)):
                if value is not None:
                    settings[name] = value
        for name, ours in (("patch_size", "patch_size"), ("merge_size", "spatial_merge_size"), ("temporal_patch_size",) * 2):
            if settings[name] != self.vision[ours]:
                raise InvalidParameter(
                    f"{name} must be {self.vision[ours]}, the size of the model's encoder; got {shown(settings[name])}", name
                )
        return settings

    def image_setting(self, processor: Any, name: str) -> Any:
        value = getattr(processor, name, None)
        return dict(value) if name == "size" and value is not None else value

    def video_size(self, frames: int, size: tuple[int, int], settings: Mapping[str, Any]) -> tuple[int, int]:
        """Return the height and width to which frames of this size are scaled."""
        factor, pair = settings["patch_size"] * settings["merge_size"], settings["temporal_patch_size"]
        least, most = pixel_limits(settings, self.video_pixels)
        if settings["cap_pixels_per_frame"]:
            total = int(settings["max_video_tokens"] * factor * factor * 0.9)
            most = max(min(most, total * pair // frames), int(least * 1.05))
        return fit(*size, factor, least, most)

    def video_times(self, video: Video, settings: Mapping[str, Any]) -> Arrays:  # noqa: ARG002
        """Return the arrays with the times of frames."""
        return {}


class Qwen2_5VL(Qwen2VL):  # noqa: N801
    tower = "qwen_vl:Qwen2_5VLTower"
    defaults: ClassVar[Mapping[str, Any]] = {
        "depth": 32, "hidden_size": 3584, "hidden_act": "silu", "intermediate_size": 3420, "num_heads": 16, "in_channels": 3,
        "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "tokens_per_second": 4, "window_size": 112,
        "out_hidden_size": 3584, "fullatt_block_indexes": (7, 15, 23, 31),
    }  # fmt: skip

    def interval(self, arrays: Arrays) -> float:
        if "second_per_grid_ts" not in arrays:
            return 1.0
        return float(arrays["second_per_grid_ts"][0] * self.vision["tokens_per_second"])

    def video_times(self, video: Video, settings: Mapping[str, Any]) -> Arrays:
        import numpy as np

        return {"second_per_grid_ts": np.array([settings["temporal_patch_size"] / sampled_rate(video)], np.float32)}


def sampled_rate(video: Video) -> float:
    """Return the frames per second among those that were sampled."""
    if video.duration:
        return len(video.frames) / video.duration
    shown_for = (video.seconds[-1] - video.seconds[0]) if len(video.seconds) > 1 else 0.0
    return (len(video.seconds) - 1) / shown_for if shown_for > 0 else video.frame_rate


class Qwen3VL(Qwen2VL):
    """Frames of a video follow the time at which they are shown, and each is an image to the language model."""

    tower = "qwen_vl:Qwen3VLTower"
    defaults: ClassVar[Mapping[str, Any]] = {
        "depth": 27, "hidden_size": 1152, "hidden_act": "gelu_pytorch_tanh", "intermediate_size": 4304, "num_heads": 16,
        "in_channels": 3, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 3584,
        "num_position_embeddings": 2304, "deepstack_visual_indexes": (8, 16, 24),
    }  # fmt: skip
    video_pixels = (32 * 32 * 128, 32 * 32 * 768)  # of all frames
    max_video_tokens = 768
    sections = (24, 20, 20)

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.levels = 1 + len(self.vision["deepstack_visual_indexes"])  # type: ignore[misc]

    def expand(self, modality: Modality, arrays: Arrays, tokenize: Tokenize) -> Expansion:
        if modality == "image":
            return super().expand(modality, arrays, tokenize)
        frames, rows, columns = self.merged_grid(modality, arrays)
        start, pad, end = tokenize(START), tokenize(PADS[modality]), tokenize(END)
        tokens, embedded = list(start), list[tuple[int, int]]()
        for tenths in arrays["frame_tenths"].tolist():
            tokens += [*tokenize(f"<{tenths // 10}.{tenths % 10} seconds>"), *start]
            embedded.append((len(tokens), rows * columns))
            tokens += [*pad * (rows * columns), *end]
        return Expansion([*tokens, *end], embedded=tuple(embedded), grid=(frames, rows, columns))

    def rotary_axes_of(self, sections: Sequence[int] | None, count: int) -> Sequence[int]:
        """Return the axes in turn, as far as the sections of rows and columns reach, then frames."""
        sizes = check_sections(sections or self.sections)
        return [at % 3 if at < 3 * sizes[at % 3] else 0 for at in range(count)]

    def most_video_patches(self, most: int, least: int, frames: int) -> int:
        share = most_patches(-(-most // frames), -(-least // frames)) * -(-frames // self.pair)
        return max(most_patches(most, least) * 3 // (2 * self.pair), share)  # five frames count as two pairs, and make three

    def image_setting(self, processor: Any, name: str) -> Any:
        """Return None for limits: those of videos are of all frames."""
        return None if name in ("size", "min_pixels", "max_pixels") else super().image_setting(processor, name)

    def video_size(self, frames: int, size: tuple[int, int], settings: Mapping[str, Any]) -> tuple[int, int]:
        factor, pair = settings["patch_size"] * settings["merge_size"], settings["temporal_patch_size"]
        if frames < pair:
            raise InvalidParameter(f"a video must have at least {pair} frames; got {frames}")
        least, most = pixel_limits(settings, self.video_pixels)
        if settings["cap_pixels_per_frame"]:
            share = min(settings["max_video_tokens"] * factor * factor, most // frames)
            most = max(share, int(least * 1.05)) * frames
        if min(size) < factor:
            scale = max(factor / size[0], factor / size[1])
            size = int(size[0] * scale), int(size[1] * scale)
        return fit(*size, factor, least, most, frames, round(frames / pair) * pair)

    def video_times(self, video: Video, settings: Mapping[str, Any]) -> Arrays:
        """Return `frame_tenths`: the time at the middle of each pair of frames, in tenths of a second."""
        import numpy as np

        pair = settings["temporal_patch_size"]
        seconds = list(video.seconds)
        seconds += seconds[-1:] * (-len(seconds) % pair)
        middles = [(seconds[at] + seconds[at + pair - 1]) / 2 for at in range(0, len(seconds), pair)]
        return {"frame_tenths": np.array([int(f"{middle:.1f}".replace(".", "")) for middle in middles], np.int64)}


class Qwen3_5(Qwen3VL):  # noqa: N801
    """As Qwen3-VL, without deep stack."""

    tower = "qwen_vl:Qwen3_5Tower"
    sections = (11, 11, 10)

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.vision["deepstack_visual_indexes"] = ()
        self.levels = 1  # type: ignore[misc]
