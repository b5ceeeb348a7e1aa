"""A media process: `python -m quire.features.media.workers.worker SOCKET SOURCE [with-thread]`. SOCKET is an inherited
descriptor, SOURCE the name of a file with a `wire.MediaSource`, or "" for a process that only fetches.

It does one job at a time, within bounds of processor time and memory, and ends when the other side closes the socket. A fork
server (`preload`) starts it with image processor and tokenizer in memory; without one, it reads them itself.
"""

import base64
import binascii
import contextlib
import hashlib
import logging
import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from quire.features.media.embeds import EMBEDS
from quire.features.media.families.base import Arrays, Expansion, Video
from quire.features.media.store import open_for_writing
from quire.features.media.workers import wire
from quire.features.media.workers.checkpoint import open_checkpoint
from quire.features.media.workers.fetch import fetch
from quire.proc.bounded import MB, Bounded, Bounds, held_bytes, trim_heap
from quire.proc.channel import Frames
from quire.proc.spawn import set_up
from quire.text.workers.wire import LAST, FrameWriter, refusal
from quire.types.errors import InvalidParameter, NotSupported, RequestError
from quire.types.media import Modality

TRIM_GROWTH = 16 * MB  # a process that holds this much more after a job than after its start returns what it does not use
GROWTH = 256 * MB  # a process that holds this much more after a job than after its start ends
MAX_ARRAY_BYTES = 1024 * MB  # of one item
MAX_TOKENS = 1 << 20  # of one item
SHARED_SPARE_BYTES = 64 * MB  # room that is left in the file system of shared files
BOUNDS = {
    "image": Bounds(15.0, 4096 * MB, "reading the image", None),
    "video": Bounds(60.0, 6144 * MB, "reading the video", None),
}
T = TypeVar("T")
logger = logging.getLogger(__name__)
MAX_VALUE = 65504.0  # of a pixel after preprocessing: the largest float16; the model overflows with larger ones
_DTYPES = {"f": "float32", "i": "int64", "u": "float32", "b": "bool"}  # u: pixels that were not rescaled


class MediaWorker:
    def __init__(self, frames: Frames, source: str) -> None:
        self._frames, self._checkpoint = frames, open_checkpoint(source)
        self._start_bytes: int | None = None

    def run(self) -> None:
        while (head := self._frames.wait()) is not None and (blob := self._frames.wait()) is not None:
            frames = self._answer(head, blob)
            del head, blob  # not to be held until the next job
            last = self._grew()
            if last:
                frames[-1] = LAST[frames[-1][:1]] + frames[-1][1:]
            while frames:
                self._frames.send(frames.pop(0))
            if last:
                return

    def _answer(self, head: bytes, blob: bytes) -> list[bytes]:
        try:
            return list(FrameWriter().frames(self._do(wire.decode_job(head), blob)))
        except msgspec.ValidationError as error:
            return [refusal(InvalidParameter(f"the request cannot be read: {error}"))]
        except RequestError as error:
            return [refusal(error)]

    def _do(self, job: wire.MediaJob, blob: bytes) -> Any:
        match job:
            case wire.Warm():
                if job.everything:
                    with contextlib.suppress(Exception):  # the first item is refused
                        self._checkpoint.load()
                return True
            case wire.Fetch():
                return fetch(job)
            case wire.Process():
                self._load(job.modality)  # which is not the job's cost
                with Bounded(BOUNDS[job.modality]):
                    return msgspec.to_builtins(self._process(job, blob), builtin_types=(bytes,))

    def _load(self, modality: Modality) -> None:
        try:
            self._checkpoint.load()
        except Exception as error:
            logger.exception("the image processor or the tokenizer of the checkpoint cannot be loaded")
            reason = f"{modality} input is not supported: the checkpoint's image processor or tokenizer cannot be loaded"
            raise NotSupported(f"{reason} ({type(error).__name__}; the server's log has the reason)", "messages") from error

    # ---- one item

    def _process(self, job: wire.Process, blob: bytes) -> wire.ProcessedItem:
        data = Path(job.path).read_bytes() if job.path else blob
        data = decode_base64(data) if job.kind == "base64" else data
        digest = hashlib.sha256(msgspec.json.encode((job.modality, job.options, job.count)))
        arrays, expansion = (self._embeds if job.kind == "embeds" else self._encoder_input)(job, data, digest)
        if len(expansion.tokens) > MAX_TOKENS:
            raise InvalidParameter(f"the {job.modality} has {len(expansion.tokens)} tokens; at most {MAX_TOKENS} are supported")
        places, in_file = write_arrays(arrays, job.out)
        return wire.ProcessedItem(
            digest.hexdigest(), in_file, places, [int(token) for token in expansion.tokens], expansion.before, expansion.after,
            [(int(start), int(count)) for start, count in expansion.embedded], expansion.grid, float(expansion.interval),
        )  # fmt: skip

    def _embeds(self, job: wire.Process, data: bytes, digest: Any) -> tuple[Arrays, Expansion]:
        from quire.features.media.workers.embeds import expand_embeds, read_embeds

        arrays = read_embeds(data, self._checkpoint.family, MAX_ARRAY_BYTES)
        for name, array in arrays.items():
            digest.update(msgspec.json.encode(("embeds", name, array.shape)))
            digest.update(array.data)
        expansion = self._refusing(lambda: expand_embeds(arrays, self._checkpoint.family, self._tokenize), job)
        return {EMBEDS: arrays[EMBEDS]}, expansion

    def _encoder_input(self, job: wire.Process, data: bytes, digest: Any) -> tuple[Arrays, Expansion]:
        arrays = self._arrays(job, data, digest)
        if job.options:
            _check_values(arrays)
        family = self._checkpoint.family
        return arrays, self._refusing(lambda: family.expand(job.modality, arrays, self._tokenize), job)

    def _tokenize(self, text: str) -> list[int]:
        found: list[int] = self._checkpoint.tokenizer.encode(text, add_special_tokens=False)
        return found

    def _arrays(self, job: wire.Process, data: bytes, digest: Any) -> Arrays:
        family, processor = self._checkpoint.family, self._checkpoint.processor
        if job.modality == "video":
            video = self._video(job, data)
            digest.update(msgspec.json.encode((video.frames.shape, list(video.seconds), video.frame_rate, video.duration)))
            digest.update(video.frames.data)
            return self._refusing(
                lambda: family.preprocess_video(video, processor, {**self._checkpoint.video_settings, **job.options}), job
            )
        from quire.features.media.workers.images import decode_image, image_of_pixels

        image = image_of_pixels(data, job.shape) if job.kind == "pixels" else decode_image(data, job.io)
        digest.update(msgspec.json.encode(image.size))
        digest.update(image.tobytes())
        return self._refusing(lambda: family.preprocess_image(image, processor, job.options, job.count), job)

    def _video(self, job: wire.Process, data: bytes) -> Video:
        import numpy as np

        from quire.features.media.workers.videos import decode_video, video_of_pixels

        if job.kind != "pixels":
            return decode_video(data, job.io)
        return video_of_pixels(np.frombuffer(data, np.uint8).reshape(job.shape), float(job.io.get("fps") or 1.0))

    def _refusing(self, work: Callable[[], T], job: wire.Process) -> T:
        """Do work of the image processor, which refuses images and options with errors of any kind."""
        try:
            return work()
        except (RequestError, MemoryError, RecursionError):
            raise
        except Exception as error:
            if job.options:
                reason = f"cannot be processed with these mm_processor_kwargs: {type(error).__name__}"
                named = next((name for name in job.options if repr(name) in str(error)), None)
                if named is not None:
                    known = _options_of(self._checkpoint.processor)
                    has = f": the image processor has {', '.join(known)}" if known and named not in known else ""
                    reason += f" at {named!r:.80}{has}. Change or remove it"
                raise InvalidParameter(f"the {job.modality} {reason}", "mm_processor_kwargs") from error
            raise InvalidParameter(f"the {job.modality} cannot be processed: {type(error).__name__}") from error

    def _grew(self) -> bool:
        held = held_bytes()
        if held is None:
            return False
        if self._start_bytes is None:  # after `Warm`
            self._start_bytes = held
        if held > self._start_bytes + TRIM_GROWTH:
            trim_heap()
            held = held_bytes() or held
        return held > self._start_bytes + GROWTH


