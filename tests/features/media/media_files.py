"""Pictures in every format and shape, good and hostile, and a reader of media for the small trained model."""

import asyncio
import io
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from quire.config.args import EngineArgs
from quire.config.resolve import resolve
from quire.device.registry import describe
from quire.features.media.reader import MediaReader
from quire.text.tokenizer_files import open_tokenizer

READER = Path(__file__).parents[2] / "fixtures" / "reader-llava"
FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF")


def picture(width: int = 40, height: int = 30, mode: str = "RGB", seed: int = 0) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(values).convert(mode)


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def png(width: int, height: int, rows: bytes = b"") -> bytes:
    """Return a PNG with these rows, whose header need not fit them."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def hostile() -> dict[str, bytes]:
    """Files that must be refused, by what is wrong with them."""
    files = {
        "empty": b"",
        "text": b"hello",
        "a bomb": png(60_000, 60_000),
        "beyond all integers": png(2**31 - 1, 2**31 - 1),
        "100 megapixels": png(10_000, 10_000),
        "no pixels": png(0, 10),
        "a header that lies": png(5_000, 5_000, b"\0" * 1000),
        "one pixel wide": encoded(Image.new("1", (1, 60_000))),
        "one pixel high": encoded(Image.new("1", (60_000, 1))),
        "svg": b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"></svg>',
        "svg in xml": b'<?xml version="1.0"?>\n<!-- a --><svg width="9" height="9"></svg>',
        "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n",
    }
    gif = bytearray(encoded(picture(mode="P"), "GIF"))
    gif[6:10] = struct.pack("<HH", 65535, 65535)
    files["a large gif"] = bytes(gif)
    bmp = bytearray(encoded(picture(), "BMP"))
    bmp[18:26] = struct.pack("<ii", 30_000, 30_000)
    files["a large bmp"] = bytes(bmp)
    return files | many_segments()


def many_segments() -> dict[str, bytes]:
    """Files whose segments take a decoder long to read, and have nothing in them."""
    small = Image.new("L", (2, 2))
    jpeg, png_file, gif = (encoded(small, form) for form in ("JPEG", "PNG", "GIF"))
    after_table = len(gif) - len(gif.partition(b"\x2c")[2]) - 1
    chunk = struct.pack(">I", 0) + b"abCd" + struct.pack(">I", zlib.crc32(b"abCd"))
    return {
        "a jpeg of fill bytes": jpeg[:2] + b"\xff" * (1 << 18) + jpeg[2:],
        "a jpeg of empty segments": jpeg[:2] + b"\xff\xe5\x00\x02" * (1 << 16) + jpeg[2:],
        "a jpeg of segments after its scan": jpeg[:-2] + b"\xff\xe5\x00\x02" * (1 << 16) + b"\xff\xda\x00\x02" * 60,
        "a png of empty chunks": png_file[:33] + chunk * (1 << 16) + png_file[33:],
        "a gif of comments": gif[:after_table] + b"\x21\xfe\x01a\x00" * (1 << 16) + gif[after_table:],
    }


def clip(frames: int, width: int = 16, height: int = 16) -> bytes:
    """A video of 25 frames per second."""
    import av

    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=25)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for i in range(frames):
            frame = av.VideoFrame.from_ndarray(np.full((height, width, 3), i % 256, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return out.getvalue()


def many_scans() -> bytes:
    """A JPEG that passes over its pixels again and again."""
    data = encoded(Image.new("L", (2000, 2000), 128), "JPEG", progressive=True)
    last = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + 100 * last + data[-2:]


def truncated(form: str) -> Iterator[bytes]:
    whole = encoded(picture(), form)
    for tenth in range(10):
        yield whole[: len(whole) * tenth // 10]


def unusual() -> dict[str, bytes]:
    """Files that must be read, by what is unusual about them."""
    exif = Image.Exif()
    exif[0x0112] = 6
    frames = [picture(seed=i).convert("P") for i in range(3)]
    sixteen = Image.fromarray((np.arange(1200, dtype=np.uint16) * 50).reshape(30, 40))
    return {
        **{form: encoded(picture(), form) for form in FORMATS},
        "cmyk": encoded(picture(mode="CMYK"), "JPEG"),
        "gray": encoded(picture(mode="L")),
        "black and white": encoded(picture(mode="1")),
        "palette": encoded(picture(mode="P")),
        "alpha": encoded(picture(mode="RGBA")),
        "gray and alpha": encoded(picture(mode="LA")),
        "16 bits": encoded(sixteen),
        "16 bits in tiff": encoded(sixteen, "TIFF"),
        "floats": encoded(Image.fromarray(np.ones((30, 40), np.float32)), "TIFF"),
        "turned": encoded(picture(), "JPEG", exif=exif),
        "animated": encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "progressive": encoded(picture(), "JPEG", progressive=True),
        "one pixel": encoded(Image.new("RGB", (1, 1))),
        "long": encoded(Image.new("L", (1, 200))),
    }


class Reading:
    """A reader of media, and an event loop for it."""

    def __init__(self, **args: Any) -> None:
        settings = EngineArgs.from_kwargs(**{"model": str(READER), "device": "cpu", **args})
        self.config = resolve(settings, lambda: "cpu", describe)
        self.tokenizer = open_tokenizer(self.config)
        self.reader = MediaReader(self.config, self.tokenizer)
        self.loop = asyncio.new_event_loop()

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, 120))

    async def encode(self, text: str, special: bool) -> list[int]:
        return self.tokenizer.encode(text, special)

    def close(self) -> None:
        self.reader.stop()
        self.run(asyncio.sleep(0.01))
        self.loop.close()


@contextmanager
def reading(**args: Any) -> Iterator[Reading]:
    made = Reading(**args)
    try:
        yield made
    finally:
        made.close()


def refusal(work: Callable[[], Any], kind: type[Exception]) -> str:
    try:
        work()
    except kind as error:
        return str(error)
    raise AssertionError("it was not refused")
