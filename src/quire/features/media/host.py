# ruff: noqa: RUF009 - `setting` makes a dataclass field
"""Images and videos: arguments, limits, and the memory of encoder and encoder cache.

A model reads media if its architecture has a family (`families/`) and the arguments do not turn all kinds of media off.
Otherwise it reads text only, and `why_no_media` says why.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from quire.config.families.composites import COMPOSITES
from quire.config.fields import FLAG, LIST, NUMBER, OBJECT, REAL, TEXT, setting
from quire.config.hf import read_json, whole_config
from quire.config.memory import estimate_parameters, largest_step
from quire.features.host import Conflict, Feature, Memory, Sizes
from quire.features.media.families import media_family
from quire.features.media.families.base import MediaFamily
from quire.features.media.io_options import check_io
from quire.features.pooling.host import find_pooling
from quire.files.reading import reading
from quire.files.safetensors import read_header
from quire.types.cache import DTYPE_BYTES
from quire.types.errors import ConfigError, RequestError
from quire.types.media import MODALITIES, Modality

if TYPE_CHECKING:
    from quire.config.config import Config
    from quire.config.facts import ModelFacts

logger = logging.getLogger(__name__)
DEFAULT_LIMIT = 999  # items of a kind in one prompt
PROFILE_OPTIONS = ("num_frames", "width", "height", "length", "num_crops")  # of a limit in vLLM; they size its memory profile
CACHED_STEPS = 4  # largest steps whose embeddings the encoder cache holds
PATCHES = 4  # of the encoder for each embedding, in models that merge two by two
_GROUP = "images and video"


@dataclass
class MediaArgs:
    limit_mm_per_prompt: dict[str, Any] = setting(
        {}, OBJECT, _GROUP, f"most items of a prompt by kind, such as {{\"image\": 4, \"video\": 0}}; default: "
        f"{DEFAULT_LIMIT}; 0 for all kinds: the encoder is not loaded", after="lora_dtype",
    )  # fmt: skip
    mm_processor_kwargs: dict[str, Any] | None = setting(
        None, OBJECT, _GROUP, "default options of the model's image processor, such as max_pixels; requests may override them",
        after="limit_mm_per_prompt",
    )  # fmt: skip
    mm_processor_cache_gb: float = setting(
        4, REAL, _GROUP, "GiB of processed images and videos that the server keeps, so that repeated ones are not processed "
        "again; 0: none", low=0, after="mm_processor_kwargs",
    )  # fmt: skip
    media_io_kwargs: dict[str, Any] = setting(
        {}, OBJECT, _GROUP, "how media are read, by kind, such as {\"video\": {\"num_frames\": 32}}",
        after="mm_processor_cache_gb",
    )  # fmt: skip
    allowed_local_media_path: str = setting(
        "", TEXT, _GROUP, "directory whose files requests may name by file: addresses; default: none", after="media_io_kwargs"
    )
    allowed_media_domains: list[str] | None = setting(
        None, LIST, _GROUP, "hosts from which media may be fetched, by https and from public addresses; HOST:PORT: also by "
        "http and from private ones; *: any host; default: none", after="allowed_local_media_path",
    )  # fmt: skip
    language_model_only: bool = setting(
        False, FLAG, _GROUP, "the encoder is not loaded, and media are refused", after="allowed_media_domains"
    )
    skip_mm_profiling: bool = setting(
        False, FLAG, _GROUP, "reserve no memory for the encoder's activations; the cache gets it", after="language_model_only"
    )
    interleave_mm_strings: bool = setting(
        False, FLAG, _GROUP, "with chat templates that take plain text, media stay where the user put them between texts; "
        "default: they come first", after="skip_mm_profiling",
    )  # fmt: skip
    enable_mm_embeds: bool = setting(
        False, FLAG, _GROUP, "requests may have embeddings in place of images (image_embeds)", after="interleave_mm_strings"
    )
    mm_encoder_cache_size: int | None = setting(
        None, NUMBER, _GROUP, "embeddings of encoded media that the device keeps; default: those of the largest item or of "
        f"{CACHED_STEPS} largest steps", low=1, after="enable_mm_embeds",
    )  # fmt: skip


@dataclass(frozen=True)
class ModelMedia:
    """How a model reads media: `Config.features["media"]`."""

    family: MediaFamily
    config: Mapping[str, Any]  # the whole config.json with hf_overrides
    limits: Mapping[Modality, int]  # items of a prompt
    largest: Mapping[Modality, int]  # embeddings of an item
    hidden_size: int  # of the language model
    tower_values: int  # weights of the encoder

    @property
    def levels(self) -> int:
        """Return the embeddings per token."""
        return self.family.levels


@dataclass(frozen=True)
class EncoderCacheSize:
    """Sizes of the encoder cache of one device, in embeddings."""

    capacity: int
    step: int  # encoded in one step; a single item may have more


def media_of(config: "Config") -> ModelMedia | None:
    """Return how the model reads media; None: it does not."""
    return cast("ModelMedia | None", config.features.get("media"))


def encoder_cache_size(config: "Config") -> EncoderCacheSize | None:
    """Return the sizes of the encoder cache; None: the model reads no media."""
    media = media_of(config)
    if media is None:
        return None
    largest = min(max(media.largest.values()), config.max_model_len)
    default = max(largest, CACHED_STEPS * config.max_batched_tokens)
    return EncoderCacheSize(config.args.mm_encoder_cache_size or default, config.max_batched_tokens)


def modalities_of(config: "Config") -> list[Modality]:
    """Return the kinds of media that prompts may have."""
    media = media_of(config)
    return [] if media is None else [each for each in media.family.modalities if media.limits[each]]


def has_rotary_axes(config: "Config") -> bool:
    """Return whether rotary positions of images and videos have several axes."""
    media = media_of(config)
    return media is not None and media.family.rotary_axes > 1


def media_names(config: "Config") -> str:
    """Return a regular expression of the names of weights outside the language model; "": none of them is run."""
    return "" if media_of(config) is None else COMPOSITES[config.facts.architecture].renames[0][0]


def why_no_media(config: "Config", modality: Modality) -> str:
    """Return why an item is refused, to follow its name in an error: "is not supported by ..."; "": it is supported."""
    media, name = media_of(config), config.facts.architecture
    if media is not None:
        limit = media.limits[modality]
        if modality not in media.family.modalities:
            return f"is not supported by {name}, which reads {' and '.join(media.family.modalities)} only. Remove it"
        return "" if limit else f"is turned off by limit_mm_per_prompt of this server (0 for {modality}). Remove it"
    if _turned_off(config.args):
        return "is turned off by limit_mm_per_prompt or language_model_only of this server. Remove it"
    if "pooling" in config.features:
        return f"is not supported with pooling; got {name}. Remove it"
    if name in COMPOSITES:
        return f"is not supported: the encoder of {name} is not built, and only its text half is served. Remove it"
    return f"is not supported by {name}, which reads text only. Remove it"


def read_limits(given: Mapping[str, Any]) -> dict[Modality, int]:
    """Return `limit_mm_per_prompt` for every kind of media."""
    found: dict[Modality, int] = dict.fromkeys(MODALITIES, DEFAULT_LIMIT)
    for name, value in given.items():
        options = value if isinstance(value, Mapping) else {"count": value}
        count = options.get("count", DEFAULT_LIMIT)
        if unknown := set(options) - {"count", *PROFILE_OPTIONS}:
            raise ConfigError(f"limit_mm_per_prompt.{name} has no {', '.join(sorted(map(str, unknown)))}; it has count")
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise ConfigError(f"limit_mm_per_prompt.{name} must be an integer of at least 0; got {count!r}")
        if len(options) > 1:
            logger.warning("limit_mm_per_prompt.%s: only count has an effect; got %r", name, dict(options))
        if (modality := next((each for each in MODALITIES if each == name), None)) is not None:
            found[modality] = count
        elif count:
            raise ConfigError(
                f"limit_mm_per_prompt must be for {' or '.join(MODALITIES)}; got {name!r}. Remove it, or set it to 0"
            )
    return found


def _turned_off(args: Any) -> bool:
    return bool(args.language_model_only) or not any(read_limits(args.limit_mm_per_prompt).values())


CONFLICTS: tuple[Conflict, ...] = (
    Conflict(
        "prompts that attend to later tokens in chunks",
        lambda c: (media := media_of(c)) is not None and media.family.bidirectional == "prompt" and c.stages > 1,
        lambda c: (
            f"pipeline_parallel_size={c.stages} is not supported with {c.facts.architecture}, whose prompts attend to later "
            "tokens. Divide the model by tensor_parallel_size, or set limit_mm_per_prompt={'image': 0}"
        ),
    ),
    Conflict(
        "deep stacks over stages",
        lambda c: (media := media_of(c)) is not None and media.levels > 1 and c.stages > 1,
        lambda c: (
            f"pipeline_parallel_size={c.stages} is not supported with images in {c.facts.architecture}, which adds embeddings "
            "after its first layers. Divide the model by tensor_parallel_size, or set language_model_only"
        ),
    ),
)


class Media(Feature):
    name = "media"
    conflicts = CONFLICTS
    part = "quire.features.media.device:MediaPart"
    cache_salt = None  # items enter the prefix-cache keys of their pages (`cache/prefix.py`)

    def check(self, args: MediaArgs) -> None:
        read_limits(args.limit_mm_per_prompt)
        try:
            check_io(args.media_io_kwargs)
        except RequestError as error:
            raise ConfigError(str(error)) from None
        if args.allowed_local_media_path and not Path(args.allowed_local_media_path).is_dir():
            raise ConfigError(f"allowed_local_media_path must be a directory; got {args.allowed_local_media_path!r}")

    def resolve(self, args: Any, facts: "ModelFacts") -> ModelMedia | None:
        if facts.files.format != "hf" or facts.by_transformers or args.model_impl == "transformers":
            return None
        if facts.architecture not in COMPOSITES or _turned_off(args) or find_pooling(args, facts) is not None:
            return None
        with reading(facts.files.path, "the configuration of its encoder cannot be used"):
            config = whole_config(facts.files.path, args.hf_overrides)
            family = media_family(facts.architecture, config)
            if family is None:
                return None
            asked = read_limits(args.limit_mm_per_prompt)
            limits = {each: limit if each in family.modalities else 0 for each, limit in asked.items()}
            if not any(limits.values()):
                return None
            options = args.mm_processor_kwargs or {}
            largest = {
                each: family.max_tokens(each, {**read_processor(facts.files.path, each), **options})
                for each, limit in limits.items()
                if limit
            }
            return ModelMedia(family, config, limits, largest, facts.hidden_size, _tower_values(facts, config))

    def part_options(self, config: "Config") -> dict[str, Any] | None:
        media = media_of(config)
        if media is None:
            return None
        needs = self.memory(config, Sizes())
        return {"media": media, "facts": config.facts, "load_format": config.args.load_format, "seed": config.seed,
                "quantization": config.quantization, "one_by_one": bool(config.args.deterministic),
                "reserved": needs.reserved + max(0, needs.step - largest_step(config))}  # fmt: skip

    def memory(self, config: "Config", sizes: Sizes) -> Memory:  # noqa: ARG002
        """`Sizes.weights` counts all tensors of the files, divided among ranks; the encoder is whole on each, or not loaded."""
        media, size, element = media_of(config), encoder_cache_size(config), DTYPE_BYTES[config.dtype]
        counted = _stored_values(config.facts.architecture, config.facts.files.weights) * element // config.world
        if media is None or size is None:
            return Memory(weights=-counted)
        kept = size.capacity * media.levels * media.hidden_size * element
        step = 0 if config.args.skip_mm_profiling else _encoded_together(config, media) * _bytes_per_embedding(media, element)
        return Memory(weights=media.tower_values * element - counted, reserved=kept, step=step)


def _encoded_together(config: "Config", media: ModelMedia) -> int:
    """Return the most embeddings that the encoder computes at a time: those of a step, or of one item that has more."""
    items = {modality: min(size, config.max_model_len) for modality, size in media.largest.items()}
    most = max(config.max_batched_tokens, *items.values())
    return most if media.family.together is None else max(min(most, media.family.together), items.get("image", 0))


def read_processor(path: Path, modality: Modality) -> dict[str, Any]:
    """Return the settings of the checkpoint's image processor, or of its video processor if it has one of its own."""
    both = read_json(path / "processor_config.json", required=False)
    found = {**read_json(path / "preprocessor_config.json", required=False), **both, **_nested(both, "image_processor")}
    if modality == "video":
        found |= {**read_json(path / "video_preprocessor_config.json", required=False), **_nested(both, "video_processor")}
    return found


