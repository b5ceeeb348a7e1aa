"""Images and videos of a prompt, as they travel with a request to the engine."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Modality = Literal["image", "video"]
MODALITIES: tuple[Modality, ...] = ("image", "video")
# tokens that attend to later ones: those of one image to each other, all of a prompt with media, or none
Bidirectional = Literal["", "item", "prompt"]


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
    def first(self) -> int:
        """Return the first position whose embedding comes from the encoder."""
        return self.start + (self.embedded[0][0] if self.embedded else 0)

    @property
    def last(self) -> int:
        """Return the position after the last one whose embedding comes from the encoder."""
        return self.start + (sum(self.embedded[-1]) if self.embedded else self.length)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Return (first position, tokens) of the parts whose embeddings come from the encoder."""
        return tuple((self.start + offset, count) for offset, count in self.embedded or ((0, self.length),))

    @property
    def embeddings(self) -> int:
        """Return the number of tokens whose embeddings come from the encoder."""
        return sum(count for _, count in self.embedded) if self.embedded else self.length

    def next_embedded(self, position: int) -> int:
        """Return the first position from `position` on whose embedding comes from the encoder; there must be one."""
        return next(max(first, position) for first, count in self.spans if first + count > position)


class PromptPart(NamedTuple):
    """A range of prompt tokens with rotary positions of one kind: text, or one or more frames of an item with a grid.

    Text has one position per token. A token of a grid has the position of its frame, its row and its column, and what follows
    continues after the larger number of its rows and columns.
    """

    start: int  # position of the first token in the prompt
    tokens: int
    first: int  # rotary position where it begins
    item: MediaItem | None = None  # with a grid; None: text

    @property
    def frames(self) -> "npt.NDArray[np.int64]":
        """Return the rotary positions of the frames of a grid, counted from `first`."""
        import numpy as np  # commands that only read arguments do not need it

        assert self.item is not None and self.item.grid is not None
        _, rows, columns = self.item.grid
        count = self.tokens // (rows * columns)
        return (np.arange(count, dtype=np.float32) * np.float32(self.item.interval)).astype(np.int64)

    @property
    def highest(self) -> int:
        """Return the highest rotary position."""
        if self.item is None or self.item.grid is None:
            return self.first + self.tokens - 1
        return self.first + max(int(self.frames[-1]), *(side - 1 for side in self.item.grid[1:]))

    @property
    def following(self) -> int:
        """Return the rotary position of the token that follows."""
        if self.item is None or self.item.grid is None:
            return self.first + self.tokens
        return self.first + max(self.item.grid[1:])


def prompt_parts(items: Sequence[MediaItem], length: int) -> Iterator[PromptPart]:
    """Yield the parts of a prompt of `length` tokens. items: by rising position."""
    start = first = 0
    for item in items:
        for begin, count in item.spans if item.grid is not None else ():
            if begin > start:
                yield PromptPart(start, begin - start, first)
                first += begin - start
            yield (part := PromptPart(begin, count, first, item))
            start, first = begin + count, part.following
    if length > start:
        yield PromptPart(start, length - start, first)


def decode_offset(items: Sequence[MediaItem], length: int) -> int:
    """Return what is added to the position of a token after the prompt, to get its rotary position on all axes.

    Tokens after the prompt continue after its last token, so that they may become part of a longer prompt.
    """
    following = 0
    for part in prompt_parts(items, length):
        following = part.following
    return following - length


def highest_position(items: Sequence[MediaItem], length: int) -> int:
    """Return the highest rotary position of a prompt: a video's last frame may be later than the text after the video."""
    return max((part.highest for part in prompt_parts(items, length)), default=-1)


Mark = tuple[int, str]  # a position, and what the keys and values of its page and of all later ones depend on besides tokens
