"""Patches of video frames in the order of Qwen's encoders: squares of merged patches, row by row, frame pair by frame pair."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.files.reading import shown
from quire.types.errors import InvalidParameter

if TYPE_CHECKING:
    import numpy as np

    from quire.features.media.families.base import Arrays

MAX_ASPECT = 200  # of the longer side to the shorter one
BICUBIC = 3  # PIL.Image.Resampling.BICUBIC
# of a video processor that a checkpoint's settings leave out
VIDEO_DEFAULTS: Mapping[str, Any] = {
    "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "resample": BICUBIC, "do_resize": True, "do_rescale": True,
    "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": (0.5, 0.5, 0.5), "image_std": (0.5, 0.5, 0.5),
    "cap_pixels_per_frame": False,
}  # fmt: skip


def pixel_limits(settings: Mapping[str, Any], default: tuple[int, int]) -> tuple[int, int]:
    """Return the least and the most pixels of an image, from `size`, or from `min_pixels` and `max_pixels`."""
    size = settings.get("size") or {}
    if not isinstance(size, Mapping):
        raise InvalidParameter(f"size must be an object with shortest_edge and longest_edge; got {shown(size)}", "size")
    found = []
    for old, name, value in zip(("min_pixels", "max_pixels"), ("shortest_edge", "longest_edge"), default, strict=True):
        limit = settings.get(old) or size.get(name) or value
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise InvalidParameter(f"size.{name} must be an integer of at least 1; got {shown(limit)}", "size")
        found.append(limit)
    return found[0], found[1]


def fit(height: int, width: int, factor: int, least: int, most: int, frames: float = 1, counted: int = 1) -> tuple[int, int]:
    """Return height and width as multiples of `factor`, with `least` to `most` pixels in all frames.

    frames: of the video, which the scale is found for. counted: the same, rounded to pairs, which the limits are compared with.
    """
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise InvalidParameter(f"the longer side must be at most {MAX_ASPECT} times the shorter one; got {width} x {height}")
    rows, columns = round(height / factor), round(width / factor)
    size = counted * rows * columns * factor * factor
    if size > most:
        scale = math.sqrt(frames * height * width / most)
        rows, columns = (max(1, math.floor(side / scale / factor)) for side in (height, width))
    elif size < least:
        scale = math.sqrt(least / (frames * height * width))
        rows, columns = (math.ceil(side * scale / factor) for side in (height, width))
    return rows * factor, columns * factor


def most_patches(most: int, least: int) -> int:
    """Return the most squares that `fit` can return. most, least: its limits in squares.

    The shorter side has at least one square, however long the other one is, and small images are rounded up.
    """
    grown = least + math.isqrt(MAX_ASPECT * least) + math.isqrt(least) + 2
    return max(most, math.isqrt(MAX_ASPECT * most), grown, 1)


def frame_patches(frames: "np.ndarray[Any, Any]", size: tuple[int, int], settings: Mapping[str, Any]) -> "Arrays":
    """Return pixel_values_videos [patches, channels * pair * patch * patch] and video_grid_thw [1, 3].

    frames: [frames, height, width, 3] uint8. size: height and width to which they are scaled.
    """
    import numpy as np

    patch, merge, pair = (settings[name] for name in ("patch_size", "merge_size", "temporal_patch_size"))
    values, (height, width) = _value_table(settings), size
    rows, columns = height // patch, width // patch
    pairs = -(-len(frames) // pair)
    shape = rows // merge, merge, patch, columns // merge, merge, patch
    out = np.empty((pairs, rows * columns, 3, pair, patch * patch), np.float32)
    for index in range(pairs * pair):
        frame = _scaled(frames[min(index, len(frames) - 1)], size, settings)
        for channel in range(3):
            squares = values[channel][frame[..., channel]].reshape(shape).transpose(0, 3, 1, 4, 2, 5)
            out[index // pair, :, channel, index % pair] = squares.reshape(rows * columns, patch * patch)
    return {
        "pixel_values_videos": out.reshape(pairs * rows * columns, -1),
        "video_grid_thw": np.array([[pairs, rows, columns]], np.int64),
    }


def _value_table(settings: Mapping[str, Any]) -> "np.ndarray[Any, Any]":
    """Return what each channel's 256 values are after rescaling and normalization, [3, 256] float32."""
    import numpy as np

    values = np.broadcast_to(np.arange(256, dtype=np.float32), (3, 256))
    with np.errstate(all="ignore"):  # pixels that are too large are refused with a message of their own
        if settings["do_rescale"]:
            values = values * np.float32(settings["rescale_factor"])
        if settings["do_normalize"]:
            mean, deviation = (np.array(settings[name], np.float32)[:, None] for name in ("image_mean", "image_std"))
            values = (values - mean) / deviation
    return values.astype(np.float32)


def _scaled(frame: "np.ndarray[Any, Any]", size: tuple[int, int], settings: Mapping[str, Any]) -> "np.ndarray[Any, Any]":
    import numpy as np
    from PIL import Image

    height, width = size
    if frame.shape[:2] == size:
        return frame
    return np.asarray(Image.fromarray(frame).resize((width, height), Image.Resampling(settings["resample"])))
