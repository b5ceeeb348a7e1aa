"""Decode an image to RGB, in a media process. Its size is read from the header and refused before it is decoded."""

import contextlib
import io
import re
import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from quire.features.media.io_options import WHITE
from quire.types.errors import InvalidParameter, NotSupported

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 64_000_000
MAX_RATIO = 200  # of the longer side to the shorter
MAX_SCANS = 40  # of a JPEG: each passes over all of its pixels
MAX_SEGMENTS = 1 << 15  # of a file, which are parsed in Python
MAX_READS = 4 * MAX_SEGMENTS  # by which Pillow reads the segments
FORMATS = ("PNG", "JPEG", "MPO", "GIF", "WEBP", "BMP", "TIFF", "AVIF")
_NAMES = "PNG, JPEG, GIF, WebP, BMP, TIFF and AVIF"
_MODULES = {"WEBP": "WebP"}
_START_OF_SCAN = b"\xff\xda"  # of a JPEG
_SEGMENT = re.compile(rb"\xff+([^\x00\x01\xd0-\xd9\xff])", re.DOTALL)  # the begin of one that has a length
NO_OPTIONS: Mapping[str, Any] = {}


def decode_image(data: bytes, options: Mapping[str, Any] = NO_OPTIONS) -> "Image":
    """Return the image in RGB, rotated by its EXIF orientation; of an animation the first frame. options: media_io_kwargs"""
    from PIL import Image, ImageFile

    if is_svg(data):
        raise NotSupported(f"SVG is not supported; {_NAMES} are. Send it as PNG")
    Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES = None, False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(_File(data), formats=_formats()) as image:
                check_size(*image.size)
                if image.format in ("JPEG", "MPO"):
                    _check_scans(data)
                image.load()
                return to_rgb(image, options)
    except (InvalidParameter, MemoryError):
        raise
    except Exception as error:  # decoders fail in any way with broken files
        kind = "of no known format" if type(error).__name__ == "UnidentifiedImageError" else "broken or truncated"
        raise InvalidParameter(f"the image is {kind}; {_NAMES} are supported") from None


class _File(io.BytesIO):
    """A file that may be read in at most MAX_READS steps: millions of empty segments would take minutes."""

    _reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self._reads += 1
        if self._reads > MAX_READS:
            raise _too_many_segments()
        return super().read(size)


@cache
def _formats() -> tuple[str, ...]:
    """Return the formats that this build of Pillow reads."""
    from PIL import Image

    for name in FORMATS:
        with contextlib.suppress(ImportError):
            import_module(f"PIL.{_MODULES.get(name, name.capitalize())}ImagePlugin")
    return tuple(name for name in FORMATS if name in Image.OPEN)


def check_size(width: int, height: int, what: str = "image") -> None:
    if width < 1 or height < 1:
        raise InvalidParameter(f"the {what} has no pixels")
    if width * height > MAX_PIXELS:
        raise InvalidParameter(
            f"the {what} has {width} x {height} pixels; at most {MAX_PIXELS // 10**6} million are supported. Send a smaller one"
        )
    if max(width, height) > MAX_RATIO * min(width, height):
        raise InvalidParameter(
            f"the {what} has {width} x {height} pixels; one side may be at most {MAX_RATIO} times the other. Crop it"
        )


def _check_scans(data: bytes) -> None:
    """Raise an error for a JPEG whose number of scans would make decoding slow."""
    if data.count(_START_OF_SCAN) > MAX_SCANS and (scans := list(_markers(data)).count(_START_OF_SCAN[1])) > MAX_SCANS:
        raise InvalidParameter(f"the image has {scans} scans; at most {MAX_SCANS} are supported. Save it anew")


def _markers(data: bytes) -> Iterator[int]:
    """Yield the marker of each segment of a JPEG. Segments are skipped as a whole: a color profile may have any bytes."""
    end = 0
    for _ in range(MAX_SEGMENTS):
        if (found := _SEGMENT.search(data, end)) is None:
            return
        yield found[1][0]
        end = found.end() + int.from_bytes(data[found.end() : found.end() + 2])
    raise _too_many_segments()


def _too_many_segments() -> InvalidParameter:
    return InvalidParameter("the image has too many segments. Save it anew")


def image_of_pixels(data: bytes, shape: list[int]) -> "Image":
    """shape: [height, width, 3]"""
    from PIL import Image

    height, width, _ = shape
    check_size(width, height)
    return Image.frombytes("RGB", (width, height), data)


def is_svg(data: bytes) -> bool:
    start = data[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    return start.startswith(b"<svg") or (start.startswith((b"<?xml", b"<!doctype", b"<!--")) and b"<svg" in data[:4096].lower())


def to_rgb(image: "Image", options: Mapping[str, Any] = NO_OPTIONS) -> "Image":
    """Return the image in RGB, rotated by its EXIF orientation, on a background where it is transparent."""
    from PIL import Image, ImageOps

    with contextlib.suppress(Exception):  # of broken EXIF data, not of the image
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16") or image.mode == "I":
        image = _in_8_bits(image)
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.has_transparency_data:
        image = image.convert("RGBA")
        flat = Image.new("RGB", image.size, tuple(options.get("rgba_background_color", WHITE)))
        flat.paste(image, mask=image.getchannel("A"))
        return flat
    return image.convert("RGB")


def _in_8_bits(image: "Image") -> "Image":
    """Keep the upper 8 of 16 bits; Pillow would cut off what is above 255."""
    import numpy as np
    from PIL import Image

    values: Any = np.asarray(image)
    if image.mode != "I":
        return Image.fromarray((values >> 8).astype(np.uint8))
    if values.max(initial=0) > 255:
        values = np.clip(values, 0, 65535) >> 8
    return Image.fromarray(np.clip(values, 0, 255).astype(np.uint8))
