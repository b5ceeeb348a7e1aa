"""Jobs of media processes, in JSON, and their answers. Content follows a job as bytes, or is in a private file."""

from typing import Any, Literal

import msgspec

from quire.text.workers.wire import TokenizerSource
from quire.types.media import Modality

# what the content of a job is: base64 text, the bytes of a file, or pixels of one image [height, width, 3] or of frames
# [frames, height, width, 3], or tensors (`quire.features.media.embeds`)
ContentKind = Literal["base64", "file", "pixels", "embeds"]


class MediaSource(msgspec.Struct, array_like=True):
    """What the processes read when they start."""

    path: str  # of the checkpoint
    tokenizer: TokenizerSource
    architecture: str
    config: dict[str, Any]  # the whole config.json with hf_overrides


class _Job(msgspec.Struct, array_like=True, tag=True):
    pass


class Warm(_Job):
    """Load what images need."""

    everything: bool  # False: the process only fetches


class Fetch(_Job):
    """Copy the content of a URL into the file `out`. The answer is its digest."""

    url: str
    domains: list[str]  # names of hosts, "host:port", which may have a private address, or "*"
    root: str  # below which files may be read; "": no files
    out: str
    seconds: float  # that it may take
    patience: float  # seconds after which it goes on only if it will end in time
    most: int  # bytes


class Process(_Job):
    """Make an item of a prompt out of its content."""

    modality: Modality
    kind: ContentKind
    path: str  # of the content; "": it follows the job as bytes
    shape: list[int]  # of pixels
    options: dict[str, Any]  # mm_processor_kwargs
    io: dict[str, Any]  # media_io_kwargs of the modality
    count: int  # images in the prompt, for families whose preprocessing depends on it
    out: str  # a file for the arrays; "": they are sent in the answer


class ArrayLayout(msgspec.Struct, array_like=True):
    name: str
    dtype: str
    shape: list[int]
    offset: int  # in the file
    data: bytes  # if there is no file


class ProcessedItem(msgspec.Struct, array_like=True):
    """The answer to `Process`."""

    digest: str
    in_file: bool
    arrays: list[ArrayLayout]
    tokens: list[int]
    before: str
    after: str
    embedded: list[tuple[int, int]]
    grid: tuple[int, int, int] | None
    interval: float


MediaJob = Warm | Fetch | Process
decode_job = msgspec.json.Decoder(MediaJob).decode
