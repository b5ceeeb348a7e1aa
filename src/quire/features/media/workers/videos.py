"""Decode frames of a video, in a media process, with PyAV."""

import io
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from quire.features.media.families.base import Video
from quire.features.media.io_options import MAX_FRAMES
from quire.features.media.workers.images import check_size
from quire.types.errors import InvalidParameter, NotSupported

if TYPE_CHECKING:
    import numpy as np

DEFAULT_FRAMES = 32
MAX_SOURCE_FRAMES = 100_000
MAX_KEPT_PIXELS = 512_000_000  # of all kept frames together
DECODE_SECONDS = 40.0  # of processor time for the frames of a video
DECODE_PATIENCE_S = 1.5  # of processor time, after which decoding goes on only if it will end in time


class _FewerFrames(Exception):
    """The file has fewer frames than its header counts."""

    def __init__(self, count: int) -> None:
        self.count = count


def decode_video(data: bytes, options: dict[str, Any]) -> Video:
    """Return frames at equal distances. options: num_frames (32; -1: as many as possible) and fps (-1: any)."""
    if find_spec("av") is None:
        raise NotSupported("videos require PyAV: pip install 'quire[vision]' on the server")
    try:
        try:
            return _decode(data, options)
        except _FewerFrames as found:
            return _decode(data, options, found.count)
    except (InvalidParameter, NotSupported, MemoryError):
        raise
    except Exception:  # decoders fail in any way with broken files
        raise InvalidParameter("the video is broken or of no known format") from None


def _decode(data: bytes, options: dict[str, Any], counted: int = 0) -> Video:
    """counted: frames of the file; 0: those of its header"""
    import av

    with av.open(io.BytesIO(data), mode="r", metadata_errors="ignore") as container:
        if not container.streams.video:
            raise InvalidParameter("the video has no frames")
        stream = container.streams.video[0]
        check_size(stream.codec_context.width, stream.codec_context.height, "video")
        rate = float(stream.average_rate or stream.guessed_rate or 1)
        count = counted or stream.frames or _count(data)
        wanted = wanted_frames(count, rate, options)
        check_kept(len(wanted), stream.codec_context.height, stream.codec_context.width)
        return _keep(container.decode(stream), wanted, rate, count)


def wanted_frames(count: int, rate: float, options: dict[str, Any]) -> list[int]:
    """Return the indices of the frames to keep. count: frames of the video."""
    if not 1 <= count <= MAX_SOURCE_FRAMES:
        raise InvalidParameter(f"the video has {count} frames; 1 to {MAX_SOURCE_FRAMES} are supported. Send a shorter one")
    most = options.get("num_frames", DEFAULT_FRAMES)
    most = MAX_FRAMES if most in (None, -1) else most
    fps = options.get("fps", -1)
    kept = min(count, most) if fps == -1 else min(count, most, max(1, int(count / rate * fps)))
    return [0] if kept == 1 else [round(i * (count - 1) / (kept - 1)) for i in range(kept)]


def check_kept(frames: int, height: int, width: int) -> None:
    check_size(width, height, "video")
    if frames > MAX_FRAMES or frames * height * width > MAX_KEPT_PIXELS:
        raise InvalidParameter(
            f"the video has {frames} frames of {width} x {height} pixels; at most {MAX_FRAMES} frames and "
            f"{MAX_KEPT_PIXELS // 10**6} million pixels together are supported. Set num_frames in media_io_kwargs"
        )


def video_of_pixels(frames: "np.ndarray[Any, Any]", rate: float) -> Video:
    """frames: [frames, height, width, 3] uint8. rate: frames per second"""
    check_kept(*frames.shape[:3])
    return Video(frames, [i / rate for i in range(len(frames))], rate, len(frames) / rate)


def _count(data: bytes) -> int:
    """Return the frames of a file whose header does not count them."""
    import av

    with av.open(io.BytesIO(data), mode="r", metadata_errors="ignore") as container:
        count = 0
        for packet in container.demux(container.streams.video[0]):
            count += packet.size > 0
            if count > MAX_SOURCE_FRAMES:
                break
        return count


def _keep(frames: Any, wanted: list[int], rate: float, count: int) -> Video:
    import numpy as np

    kept: list[Any] = []
    seconds: list[float] = []
    decoded, indices, begun = 0, set(wanted), time.process_time()
    for i, frame in enumerate(frames):
        _check_time(time.process_time() - begun, (i + 1) / (wanted[-1] + 1))
        check_size(frame.width, frame.height, "video")  # a stream may change its size
        decoded = i + 1
        if i in indices:
            kept.append(frame.to_ndarray(format="rgb24"))
            seconds.append(i / rate)
        if i >= wanted[-1]:
            break
    if not decoded:
        raise InvalidParameter("the video has no frames")
    if len(kept) < len(wanted) - 1:  # headers often count one too many
        raise _FewerFrames(decoded)
    if not kept or len({frame.shape for frame in kept}) != 1:
        raise InvalidParameter("the frames of the video differ in size")
    return Video(np.stack(kept), seconds, rate, count / rate)


def _check_time(spent: float, share: float) -> None:
    """Raise an error if decoding will take too long, judged by the share that is done."""
    if spent > DECODE_PATIENCE_S and spent > DECODE_SECONDS * share:
        raise InvalidParameter(
            f"decoding the video would take more than {DECODE_SECONDS:g} s of processor time. Send a shorter or smaller one"
        )
