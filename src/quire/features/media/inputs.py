"""Images and videos of a request, as its client or caller gives them: parts of messages, and `multi_modal_data`."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from quire.features.media.embeds import EMBEDS, Embeddings, embeds_of_data, embeds_of_part, has_embeds, holds_texts
from quire.features.media.io_options import check_io
from quire.files.reading import shown
from quire.types.errors import InvalidParameter, NotSupported
from quire.types.media import MODALITIES, Modality

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

# part type -> modality
PARTS: Mapping[str, Modality] = {
    "image_url": "image", "input_image": "image", "image": "image", "image_pil": "image", "image_embeds": "image",
    "video_url": "video", "input_video": "video", "video": "video",
}  # fmt: skip
_OTHER_PARTS = ("audio_url", "input_audio", "audio", "audio_embeds", "prompt_embeds", "input_file", "file")
MAX_UUID_CHARS = 256
_URL_FIELDS = {"url", "detail", "uuid"}
RGB_SHAPES = "[height, width, 3] or [3, height, width]"
DETAILS = ("auto", "low", "high", "original")  # of OpenAI's API; the model's image processor chooses the size


class PartPath(str):
    """The path of a part in the client's request, for errors. A class of its own, so that a client cannot send one."""


PART_PATH = "_where"  # key of a part that has a `PartPath`
_ROOT = re.compile(r"\w+")


def field_of(where: str) -> str:
    """Return the field of the request that has the part."""
    found = _ROOT.match(where)
    return found[0] if found else where


@dataclass(frozen=True)
class Pixels:
    """Decoded pixels of an image [height, width, 3] or a video [frames, height, width, 3], 8 bits each."""

    shape: tuple[int, ...]
    data: bytes
    fps: float = 1.0  # of a video


@dataclass(frozen=True)
class MediaRef:
    """An image or a video of a request, not yet fetched or decoded."""

    modality: Modality
    where: str  # of the part, for errors
    content: str | bytes | Pixels | Embeddings | None  # a URL, a file's bytes ...; None: what `uuid` named before
    uuid: str | None = None


@dataclass(frozen=True)
class MediaOptions:
    """mm_processor_kwargs and media_io_kwargs of a request."""

    processor: Mapping[str, Any] = field(default_factory=dict)
    io: Mapping[str, Any] = field(default_factory=dict)


NO_OPTIONS = MediaOptions()


def options_of(processor: Any, io: Any = None) -> MediaOptions:
    for name, value in (("mm_processor_kwargs", processor), ("media_io_kwargs", io)):
        if value is not None and not isinstance(value, Mapping):
            raise InvalidParameter(f"{name} must be an object; got {type(value).__name__}", name)
    check_io(io or {})
    return NO_OPTIONS if not processor and not io else MediaOptions(processor or {}, io or {})


# ---- parts of messages


def take_media(
    messages: Sequence[Mapping[str, Any]], local: bool = False
) -> tuple[Sequence[Mapping[str, Any]], list[MediaRef]]:
    """Return messages whose media parts have only their type, for chat templates, and the media in their order.

    local: parts may have objects of Python, such as PIL images.
    """
    refs: list[MediaRef] = []
    taken = []
    for i, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list | tuple) or not any(map(_is_media, content)):
            taken.append(message)
            continue
        parts = [
            _take(part, f"messages[{i}].content[{k}]", refs, local) if _is_media(part) else part
            for k, part in enumerate(content)
        ]
        taken.append({**message, "content": parts})
    return (taken if refs else messages), refs


def _is_media(part: Any) -> TypeGuard[Mapping[str, Any]]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    return isinstance(kind, str) and (kind in PARTS or kind in _OTHER_PARTS)


def _take(part: Mapping[str, Any], path: str, refs: list[MediaRef], local: bool) -> dict[str, str]:
    given = part.get(PART_PATH)
    where = given if isinstance(given, PartPath) else path
    kind = part["type"]
    if kind not in PARTS:
        raise NotSupported(f"{where}: parts of type {kind} are not supported. Send text, images or videos", field_of(where))
    refs.append(read_part(part, where, local))
    return {"type": PARTS[kind]}


