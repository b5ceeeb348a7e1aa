"""Read and check embeddings that a request brings in place of an image: in a media process, as clients made the content."""

import base64
import binascii
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.features.media.embeds import EMBEDS, GivenTensor, check_names, decoded
from quire.features.media.families.base import Arrays, Expansion, MediaFamily, Tokenize
from quire.features.media.families.fields import text_width
from quire.files.pickled import read_tensor
from quire.types.errors import InvalidParameter, NotSupported

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

MAX_SIDE = 1 << 16  # of a layout
MAX_AREA = 1 << 26  # of a layout: the pixels or patches of an image
MAX_VALUE = 65504.0  # the largest float16; the model overflows with larger ones


def read_embeds(content: bytes, family: MediaFamily, most_bytes: int) -> Arrays:
    """Return the embeddings and the other tensors of one image. most_bytes: of a tensor"""
    if family.embeds_fields is None:
        raise NotSupported(f"{EMBEDS} are not supported by this model. Send the image itself")
    given = decoded(content)
    check_names(list(given), list(family.embeds_fields))
    found = {name: _tensor(name, tensor, most_bytes) for name, tensor in given.items()}
    embeds = found[EMBEDS][0] if found[EMBEDS].ndim == 3 and len(found[EMBEDS]) == 1 else found[EMBEDS]
    columns = family.levels * text_width(family.config)
    if embeds.dtype.kind != "f" or embeds.ndim != 2 or embeds.shape[1] != columns or not len(embeds):
        raise InvalidParameter(f"{EMBEDS} must be floats [tokens, {columns}]; got {list(embeds.shape)} of {embeds.dtype}")
    if not np.abs(embeds).max() <= MAX_VALUE:  # also if one is NaN
        raise InvalidParameter(f"{EMBEDS} must be finite numbers of at most {MAX_VALUE:.0f}")
    layout = {name: _layout(name, found[name], shape) for name, shape in family.embeds_fields.items()}
    return {EMBEDS: np.ascontiguousarray(embeds, np.float32), **layout}


def expand_embeds(arrays: Arrays, family: MediaFamily, tokenize: Tokenize) -> Expansion:
    """Return the tokens of an image that is given as embeddings."""
    embeds = arrays[EMBEDS]
    layout = {name: array for name, array in arrays.items() if name != EMBEDS}
    expansion = family.expand("image", family.arrays_of_embeds(len(embeds), layout), tokenize)
    tokens = sum(count for _, count in expansion.embedded) if expansion.embedded else len(expansion.tokens)
    if tokens != len(embeds):
        raise InvalidParameter(f"{EMBEDS} has {len(embeds)} rows; this model has {tokens} tokens for such an image")
    return expansion


def _tensor(name: str, given: GivenTensor, most_bytes: int) -> "Array":
    if given.dtype:
        return np.frombuffer(given.data, given.dtype).reshape(given.shape)
    try:
        data = base64.b64decode(given.data.translate(None, b" \t\r\n"), validate=True)
    except binascii.Error:
        raise InvalidParameter(f"the base64 of {name} is not valid") from None
    found = read_tensor(data, most_bytes)
    if found is None:
        raise InvalidParameter(f"{name} must be one dense tensor of numbers, saved by torch.save")
    return found


def _layout(name: str, array: "Array", shape: tuple[int, ...]) -> "Array":
    """Return sizes of an image in the shape that the image processor gives them."""
    if array.dtype.kind != "i" or array.size != np.prod(shape) or array.ndim > len(shape):
        raise InvalidParameter(f"{name} must be integers {list(shape)}; got {list(array.shape)} of {array.dtype}")
    sizes = [int(size) for size in array.flat]
    if any(not 0 < size <= MAX_SIDE for size in sizes) or np.prod(sizes, dtype=np.float64) > MAX_AREA:
        raise InvalidParameter(f"{name} must be the sizes of an image; got {sizes}")
    return array.astype(np.int64).reshape(shape)