def _nested(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name)
    return value if isinstance(value, Mapping) else {}


def _tower_values(facts: "ModelFacts", config: Mapping[str, Any]) -> int:
    """Return the weights of the encoder: counted in the files, or estimated from its shapes."""
    if counted := _stored_values(facts.architecture, facts.files.weights):
        return counted
    return estimate_parameters({"num_hidden_layers": 24, "vocab_size": 0, **_vision(config)})


@cache
def _stored_values(architecture: str, files: tuple[Path, ...]) -> int:
    """Return the weights in files that belong to no part of the language model."""
    if architecture not in COMPOSITES:
        return 0
    pattern = COMPOSITES[architecture].renames[0][0]
    infos = (item for path in files if path.suffix == ".safetensors" for item in read_header(path).items())
    return sum(info.elements for name, info in infos if re.search(pattern, name))


def _vision(config: Mapping[str, Any]) -> dict[str, int]:
    vision = dict(_nested(config, "vision_config"))
    for ours, theirs in (("num_hidden_layers", "depth"), ("hidden_size", "embed_dim"), ("num_attention_heads", "num_heads")):
        vision.setdefault(ours, vision.get(theirs))
    return {name: value for name, value in vision.items() if isinstance(value, int)}


def _bytes_per_embedding(media: ModelMedia, element: int) -> int:
    """Return the estimated bytes of the encoder's activations: of a layer's attention and MLP, for each patch."""
    vision = _vision(media.config)
    hidden = vision.get("hidden_size", media.hidden_size)
    return PATCHES * element * (8 * hidden + 3 * vision.get("intermediate_size", 4 * hidden))