def read_part(part: Mapping[str, Any], where: str, local: bool = False) -> MediaRef:
    """Read one part. where: its path in the request, for errors"""
    kind, modality = part["type"], PARTS[part["type"]]
    if part.get("file_id") is not None:
        raise NotSupported(
            f"{where}: file_id is not supported: no files are stored. Send the {modality} as {modality}_url", field_of(where)
        )
    key = {"input_image": "image_url", "input_video": "video_url"}.get(kind, kind)
    value: Any = part.get(key)
    uuid: Any = part.get("uuid")
    if kind == EMBEDS and value is not None:
        name = check_uuid(uuid, where)
        if local and not holds_texts(value):
            [ref] = read_data(modality, value, where, (name,))
            return ref
        return MediaRef(modality, where, embeds_of_part(value, where, field_of(where)), name)
    detail: Any = part.get("detail")
    if isinstance(value, Mapping):
        if unknown := set(value) - _URL_FIELDS:
            raise InvalidParameter(
                f"{where}.{key} has no {sorted(map(str, unknown))[0]!r:.80}; it has url and uuid", field_of(where)
            )
        value, uuid, detail = value.get("url"), value.get("uuid", uuid), value.get("detail", detail)
    if detail is not None and not (isinstance(detail, str) and detail in DETAILS):
        raise InvalidParameter(f"{where}: detail must be one of {', '.join(DETAILS)}; got {shown(detail)}", field_of(where))
    uuid = check_uuid(uuid, where)
    if isinstance(value, str) or (value is None and uuid is not None):
        return MediaRef(modality, where, value, uuid)
    if local and value is not None:
        [ref] = read_data(modality, value, where, (uuid,))
        return ref
    needed = "tensors" if kind == EMBEDS else "a URL"
    got = "nothing" if value is None else type(value).__name__
    remedy = ". `source` is read by /v1/messages only: send image_url" if "source" in part else ""
    raise InvalidParameter(f"{where}: a part of type {kind} needs {key}: {needed}; got {got}{remedy}", field_of(where))


def check_uuid(uuid: Any, where: str) -> str | None:
    if uuid is None or (isinstance(uuid, str) and 0 < len(uuid) <= MAX_UUID_CHARS):
        return uuid
    raise InvalidParameter(f"{where}: uuid must be a text of 1 to {MAX_UUID_CHARS} characters", field_of(where))