def _options_of(processor: Any) -> list[str]:
    """Return the names of the options that an image processor of transformers declares and has values for."""
    declared = getattr(getattr(processor, "valid_kwargs", None), "__annotations__", {})
    return sorted(name for name in declared if getattr(processor, name, None) is not None)


def _check_values(arrays: Arrays) -> None:
    """Raise an error for pixels that options of the image processor made too large for the model."""
    import numpy as np

    for value in arrays.values():
        if value.dtype.kind == "f" and not np.abs(value).max(initial=0.0) <= MAX_VALUE:  # also if it is NaN
            reason = "make pixels too large for the model, or no numbers. Check image_mean, image_std and rescale_factor"
            raise InvalidParameter(f"mm_processor_kwargs {reason}", "mm_processor_kwargs")


def decode_base64(text: bytes) -> bytes:
    try:
        return base64.b64decode(text.translate(None, b" \t\r\n"), validate=True)
    except binascii.Error:
        raise InvalidParameter("its base64 is not valid") from None


def write_arrays(arrays: Arrays, out: str) -> tuple[list[wire.ArrayLayout], bool]:
    """Write the arrays to a file, if it is given, is still there and has room; return where they are, and whether that is in
    the file."""
    import numpy as np

    values = {name: np.ascontiguousarray(value) for name, value in arrays.items()}
    values = {name: value.astype(_DTYPES[value.dtype.kind], copy=False) for name, value in values.items()}
    total = sum(value.nbytes for value in values.values())
    if total > MAX_ARRAY_BYTES:
        raise InvalidParameter(f"its preprocessed values take {total >> 20} MB; at most {MAX_ARRAY_BYTES >> 20} are supported")
    in_file = bool(out) and _write(out, [value.tobytes() for value in values.values()], total)
    places, offset = [], 0
    for name, value in values.items():
        data = b"" if in_file else value.tobytes()
        places.append(wire.ArrayLayout(name, str(value.dtype), list(value.shape), offset if in_file else 0, data))
        offset += value.nbytes
    return places, in_file


def _write(out: str, pieces: Sequence[Any], total: int) -> bool:
    with contextlib.suppress(OSError):
        room = os.statvfs(Path(out).parent)
        if room.f_bavail * room.f_frsize < total + SHARED_SPARE_BYTES:
            return False
        with open_for_writing(out) as file:
            try:
                file.writelines(pieces)
                file.flush()
                return True
            except OSError:
                file.truncate(0)
    return False


def main(argv: Sequence[str]) -> int:
    set_up("media", argv, descriptors=argv[:1])
    frames = Frames(socket.socket(fileno=int(argv[0])))
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the other side is gone
        MediaWorker(frames, argv[1]).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
