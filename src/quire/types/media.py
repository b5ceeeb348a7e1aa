"""Images and videos of a prompt, as they travel with a request to the engine."""

from dataclasses import dataclass
from typing import Literal

Modality = Literal["image", "video"]
MODALITIES: tuple[Modality, ...] = ("image", "video")


@dataclass(frozen=True)
class MediaArray:
    """One array of an item's preprocessed features. The bytes are in `data` or, if `path` is set, in that file."""

    name: str  # as the image processor of transformers calls it, such as pixel_values
    dtype: str  # of numpy: float32, int64 or bool
    shape: tuple[int, ...]
    data: bytes = b""
    path: str = ""  # a file in shared memory that the API process owns
    offset: int = 0  # of the array in that file, in bytes


@dataclass(frozen=True)
class MediaItem:
    """An image or a video, and the range of prompt tokens that stands for it."""

    modality: Modality
    start: int  # position of the first token of the range in the prompt
    length: int  # tokens of the range
    digest: str  # hexadecimal SHA-256 of everything that the keys and values of the range depend on besides its tokens
    arrays: tuple[MediaArray, ...]
    # (offset from `start`, tokens) of the parts whose embeddings come from the encoder, rising; (): the whole range
    embedded: tuple[tuple[int, int], ...] = ()
    grid: tuple[int, int, int] | None = None  # (frames, rows, columns) of its embeddings; None: positions are sequential
    interval: float = 1.0  # rotary positions between two frames

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Return (first position, tokens) of the parts whose embeddings come from the encoder."""
        return tuple((self.start + offset, count) for offset, count in self.embedded or ((0, self.length),))

    @property
    def embeddings(self) -> int:
        """Return the number of tokens whose embeddings come from the encoder."""
        return sum(count for _, count in self.spans)