def texts_of(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield each text of the messages with its path in the request."""
    for i, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, str):
            yield f"messages[{i}].content", content
        for k, part in enumerate(content if isinstance(content, list | tuple) else ()):
            for value in part.values() if isinstance(part, Mapping) else (part,):
                if isinstance(value, str) and not isinstance(value, PartPath):
                    yield f"messages[{i}].content[{k}]", value


# ---- multi_modal_data


def read_multi_modal(data: Any, uuids: Any = None) -> list[MediaRef]:
    """Return the media of a prompt's `multi_modal_data`: for each modality, one or a list of them."""
    if not isinstance(data, Mapping):
        raise InvalidParameter(f"multi_modal_data must be a dict; got {type(data).__name__}", "multi_modal_data")
    if uuids is not None and not isinstance(uuids, Mapping):
        raise InvalidParameter(f"multi_modal_uuids must be a dict; got {type(uuids).__name__}", "multi_modal_uuids")
    for name in (*data, *(uuids or ())):
        if name not in MODALITIES:
            raise NotSupported(f"multi_modal_data has no {name!r:.80}; it has {' and '.join(MODALITIES)}", "multi_modal_data")
    refs: list[MediaRef] = []
    for name in MODALITIES:
        if name in data or name in (uuids or {}):
            given = (uuids or {}).get(name)
            names = [given] if given is None or isinstance(given, str) else list(given)
            refs += read_data(name, data.get(name), f"multi_modal_data[{name!r}]", names)
    return refs


def read_data(modality: Modality, data: Any, where: str, uuids: Sequence[Any] = (None,)) -> list[MediaRef]:
    """Return one item, or a list of them. uuids: one for each item; a single None: none has one"""
    items = _as_items(modality, data, where)
    if len(uuids) != len(items):
        if list(uuids) != [None]:
            raise InvalidParameter(
                f"multi_modal_uuids must have one name per item of {where}; got {len(uuids)} for {len(items)}",
                "multi_modal_uuids",
            )
        uuids = [None] * len(items)
    refs = []
    for k, (item, uuid) in enumerate(zip(items, uuids, strict=True)):
        path = where if len(items) == 1 else f"{where}[{k}]"
        if isinstance(item, MediaRef):
            refs.append(item)
            continue
        name = check_uuid(uuid, path)
        if item is None and name is None:
            raise InvalidParameter(f"{path} is None. Give the {modality}, or the uuid of an earlier one", field_of(where))
        refs.append(MediaRef(modality, path, _content(modality, item, path), name))
    return refs


def _as_items(modality: Modality, data: Any, where: str) -> list[Any]:
    if modality == "image" and has_embeds(data):
        return list(embeds_of_data(data, where, field_of(where)))
    if isinstance(data, list):
        single = modality == "video" and data and not isinstance(data[0], MediaRef) and _dimensions(data[0]) <= 3
        return [data] if single else data
    return [data]


def _dimensions(item: Any) -> int:
    """Return 4 for what is a video by itself, 3 for a frame or an image."""
    if item is None or isinstance(item, tuple | list | str | bytes):
        return 4
    return len(getattr(item, "shape", (0, 0, 0)))


def _content(modality: Modality, item: Any, where: str) -> str | bytes | Pixels | Embeddings | None:
    if item is None or isinstance(item, str | bytes | Pixels | Embeddings):
        return item
    if modality == "image" and has_embeds(item):
        found = embeds_of_data(item, where, field_of(where))
        if len(found) != 1:
            raise InvalidParameter(f"{where}: an item of a list must be one image; got {len(found)}", field_of(where))
        return found[0]
    if modality == "video":
        return _video_pixels(item, where)
    if isinstance(item, os.PathLike):
        raise InvalidParameter(f"{where} must be an image, not a path. Open it with PIL.Image.open", field_of(where))
    return _image_pixels(item, where)


def _image_pixels(image: Any, where: str) -> Pixels:
    """Return the pixels of a PIL image or an array `RGB_SHAPES` of uint8."""
    if hasattr(image, "getchannel"):
        from quire.features.media.workers.images import check_size, to_rgb

        check_size(*image.size)
        found = to_rgb(cast("Image", image))
        return Pixels((found.height, found.width, 3), found.tobytes())
    array = _as_array(image, where, f"a PIL image, or an array {RGB_SHAPES} of uint8")
    if array.ndim == 3 and array.shape[0] == 3 != array.shape[2]:
        array = array.transpose(1, 2, 0)
    if array.ndim != 3 or array.shape[2] != 3 or str(array.dtype) != "uint8":
        raise _wrong_array(array, where, RGB_SHAPES)
    return Pixels(array.shape, array.tobytes())


def _video_pixels(video: Any, where: str) -> Pixels:
    """Return the pixels of frames, or of a tuple of frames and metadata with `fps`."""
    facts: Any = {}
    if isinstance(video, tuple) and len(video) == 2 and isinstance(video[1], Mapping):
        video, facts = video
    fps = facts.get("fps") or 1.0
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < 1e6:
        raise InvalidParameter(f"{where}: fps must be a number above 0; got {fps!r:.80}", field_of(where))
    if isinstance(video, list):
        frames = [_image_pixels(frame, f"{where}[{i}]") for i, frame in enumerate(video)]
        if len({frame.shape for frame in frames}) != 1:
            raise InvalidParameter(f"{where}: the frames of a video must have one size", field_of(where))
        return Pixels((len(frames), *frames[0].shape), b"".join(frame.data for frame in frames), float(fps))
    array = _as_array(video, where, "an array [frames, height, width, 3] of uint8, or a list of frames")
    if array.ndim != 4 or array.shape[3] != 3 or str(array.dtype) != "uint8" or not len(array):
        raise _wrong_array(array, where, "[frames, height, width, 3]")
    return Pixels(array.shape, array.tobytes(), float(fps))


def _as_array(value: Any, where: str, wanted: str) -> "np.ndarray[Any, Any]":
    if not hasattr(value, "__array__"):
        raise InvalidParameter(f"{where} must be {wanted}; got {type(value).__name__}", field_of(where))
    import numpy as np

    return np.ascontiguousarray(value)


def _wrong_array(array: "np.ndarray[Any, Any]", where: str, wanted: str) -> InvalidParameter:
    shape = "[" + ", ".join(map(str, array.shape)) + "]"
    return InvalidParameter(f"{where} must be {wanted} of uint8; got {shape} of {array.dtype}", field_of(where))
