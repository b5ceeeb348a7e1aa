"""The data set `random-mm`: messages of random words with random pictures and videos, each different.

Needs Pillow, and PyAV for videos. Pictures are smooth noise in JPEG: about as large as photographs of their size.
"""

import ast
import base64
import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from quire.bench.datasets import DatasetOptions, TokenCounter, around, random_samples
from quire.bench.samples import RandomPrompts, Sample
from quire.types.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image

Bucket = tuple[int, int, int]  # height, width and frames; one frame: a picture
BUCKETS: Mapping[Bucket, float] = {(256, 256, 1): 0.5, (720, 1280, 1): 0.5}
LIMITS: Mapping[str, int] = {"image": 255, "video": 1}
GRAIN = 32  # pixels from one random color to the next
FRAME_RATE = 8
MAX_SIDE, MAX_FRAMES = 16384, 1024


async def random_media_samples(options: DatasetOptions, alphabet: RandomPrompts, counter: TokenCounter) -> list[Sample]:
    """Return messages with random pictures before random words."""
    buckets, limits = read_buckets(options.random_mm_bucket_config), read_limits(options.random_mm_limit_mm_per_prompt)
    if not alphabet.text:
        raise ConfigError("--dataset-name random-mm has messages; use --backend openai-chat")
    rng = np.random.default_rng((options.seed, 2))
    base, ratio = options.random_mm_base_items_per_request, options.random_mm_num_mm_items_range_ratio
    samples = []
    for sample in await random_samples(options, alphabet, counter):
        chosen = choose(rng, around(rng, base, ratio, 0), buckets, limits)
        content = [media_part(rng, bucket) for bucket in chosen] + [{"type": "text", "text": sample.prompt}]
        samples.append(Sample(None, sample.output_tokens, messages=[{"role": "user", "content": content}]))
    return samples


def read_buckets(text: str | None) -> Mapping[Bucket, float]:
    """Return the shares of sizes, given as {(height, width, frames): share, ...}."""
    found = BUCKETS if text is None else _literal("random-mm-bucket-config", text)
    shares: dict[Bucket, float] = {}
    for size, share in found.items():
        if not (isinstance(size, tuple) and len(size) == 3 and all(type(each) is int and each >= 1 for each in size)):
            raise ConfigError(f"--random-mm-bucket-config: sizes are (height, width, frames) of at least 1; got {size!r}")
        if max(size[:2]) > MAX_SIDE or size[2] > MAX_FRAMES:
            raise ConfigError(f"--random-mm-bucket-config: sides are at most {MAX_SIDE}, frames {MAX_FRAMES}; got {size!r}")
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < float("inf"):
            raise ConfigError(f"--random-mm-bucket-config: the share of {size!r} must be a number of at least 0; got {share!r}")
        if share:
            shares[size] = share
    if not shares:
        raise ConfigError("--random-mm-bucket-config has no size with a share above 0")
    return shares


def read_limits(text: str | None) -> Mapping[str, int]:
    """Return the most items of a request by kind."""
    found = {} if text is None else _literal("random-mm-limit-mm-per-prompt", text)
    for name, count in found.items():
        if name not in LIMITS or type(count) is not int or count < 0:
            raise ConfigError(f'--random-mm-limit-mm-per-prompt has counts such as {{"image": 4, "video": 0}}; got {text}')
    return {**LIMITS, **found}


def _literal(flag: str, text: str) -> Mapping[Any, Any]:
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"--{flag} must be a dictionary; got {text[:80]}")
    return found


def choose(rng: np.random.Generator, count: int, shares: Mapping[Bucket, float], limits: Mapping[str, int]) -> list[Bucket]:
    """Return the sizes of a request's items. A kind that has reached its limit is not chosen again."""
    found: list[Bucket] = []
    left = dict(limits)
    for _ in range(count):
        possible = [size for size in shares if left[kind_of(size)] > 0]
        if not possible:
            break
        weights = np.array([shares[size] for size in possible])
        size = possible[int(rng.choice(len(possible), p=weights / weights.sum()))]
        left[kind_of(size)] -= 1
        found.append(size)
    return found


def kind_of(size: Bucket) -> str:
    return "image" if size[2] == 1 else "video"


def media_part(rng: np.random.Generator, size: Bucket) -> dict[str, Any]:
    """Return the part of a message with one random picture or video."""
    height, width, frames = size
    pictures = [_picture(rng, height, width) for _ in range(frames)]
    if frames == 1:
        buffer = io.BytesIO()
        pictures[0].save(buffer, "JPEG")
        return {"type": "image_url", "image_url": {"url": _data_url("image/jpeg", buffer.getvalue())}}
    return {"type": "video_url", "video_url": {"url": _data_url("video/mp4", _encode_video(pictures))}}


def _picture(rng: np.random.Generator, height: int, width: int) -> "Image":
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError("--dataset-name random-mm requires Pillow: pip install 'quire[vision]'") from None
    colors: npt.NDArray[np.uint8] = rng.integers(0, 256, (-(-height // GRAIN) + 1, -(-width // GRAIN) + 1, 3), dtype=np.uint8)
    return Image.fromarray(colors).resize((width, height), Image.Resampling.BICUBIC)


def _encode_video(pictures: "list[Image]") -> bytes:
    try:
        import av
    except ImportError:
        raise ConfigError("videos of --dataset-name random-mm require PyAV: pip install 'quire[vision]'") from None
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=FRAME_RATE)
        stream.width, stream.height = (each + each % 2 for each in pictures[0].size)
        stream.pix_fmt = "yuv420p"
        for picture in pictures:
            frame = av.VideoFrame.from_ndarray(np.asarray(picture.resize((stream.width, stream.height))), "rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


def _data_url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
