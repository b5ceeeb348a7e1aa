"""media_io_kwargs: how files become pixels, by kind of media."""

from collections.abc import Mapping
from typing import Any

from quire.files.reading import shown
from quire.types.checks import check_int
from quire.types.errors import InvalidParameter, NotSupported
from quire.types.media import MODALITIES, Modality

FIELD = "media_io_kwargs"
MAX_FRAMES = 768  # of one video for the model
MAX_FPS = 1000
WHITE = (255, 255, 255)
OPTIONS: Mapping[Modality, tuple[str, ...]] = {
    "image": ("image_mode", "rgba_background_color"),
    "video": ("num_frames", "fps"),
}


def check_io(kinds: Mapping[str, Any]) -> None:
    """Raise an error for media_io_kwargs with a value that is not supported."""
    for kind, options in kinds.items():
        modality = next((each for each in MODALITIES if each == kind), None)
        if modality is None:
            raise NotSupported(f"{FIELD} has no {shown(kind)}; it has {' and '.join(MODALITIES)}", FIELD)
        if not isinstance(options, Mapping):
            raise InvalidParameter(f"{FIELD}.{kind} must be an object; got {type(options).__name__}", FIELD)
        for name in options:
            if name not in OPTIONS[modality]:
                has = " and ".join(OPTIONS[modality])
                raise NotSupported(f"{FIELD}.{kind} has no {shown(name)}; it has {has}", FIELD)
        (_check_image if kind == "image" else _check_video)(options)


def _check_image(options: Mapping[str, Any]) -> None:
    if options.get("image_mode", "RGB") != "RGB":
        raise NotSupported(f'{FIELD}.image.image_mode must be "RGB"; got {shown(options["image_mode"])}', FIELD)
    color = options.get("rgba_background_color", WHITE)
    if not isinstance(color, list | tuple) or len(color) != 3 or not all(type(one) is int and 0 <= one <= 255 for one in color):
        raise InvalidParameter(
            f"{FIELD}.image.rgba_background_color must have three integers from 0 to 255; got {shown(color)}", FIELD
        )


def _check_video(options: Mapping[str, Any]) -> None:
    if options.get("num_frames") not in (None, -1):
        check_int(f"{FIELD}.video.num_frames", options["num_frames"], 1, MAX_FRAMES)
    fps = options.get("fps", -1)
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not (fps == -1 or 0 < fps <= MAX_FPS):
        raise InvalidParameter(f"{FIELD}.video.fps must be above 0 and at most {MAX_FPS}, or -1; got {shown(fps)}", FIELD)
