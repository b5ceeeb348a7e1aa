"""What a family of models that read images and videos has to define."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from quire.types.media import Bidirectional, Modality

if TYPE_CHECKING:
    import numpy as np

Arrays = Mapping[str, "np.ndarray[Any, Any]"]
Tokenize = Callable[[str], list[int]]  # without special tokens at the ends; names of special tokens are read as such


@dataclass(frozen=True)
class Expansion:
    """The prompt tokens of one item. See `MediaItem` for the other fields."""

    tokens: list[int]
    # text around the placeholder, tokenized with the prompt: adjacent newlines may become one token
    before: str = ""
    after: str = ""
    embedded: tuple[tuple[int, int], ...] = ()
    grid: tuple[int, int, int] | None = None
    interval: float = 1.0


@dataclass(frozen=True)
class Video:
    """Decoded frames of a video."""

    frames: "np.ndarray[Any, Any]"  # [frames, height, width, 3] uint8
    seconds: Sequence[float]  # when each frame is shown
    frame_rate: float  # frames per second of the source
    duration: float | None = None  # of the source in seconds; None: unknown


class MediaFamily(ABC):
    """One architecture with its configuration."""

    modalities: ClassVar[tuple[Modality, ...]] = ("image",)
    tower: ClassVar[str]  # "module:Class" below quire.features.media.towers
    bidirectional: ClassVar[Bidirectional] = ""  # "item": tokens of one range of `embedded` attend to each other
    rotary_axes: ClassVar[int] = 1  # 3: rotary positions have a frame, a row and a column (M-RoPE)
    levels: ClassVar[int] = 1  # embeddings per token: for the input, and for the first layers (deep stack)
    adds_special_tokens: ClassVar[bool] = True  # False: the text of a prompt with media is tokenized without them
    together: ClassVar[int | None] = None  # most embeddings that the encoder computes at a time, unless one image has more
    depends_on_count: ClassVar[bool] = False  # preprocessing depends on the number of images in the prompt
    # shapes of the tensors that an image's embeddings come with, if a request brings them; None: it may not
    embeds_fields: ClassVar[Mapping[str, tuple[int, ...]] | None] = None

    def __init__(self, config: Mapping[str, Any]) -> None:
        """config: the whole config.json of the checkpoint."""
        self.config = config

    @abstractmethod
    def placeholder(self, modality: Modality) -> str:
        """Return the text that chat templates write for one item, and that users write in prompts of `LLM.generate`."""

    @abstractmethod
    def expand(self, modality: Modality, arrays: Arrays, tokenize: Tokenize) -> Expansion:
        """Return the tokens that replace the placeholder of an item."""

    @abstractmethod
    def max_tokens(self, modality: Modality, processor: Mapping[str, Any]) -> int:
        """Return the most embeddings that one item can have. processor: preprocessor_config.json or processor_config.json."""

    def preprocess_image(self, image: Any, processor: Any, options: Mapping[str, Any], count: int) -> Arrays:  # noqa: ARG002
        """Return the arrays of one image, as the family's image processor makes them for a prompt with that image alone.

        image: a PIL image in RGB. processor: the image processor of transformers. options: mm_processor_kwargs.
        count: images in the prompt; only used if `depends_on_count`.
        """
        found: Arrays = dict(processor(images=[image], return_tensors="np", **options))
        return found

    def arrays_of_embeds(self, count: int, fields: Arrays) -> Arrays:  # noqa: ARG002
        """Return arrays for `expand` of an image that is given as `count` embeddings. fields: those of `embeds_fields`."""
        return fields

    def preprocess_video(self, video: Video, processor: Any, options: Mapping[str, Any]) -> Arrays:
        """Return the arrays of one video.

        processor: the image processor of transformers. options: mm_processor_kwargs over the checkpoint's own settings of
        videos (video_preprocessor_config.json or `video_processor` of processor_config.json), if it has any.
        """
        raise NotImplementedError

    def rotary_axes_of(self, sections: Sequence[int] | None, count: int) -> Sequence[int]:
        """Return which axis turns each of `count` rotary frequencies: 0 frames, 1 rows, 2 columns. Only with three axes.

        sections: `mrope_section` of the checkpoint's rope parameters
        """
        raise NotImplementedError

    def complete_text(self, text: str, images: int) -> str:  # noqa: ARG002
        """Return a prompt as the processor of the family writes it before placeholders are expanded and it is tokenized.

        images: images that come with the prompt.
        """
        return text
