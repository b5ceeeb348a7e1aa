"""Images that a request brings as embeddings, which the client computed with the encoder and its projector.

They come alone or with tensors that say how they are laid out, such as `image_grid_thw` of Qwen-VL: served as base64 texts of
what torch.save writes, in Python as tensors or arrays. The media process reads and checks them (`workers/embeds.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from quire.types.errors import InvalidParameter

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

EMBEDS = "image_embeds"
GRID = "image_grid_thw"


class GivenTensor(msgspec.Struct, array_like=True, frozen=True):
    data: bytes
    dtype: str = ""  # of numpy; "": `data` is what torch.save writes, in base64
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Embeddings:
    """The embeddings of one image, under the name EMBEDS, and tensors about their layout."""

    tensors: Mapping[str, GivenTensor]


def embeds_of_part(value: Any, where: str, field: str) -> Embeddings:
    """Return what a part of a message has: a base64 text, or an object of them by name."""
    texts = {EMBEDS: value} if isinstance(value, str) else value
    if not isinstance(texts, Mapping) or EMBEDS not in texts or not all(isinstance(text, str) for text in texts.values()):
        raise InvalidParameter(
            f"{where}: {EMBEDS} must be the base64 text of a tensor saved by torch.save, or an object of such texts that has "
            f"{EMBEDS}",
            field,
        )
    return Embeddings({name: GivenTensor(text.encode("utf-8", "replace")) for name, text in texts.items()})


def holds_texts(value: Any) -> bool:
    """Return whether a part has base64 texts, and not tensors."""
    return isinstance(value, str) or (isinstance(value, Mapping) and any(isinstance(text, str) for text in value.values()))


def has_embeds(item: Any) -> bool:
    """Return whether an item of `multi_modal_data` is embeddings: a dict of them, or an array of floats."""
    if isinstance(item, Mapping):
        return True
    kind, shape = str(getattr(item, "dtype", "")), tuple(getattr(item, "shape", ()))
    return "float" in kind and len(shape) in (2, 3) and shape[-1] != 3  # or it is an image of floats, which is refused


def embeds_of_data(item: Any, where: str, field: str) -> list[Embeddings]:
    """Return the embeddings of one or more images: an array [tokens, hidden size] of one, an array [images, tokens, hidden
    size] or a list of arrays, or a dict that has it as EMBEDS and arrays with a row for each image."""
    given: Mapping[Any, Any] = item if isinstance(item, Mapping) else {EMBEDS: item}
    if EMBEDS not in given:
        raise InvalidParameter(f"{where} must have {EMBEDS}; it has {', '.join(map(str, given))[:80]}", field)
    listed = isinstance(given[EMBEDS], list | tuple)
    each = [_array(one, where, field) for one in given[EMBEDS]] if listed else [_array(given[EMBEDS], where, field)]
    if not listed and each[0].ndim == 3:
        each = list(each[0])
    others = {name: _rows(_array(value, where, field)) for name, value in given.items() if name != EMBEDS}
    if len(each) == 1 and len(others.get(GRID, ())) > 1:
        each = _divided(each[0], others[GRID], where, field)
    for name, rows in others.items():
        if len(rows) != len(each):
            raise InvalidParameter(f"{where}: {name} has {len(rows)} rows for {len(each)} images", field)
    own = [{EMBEDS: one, **{str(name): rows[i] for name, rows in others.items()}} for i, one in enumerate(each)]
    return [Embeddings({name: _given(array) for name, array in one.items()}) for one in own]


def _array(value: Any, where: str, field: str) -> "Array":
    """Return a tensor of torch or an array. torch is not imported for it."""
    import numpy as np

    if hasattr(value, "detach"):
        if str(value.layout) != "torch.strided":
            raise InvalidParameter(f"{where}: tensors must be dense; got {value.layout}", field)
        value = value.detach().cpu()
        value = value.float() if value.is_floating_point() else value
    if not hasattr(value, "__array__"):
        raise InvalidParameter(f"{where} must be tensors or arrays; got {type(value).__name__}", field)
    found = np.asarray(value)
    if found.dtype.kind not in "fiu":
        raise InvalidParameter(f"{where} must be arrays of numbers; got {found.dtype}", field)
    return found.astype(np.float32 if found.dtype.kind == "f" else np.int64)


def _rows(array: "Array") -> "Array":
    """Return the array of one image with a first axis for images."""
    return array[None] if array.ndim == 1 else array


def _divided(embeds: "Array", grids: "Array", where: str, field: str) -> "list[Array]":
    """Return the embeddings of several images, which have as many as the products of their grids, by a common divisor."""
    import numpy as np

    sizes = grids.reshape(len(grids), -1).prod(1)
    if embeds.ndim != 2 or (sizes <= 0).any() or (len(embeds) * sizes % sizes.sum()).any():
        raise InvalidParameter(f"{where}: {len(embeds)} embeddings cannot be divided by {GRID}", field)
    return np.split(embeds, np.cumsum(len(embeds) * sizes // sizes.sum())[:-1])


def _given(array: "Array") -> GivenTensor:
    return GivenTensor(array.tobytes(), str(array.dtype), array.shape)


def encoded(embeds: Embeddings) -> bytes:
    """Return the tensors as content of a job."""
    return msgspec.msgpack.encode(dict(sorted(embeds.tensors.items())))


def decoded(content: bytes) -> Mapping[str, GivenTensor]:
    return msgspec.msgpack.decode(content, type=dict[str, GivenTensor])


def check_names(names: Sequence[str], needed: Sequence[str]) -> None:
    """Raise an error unless these are the tensors of an image of the family."""
    for name in names:
        if name not in (EMBEDS, *needed):
            raise InvalidParameter(f"it has {name!r:.80}; this model takes {', '.join((EMBEDS, *needed))}")
    for name in needed:
        if name not in names:
            raise InvalidParameter(f"this model needs {name} with {EMBEDS}")
